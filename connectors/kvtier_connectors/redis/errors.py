"""What Redis and its driver can answer, and which outcome that is. One table for each."""

from __future__ import annotations

from typing import Final

from redis import exceptions as redis_errors

from kvtier.errors import (
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier_connectors.threads import without_frames

#: The first word of an error reply. What is not here is a plain ``ResponseError``.
REPLIES: Final[dict[str, type[redis_errors.RedisError]]] = {
    "ASK": redis_errors.AskError,
    "CLUSTERDOWN": redis_errors.ClusterDownError,
    "CROSSSLOT": redis_errors.ClusterCrossSlotError,
    "LOADING": redis_errors.BusyLoadingError,
    "MASTERDOWN": redis_errors.MasterDownError,
    "MOVED": redis_errors.MovedError,
    "NOAUTH": redis_errors.AuthenticationError,
    "NOPERM": redis_errors.NoPermissionError,
    "OOM": redis_errors.OutOfMemoryError,
    "READONLY": redis_errors.ReadOnlyError,
    "TRYAGAIN": redis_errors.TryAgainError,
    "WRONGPASS": redis_errors.AuthenticationError,
    "WRONGTYPE": redis_errors.DataError,
}

#: The outcome for an error of the driver or a socket. The most specific class counts.
ERRORS: Final[dict[type[BaseException], type[ConnectorError]]] = {
    redis_errors.AskError: ConnectorUnavailableError,
    redis_errors.AuthenticationError: ConnectorRefusedError,
    redis_errors.AuthenticationWrongNumberOfArgsError: ConnectorRefusedError,
    redis_errors.AuthorizationError: ConnectorRefusedError,
    redis_errors.BusyLoadingError: ConnectorUnavailableError,
    redis_errors.ClusterError: ConnectorUnavailableError,
    redis_errors.ConnectionError: ConnectorUnavailableError,
    redis_errors.DataError: ConnectorDataError,
    redis_errors.InvalidResponse: ConnectorDataError,
    redis_errors.NoPermissionError: ConnectorRefusedError,
    redis_errors.OutOfMemoryError: ConnectorRefusedError,
    redis_errors.ReadOnlyError: ConnectorUnavailableError,
    redis_errors.RedisClusterException: ConnectorUnavailableError,
    redis_errors.RedisError: ConnectorUnavailableError,
    redis_errors.ResponseError: ConnectorRefusedError,
    redis_errors.TimeoutError: ConnectorTimeoutError,
    redis_errors.TryAgainError: ConnectorUnavailableError,
    TimeoutError: ConnectorTimeoutError,
    OSError: ConnectorUnavailableError,
}


def reply_error(text: str) -> redis_errors.RedisError:
    """Return the driver's error for an error reply (without its leading minus)."""
    word, _, rest = text.partition(" ")
    kind = REPLIES.get(word)
    if kind is None:
        return redis_errors.ResponseError(text)
    if not issubclass(kind, redis_errors.AskError):
        return kind(text)
    try:
        # It is read from what follows its first word.
        return kind(rest)
    except ValueError:
        return redis_errors.ResponseError(f"a redirection to nowhere: {text}")


def translated(error: Exception) -> ConnectorError:
    """Return the outcome that an error is, with the error as its cause."""
    for kind in type(error).__mro__:
        if kind in ERRORS:
            outcome = ERRORS[kind](str(error))
            outcome.__cause__ = error
            return without_frames(outcome)
    raise AssertionError(f"no outcome for {type(error).__name__}") from error
