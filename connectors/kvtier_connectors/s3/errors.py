"""What S3 and boto3 can answer, and which outcome that is. One table for each."""

from __future__ import annotations

from typing import Any, Final

from botocore import exceptions as boto_errors
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from kvtier.errors import (
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)

#: The outcome for a code of S3. One that is not here goes by its status: 4xx is a refusal, and
#: anything else passes.
CODES: Final[dict[str, type[ConnectorError]]] = {
    "BadDigest": ConnectorDataError,
    "InvalidDigest": ConnectorDataError,
    "XAmzContentChecksumMismatch": ConnectorDataError,
    "XAmzContentSHA256Mismatch": ConnectorDataError,
    "ConditionalRequestConflict": ConnectorUnavailableError,
    "OperationAborted": ConnectorUnavailableError,
    "RequestTimeout": ConnectorTimeoutError,
    "RequestTimeTooSkewed": ConnectorRefusedError,
    "SlowDown": ConnectorUnavailableError,
    "ThrottlingException": ConnectorUnavailableError,
    "TooManyRequests": ConnectorUnavailableError,
    "InsufficientStorage": ConnectorRefusedError,
    "QuotaExceeded": ConnectorRefusedError,
    "429": ConnectorUnavailableError,
    "507": ConnectorRefusedError,
}

#: The outcome for an error of the driver. The most specific class counts.
ERRORS: Final[dict[type[BaseException], type[ConnectorError]]] = {
    boto_errors.ConnectTimeoutError: ConnectorTimeoutError,
    boto_errors.ReadTimeoutError: ConnectorTimeoutError,
    boto_errors.NoCredentialsError: ConnectorRefusedError,
    boto_errors.PartialCredentialsError: ConnectorRefusedError,
    boto_errors.CredentialRetrievalError: ConnectorRefusedError,
    boto_errors.ProfileNotFound: ConnectorRefusedError,
    boto_errors.ParamValidationError: ConnectorRefusedError,
    boto_errors.NoRegionError: ConnectorRefusedError,
    boto_errors.ChecksumError: ConnectorDataError,
    boto_errors.FlexibleChecksumError: ConnectorDataError,
    # No XML where there should be some; a number that is none.
    ResponseParserError: ConnectorDataError,
    ValueError: ConnectorDataError,
    boto_errors.BotoCoreError: ConnectorUnavailableError,
    HTTPError: ConnectorUnavailableError,
    OSError: ConnectorUnavailableError,
}

#: What a thread may meet.
MET: Final = (
    boto_errors.BotoCoreError,
    boto_errors.ClientError,
    HTTPError,
    OSError,
    ResponseParserError,
    ValueError,
)


def status_of(error: boto_errors.ClientError) -> int:
    """Return the HTTP status of an answer."""
    response: Any = error.response
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_missing(error: boto_errors.ClientError) -> bool:
    """Tell whether the object, and not its bucket, is not there.

    An answer to HEAD has no body, and so no code but its status.
    """
    response: Any = error.response
    return response.get("Error", {}).get("Code") in {"NoSuchKey", "404", "NotFound"}


def translated(error: Exception) -> ConnectorError:
    """Return the outcome that an error is."""
    if isinstance(error, boto_errors.ClientError):
        response: Any = error.response
        code = str(response.get("Error", {}).get("Code", ""))
        refused = 400 <= status_of(error) < 500
        plain = ConnectorRefusedError if refused else ConnectorUnavailableError
        return CODES.get(code, plain)(str(error))
    for kind in type(error).__mro__:
        if kind in ERRORS:
            return ERRORS[kind](str(error))
    raise AssertionError(f"no outcome for {type(error).__name__}") from error
