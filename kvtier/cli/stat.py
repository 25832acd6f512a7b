"""``kvtier stat``: what a running server's tiers do, live; what a directory at rest holds."""

from __future__ import annotations

import json
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.error import HTTPError

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvtier.cli.control import TokenFile, TokenName, server_at
from kvtier.cli.secrets import bearer
from kvtier.cli.stat_view import Said, rest_view, server_view
from kvtier.clock import SystemClock
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.interfaces import Clock
from kvtier.tiers.disk.at_rest import AtRest, at_rest
from kvtier.tiers.disk.files import LocalFiles

_PATH: Final = "/v1/kvtier/stats"
_TIMEOUT_S: Final = 5.0
_ANSWER_BYTES_MAX: Final = 1 << 22


def stat(
    target: Annotated[
        str,
        typer.Argument(metavar="URL|PATH", help="A server, or the directory of a disk tier."),
    ],
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,  # noqa: FBT002
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON once.")] = False,  # noqa: FBT002
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")
    ] = 1.0,
    api_key: Annotated[
        str, typer.Option(envvar="KVTIER_API_KEY", show_envvar=False, help="The server's key.")
    ] = "",
    token_file: TokenFile = None,
    token_name: TokenName = None,
) -> None:
    """Show tiers: state, what they hold, hits, misses by reason, speed. Ctrl-C ends it."""
    if "://" not in target:
        _show_rest(Path(target), json_output=json_output)
        return
    server = server_at(target, token_file, token_name, api_key)
    asked = urllib.request.Request(  # noqa: S310 - http or https
        server.url + _PATH, headers=bearer(server.token)
    )
    if json_output:
        typer.echo(json.dumps(said(asked), indent=2))
    elif once:
        Console().print(_shown(asked, said(asked), None))
    else:
        watch(asked, Console(), SystemClock(), interval_s=interval)


def watch(
    asked: urllib.request.Request, console: Console, clock: Clock, *, interval_s: float
) -> None:
    """Show a server again and again until interrupted. One that does not answer is asked again.

    Raises ``TierUnavailableError`` when it does not answer at first.
    """
    before, now = None, said(asked)
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(_shown(asked, now, before), refresh=True)
                clock.sleep(interval_s)
                try:
                    before, now = now, said(asked)
                except TierUnavailableError as error:
                    live.update(Text(str(error)), refresh=True)
                    clock.sleep(interval_s)
        except KeyboardInterrupt:
            return


def said(asked: urllib.request.Request) -> Said:
    """Return what a server says of its tiers. Raises ``TierUnavailableError``."""
    try:
        with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            report = json.loads(answer.read(_ANSWER_BYTES_MAX))
    except HTTPError as error:
        why = (
            "the key is missing or wrong (--api-key, --token-file)"
            if error.code == 401
            else str(error)
        )
        raise TierUnavailableError(f"{asked.full_url}: {why}") from error
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        raise TierUnavailableError(f"{asked.full_url}: no answer of a server ({error})") from error
    if not isinstance(report, dict) or not isinstance(report.get("tiers"), list):
        raise _strange(asked)
    return report


def _shown(asked: urllib.request.Request, now: Said, before: Said | None) -> Group:
    """Return the view of what was said, of which only the outermost form has been checked."""
    try:
        return server_view(now, before)
    except (AttributeError, TypeError, ValueError) as error:
        raise _strange(asked) from error


def _strange(asked: urllib.request.Request) -> TierUnavailableError:
    return TierUnavailableError(
        f"{asked.full_url}: the answer is not one of kvtier-serve or kvtier daemon"
    )


def _show_rest(path: Path, *, json_output: bool) -> None:
    if not (path / "shards").is_dir():
        raise ConfigError(f"{path} is no disk tier: it has no folder 'shards'")
    try:
        found = at_rest(str(path), LocalFiles())
    except OSError as error:
        raise TierUnavailableError(f"{path}: {error.strerror or error}") from error
    if json_output:
        typer.echo(json.dumps(_report(found), indent=2))
    else:
        Console().print(rest_view(found))


def _report(found: AtRest) -> dict[str, Any]:
    return {
        "path": found.root,
        "indexed": found.indexed,
        "chunks": found.chunks,
        "bytes": found.nbytes,
        "quarantined_files": found.quarantined_files,
        "quarantined_bytes": found.quarantined_bytes,
        "namespaces": [
            {
                "namespace": each.namespace.hex(),
                "codec": each.codec,
                "chunks": each.chunks,
                "bytes": each.nbytes,
                "used_first": each.used_first_s,
                "used_last": each.used_last_s,
            }
            for each in found.held
        ],
    }
