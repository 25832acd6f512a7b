"""``kvtier warm`` and ``kvtier pin``: prompts that a running engine computes ahead of requests."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import SplitResult

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cache.tenancy.pins import check_pin_seconds
from kvtier.cli.secrets import bearer, read_salt, server_url
from kvtier.constants import MIB
from kvtier.errors import ConfigError, TierUnavailableError

_LINES_MAX: Final = 1_000_000
_LINE_BYTES_MAX: Final = 16 * MIB
_ANSWER_BYTES_MAX: Final = 16 * MIB
_ANSWER_S_MAX: Final = 600.0

_Url = Annotated[str, typer.Option(help="Where kvtier-serve listens: http://HOST:PORT.")]
_File = Annotated[
    Path,
    typer.Option(
        "--file", help='Prompts, one JSON object a line: {"prompt": …} or {"messages": …}.'
    ),
]
_Salt = Annotated[
    Path | None,
    typer.Option(help="File with the cache_salt of all prompts; - reads it from stdin."),
]
_Key = Annotated[
    str, typer.Option(envvar="KVTIER_API_KEY", show_envvar=False, help="The server's key.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(slots=True)
class _Totals:
    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    held_tokens: int = 0
    pinned_tokens: int = 0


def warm(
    url: _Url,
    file: _File,
    salt_file: _Salt = None,
    api_key: _Key = "",
    json_output: _Json = False,  # noqa: FBT002
) -> None:
    """Have prompts computed and stored, so that later requests find them."""
    totals = _send_all(url, file, salt_file, api_key, {})
    _tell(totals, json_output=json_output)


def pin(
    url: _Url,
    file: _File,
    seconds: Annotated[float, typer.Option(help="How long they are to stay.")],
    salt_file: _Salt = None,
    api_key: _Key = "",
    json_output: _Json = False,  # noqa: FBT002
) -> None:
    """Have prompts computed, stored and kept from eviction; exit status 1 unless all of it is."""
    check_pin_seconds("--seconds", seconds)
    totals = _send_all(url, file, salt_file, api_key, {"pin": seconds})
    _tell(totals, json_output=json_output, pinned=True)
    if totals.pinned_tokens < totals.held_tokens:
        raise typer.Exit(1)


def _send_all(
    url: str, file: Path, salt_file: Path | None, api_key: str, hints: dict[str, float]
) -> _Totals:
    where = server_url("--url", url)
    salt = {} if salt_file is None else {"cache_salt": read_salt(salt_file)}
    prompts = [(number, {**body, **salt}) for number, body in _prompts(file)]
    headers = {"content-type": "application/json", **bearer(api_key)}
    totals = _Totals()
    with closing(_connection(where)) as connection, _progress() as progress:
        for number, body in progress.track(prompts, description="warming"):
            if hints:
                body["kvtier"] = {**body.get("kvtier", {}), **hints}
            path = where.path.rstrip("/") + "/v1/kvtier/warm"
            answer = _post(connection, path, headers, body, f"{file}:{number}")
            try:
                _add(totals, answer)
            except (LookupError, TypeError, AttributeError) as error:
                raise TierUnavailableError(f"{url}: not an answer of kvtier-serve") from error
    return totals


def _prompts(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line's number and object. Raises ``ConfigError`` that names the line."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                if number > _LINES_MAX or len(line) > _LINE_BYTES_MAX:
                    raise ConfigError(f"{file}:{number} is beyond what is taken")
                yield number, _prompt(line, f"{file}:{number}")
    except OSError as error:
        raise ConfigError(f"--file: {error}") from error


def _prompt(line: bytes, where: str) -> dict[str, Any]:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if not isinstance(body, dict) or not isinstance(body.get("kvtier", {}), dict):
        raise ConfigError(f'{where}: allowed is an object with "prompt" or "messages"')
    return body


def _connection(where: SplitResult) -> http.client.HTTPConnection:
    assert where.hostname is not None, "a URL that was checked"
    secure = where.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    return kind(where.hostname, where.port, timeout=_ANSWER_S_MAX)


def _post(
    connection: http.client.HTTPConnection,
    path: str,
    headers: dict[str, str],
    body: dict[str, Any],
    where: str,
) -> dict[str, Any]:
    try:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        data = response.read(_ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        raise TierUnavailableError(f"{where}: no answer from the server: {error!r}") from error
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = {}
    if response.status != http.HTTPStatus.OK or not isinstance(answer, dict):
        fault = answer.get("error") if isinstance(answer, dict) else None
        told = fault.get("message") if isinstance(fault, dict) else None
        raise TierUnavailableError(f"{where}: {response.status} {told or response.reason}")
    return answer


def _add(totals: _Totals, answer: dict[str, Any]) -> None:
    details = answer["usage"]["prompt_tokens_details"]
    totals.prompts += len(answer["prompts"])
    totals.prompt_tokens += answer["usage"]["prompt_tokens"]
    totals.cached_tokens += details["cached_tokens"]
    totals.held_tokens += sum(each["held_tokens"] for each in answer["prompts"])
    totals.pinned_tokens += details["kvtier"].get("pinned", 0)


def _tell(totals: _Totals, *, json_output: bool, pinned: bool = False) -> None:
    figures = {name: getattr(totals, name) for name in totals.__slots__}
    if not pinned:
        del figures["pinned_tokens"]
    if json_output:
        typer.echo(json.dumps(figures))
        return
    stays = f", {totals.pinned_tokens} pinned" if pinned else ""
    typer.echo(
        f"{totals.prompts} prompts of {totals.prompt_tokens} tokens: {totals.cached_tokens} were "
        f"there, {totals.held_tokens} are held{stays}"
    )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
