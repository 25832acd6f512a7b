"""``kvtier verify URL``: a running cache server reads its own disk, and is asked how far it is."""

from __future__ import annotations

import json
from typing import Any, Final

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from kvtier.cli.control import Server
from kvtier.config import format_size
from kvtier.errors import TierUnavailableError
from kvtier.interfaces import Clock

_LOOK_S: Final = 0.25


def verify_server(server: Server, clock: Clock, *, json_output: bool) -> None:
    """Have a server read its disk, wait until it has, and tell what it found.

    Exits with status 1 when something is wrong. Raises ``TierUnavailableError`` for a server that
    cannot, and when it does not answer meanwhile.
    """
    said = server.ask("POST", "/v1/verify")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=None)
        while said.get("state") == "running":
            clock.sleep(_LOOK_S)
            said = server.ask("GET", "/v1/verify")
            total = said.get("total_bytes") or None
            progress.update(task, completed=said.get("read_bytes", 0), total=total)
    if said.get("state") != "done":
        raise TierUnavailableError(f"{server.url}: not read: {said.get('detail') or 'given up'}")
    if json_output:
        typer.echo(json.dumps(said, indent=2))
    else:
        _show(said)
    if not said.get("clean"):
        raise typer.Exit(1)


def _show(said: dict[str, Any]) -> None:
    console = Console()
    size = format_size(said.get("read_bytes", 0))
    console.print(f"{said.get('sound_shards')} sound shards; {size} read")
    if said.get("quarantined_files"):
        console.print(f"in quarantine from before: {said['quarantined_files']}")
    findings = said.get("findings", ())
    if not findings:
        return
    table = Table("file", "problem", "why", title="found")
    for finding in findings:
        table.add_row(*(Text(str(finding.get(name))) for name in ("file", "problem", "detail")))
    console.print(table)
    left = said.get("finding_count", 0) - len(findings)
    if left > 0:
        console.print(f"and {left} more")
