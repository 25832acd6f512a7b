"""Asking a server's control plane: one request, one answer, and what went wrong in a sentence."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.error import HTTPError

import typer

from kvtier.cli.secrets import bearer, server_url
from kvtier.constants import CONTROL_KEYS_MAX, CONTROL_WARM_S_MAX, WIRE_KEY_BYTES_MAX
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.token_file import read_token

_ANSWER_S_MAX: Final = CONTROL_WARM_S_MAX + 30.0
_ANSWER_BYTES_MAX: Final = 1 << 22
_KEYS_BYTES_MAX: Final = 1 << 30

Url = Annotated[str, typer.Argument(metavar="URL", help="Where operators look: --http.")]
TokenFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="A file with a token, or lines 'name token'.")
]
TokenName = Annotated[str | None, typer.Option(metavar="NAME", help="Which line of it.")]
ApiKey = Annotated[
    str, typer.Option(envvar="KVTIER_API_KEY", show_envvar=False, help="The server's key.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Credential = Annotated[
    str | None, typer.Option(metavar="NAME", help="Whose objects; needs an operator's token.")
]
Key = Annotated[
    list[str] | None, typer.Option(metavar="HEX", help="An object by its key; repeatable.")
]
Keys = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Keys in hexadecimal, one a line; - is stdin.")
]
All = Annotated[bool, typer.Option("--all", help="All objects of the credential.")]


@dataclass(frozen=True, slots=True)
class Server:
    """Where a control plane is, and the token for it."""

    url: str
    token: str = field(default="", repr=False)

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, or_at: str = ""
    ) -> dict[str, Any]:
        """Return what the server answers, which has it ``or_at`` another path.

        Raises ``TierUnavailableError`` for anything but a success, also where it is no cache
        server.
        """
        headers = {"content-type": "application/json", **bearer(self.token)}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 - http or https
            self.url + path, data, headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S_MAX) as answer:  # noqa: S310
                found = json.loads(answer.read(_ANSWER_BYTES_MAX))
        except HTTPError as error:
            with error:
                if or_at and error.code in {404, 405}:
                    return self.ask(method, or_at, body)
                raise TierUnavailableError(f"{self.url}: {_why(error)}") from error
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            raise TierUnavailableError(f"{self.url}: no answer of a server ({error})") from error
        if not isinstance(found, dict):
            raise TierUnavailableError(f"{self.url}: the answer is not one of a cache server")
        return found


def server_at(url: str, token_file: str | None, token_name: str | None, api_key: str) -> Server:
    """Return the server of a URL and the token to be shown. Raises ``ConfigError``."""
    where = server_url("URL", url)
    token = chosen_token(token_file, token_name, api_key)
    return Server(f"{where.scheme}://{where.netloc}", token)


def chosen_token(token_file: str | None, token_name: str | None, api_key: str) -> str:
    """Return the token that the options name; empty for none. Raises ``ConfigError``."""
    if token_file is not None and api_key:
        raise ConfigError("--token-file and --api-key (KVTIER_API_KEY): allowed is one of them")
    if token_name is not None and token_file is None:
        raise ConfigError("--token-name needs --token-file")
    return api_key if token_file is None else read_token(token_file, token_name).decode("latin-1")


def selections(
    credential: str | None,
    key: list[str] | None,
    keys: Path | None,
    *,
    everything: bool,
    also: str = "",
) -> Iterator[dict[str, Any]]:
    """Yield what is chosen, in as many parts as one request holds each.

    Raises ``ConfigError`` where nothing is, or too much; it tells ``also``, what else is allowed.
    """
    whose = {} if credential is None else {"credential": credential}
    named = [_checked(each, "--key") for each in key or ()]
    named += [] if keys is None else _read_keys(keys)
    if everything == bool(named):
        raise ConfigError(f"what is meant? Allowed are --key and --keys, or --all{also}")
    if everything:
        yield {**whose, "all": True}
    for start in range(0, len(named), CONTROL_KEYS_MAX):
        yield {**whose, "keys": named[start : start + CONTROL_KEYS_MAX]}


def _read_keys(path: Path) -> list[str]:
    try:
        if str(path) == "-":
            text = sys.stdin.read(_KEYS_BYTES_MAX)
        else:
            with path.open(encoding="ascii", errors="replace") as file:
                text = file.read(_KEYS_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"--keys: {error}") from error
    lines = enumerate(text.splitlines(), 1)
    return [_checked(line.strip(), f"{path}:{number}") for number, line in lines if line.strip()]


def _checked(key: str, where: str) -> str:
    try:
        nbytes = len(bytes.fromhex(key))
    except ValueError:
        nbytes = 0
    if not 1 <= nbytes <= WIRE_KEY_BYTES_MAX:
        allowed = f"a key of 1 to {WIRE_KEY_BYTES_MAX} bytes in hexadecimal"
        raise ConfigError(f"{where}: allowed is {allowed}")
    return key


def _why(error: HTTPError) -> str:
    """Return what a server says of its refusal, or that it is not one of ours."""
    try:
        fault = json.loads(error.read(_ANSWER_BYTES_MAX))["error"]
        message, word = fault["message"], fault["type"]
    except (OSError, HTTPException, ValueError, RecursionError, LookupError, TypeError):
        message = word = None
    no_path = error.code in {404, 405} and word != "unknown_credential"
    if message is None or no_path:
        return f"this is no cache server of KVTier (kvtier daemon): {error.code} {error.reason}"
    return f"{message} (--token-file)" if error.code == 401 else str(message)
