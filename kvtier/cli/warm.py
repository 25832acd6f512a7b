"""What ``kvtier warm``, ``pin`` and ``unpin`` do with prompts: a running engine computes them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli.secrets import bearer, read_salt, server_url
from kvtier.constants import MIB
from kvtier.errors import ConfigError, TierUnavailableError

_FOR_COMPUTING: Final = ("kvtier", "priority")
_LINES_MAX: Final = 1_000_000
_LINE_BYTES_MAX: Final = 16 * MIB
_ANSWER_BYTES_MAX: Final = 16 * MIB
_ANSWER_S_MAX: Final = 600.0


@dataclass(slots=True)
class _Totals:
    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    held_tokens: int = 0
    pinned_tokens: int = 0
    unpinned_tokens: int = 0


def warm(url: str, file: Path, salt_file: Path | None, api_key: str, *, json_output: bool) -> None:
    """Have prompts computed and stored, so that later requests find them."""
    totals = _send_all(url, file, salt_file, api_key, "warm")
    _tell(totals, _WARMED, json_output=json_output)


def pin(
    url: str,
    file: Path,
    seconds: float,
    salt_file: Path | None,
    api_key: str,
    *,
    json_output: bool,
) -> None:
    """Have prompts computed, stored and kept from eviction; exit status 1 unless all of it is."""
    totals = _send_all(url, file, salt_file, api_key, "warm", {"pin": seconds})
    _tell(totals, _PINNED, json_output=json_output)
    if totals.pinned_tokens < totals.held_tokens:
        raise typer.Exit(1)


def unpin(url: str, file: Path, salt_file: Path | None, api_key: str, *, json_output: bool) -> None:
    """Let pinned prompts leave when their turn comes. Nothing is computed."""
    totals = _send_all(url, file, salt_file, api_key, "unpin")
    _tell(totals, _UNPINNED, json_output=json_output)


def _send_all(
    url: str,
    file: Path,
    salt_file: Path | None,
    api_key: str,
    call: str,
    hints: dict[str, float] | None = None,
) -> _Totals:
    where = server_url("--url", url)
    salt = {} if salt_file is None else {"cache_salt": read_salt(salt_file)}
    prompts = [(number, {**body, **salt}) for number, body in _prompts(file)]
    headers = {"content-type": "application/json", **bearer(api_key)}
    totals = _Totals()
    with closing(_connection(where)) as connection, _progress() as progress:
        for number, body in progress.track(prompts, description="pin" if hints else call):
            if call == "unpin":  # The file that they were pinned from may say these.
                for name in _FOR_COMPUTING:
                    body.pop(name, None)
            if hints:
                body["kvtier"] = {**body.get("kvtier", {}), **hints}
            path = f"{where.path.rstrip('/')}/v1/kvtier/{call}"
            answer = _post(connection, path, headers, body, f"{file}:{number}")
            try:
                _NOTES[call](totals, answer)
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
        server = f"{connection.host}:{connection.port}"
        raise TierUnavailableError(f"{where}: no answer from {server}: {error}") from error
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


def _add_unpinned(totals: _Totals, answer: dict[str, Any]) -> None:
    totals.prompts += len(answer["prompts"])
    totals.prompt_tokens += sum(each["prompt_tokens"] for each in answer["prompts"])
    totals.unpinned_tokens += sum(each["unpinned_tokens"] for each in answer["prompts"])


#: How the answer of each call is taken in.
_NOTES: Final = {"warm": _add, "unpin": _add_unpinned}
#: What is told of the totals: the words after each figure.
_WARMED: Final = {"cached_tokens": "were there", "held_tokens": "are held"}
_PINNED: Final = {**_WARMED, "pinned_tokens": "pinned"}
_UNPINNED: Final = {"unpinned_tokens": "were pinned"}


def _tell(totals: _Totals, figures: dict[str, str], *, json_output: bool) -> None:
    if json_output:
        names = ("prompts", "prompt_tokens", *figures)
        typer.echo(json.dumps({name: getattr(totals, name) for name in names}))
        return
    told = ", ".join(f"{getattr(totals, name)} {words}" for name, words in figures.items())
    typer.echo(f"{totals.prompts} prompts of {totals.prompt_tokens} tokens: {told}")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
