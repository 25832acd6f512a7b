"""``kvtier verify``: read a disk tier whole, say what is wrong with it, mend it on request."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtier.cli.control import ApiKey, Json, TokenFile, TokenName, server_at
from kvtier.cli.verify_server import verify_server
from kvtier.clock import SystemClock
from kvtier.codecs.calibration_store import FOLDER, CalibrationStore
from kvtier.config import Durability, format_size
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.shard_files import ShardFiles
from kvtier.tiers.disk.verify import Finding, Problem, Verdict, Verifier

_SHOWN_MAX = 50


def verify(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...|URL",
            help="Directory of a disk tier, all of them, if several; or a cache server.",
        ),
    ],
    repair: Annotated[  # noqa: FBT002
        bool, typer.Option("--repair", help="Quarantine what is corrupt, remove what is useless.")
    ] = False,
    json_output: Json = False,  # noqa: FBT002
    token_file: TokenFile = None,
    token_name: TokenName = None,
    api_key: ApiKey = "",
) -> None:
    """Read every byte of a disk tier; exit status 1 when something is wrong and not mended.

    A cache server reads its own while it serves, and mends nothing.
    """
    if any("://" in target for target in targets):
        if repair or len(targets) > 1:
            raise ConfigError("a server's disk is read as a whole, without --repair")
        server = server_at(targets[0], token_file, token_name, api_key)
        verify_server(server, SystemClock(), json_output=json_output)
        return
    _verify_paths([Path(target) for target in targets], repair=repair, json_output=json_output)


def _verify_paths(paths: list[Path], *, repair: bool, json_output: bool) -> None:
    for path in paths:
        if not (path / "shards").is_dir():
            raise ConfigError(f"{path} is no disk tier: it has no folder 'shards'")
    files = LocalFiles()
    owners = [ShardFiles(str(path), Durability.NONE, files) for path in paths]
    try:
        for owner in owners if repair else ():
            owner.lock()
        verifier = Verifier([str(path) for path in paths], files)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("reading", total=None)
            for done, total in verifier.run():
                progress.update(task, completed=done, total=total)
        stores = [CalibrationStore(path / FOLDER) for path in paths]
        damaged = [(store, *each) for store in stores for each in store.audit()]
        verdict = _with_calibrations(verifier.verdict, [each[1:] for each in damaged])
        if repair:
            verifier.repair()
            for store, path, _ in damaged:
                store.put_away(path)
    except OSError as error:
        raise TierUnavailableError(str(error)) from error
    finally:
        for owner in owners:
            owner.close()
    if json_output:
        typer.echo(json.dumps(asdict(verdict) | {"repaired": repair}, indent=2))
    else:
        _show(verdict, repaired=repair)
    if not verdict.clean and not repair:
        raise typer.Exit(1)


def _with_calibrations(verdict: Verdict, damaged: list[tuple[Path, str]]) -> Verdict:
    findings = [
        Finding(str(path), path.stat().st_size, Problem.CALIBRATION, told) for path, told in damaged
    ]
    return replace(verdict, findings=(*verdict.findings, *findings))


def _show(verdict: Verdict, *, repaired: bool) -> None:
    console = Console()
    size = format_size(verdict.nbytes)
    console.print(f"{verdict.sound_shards} sound shards, {size}")
    if verdict.quarantined_files:
        console.print(f"in quarantine from before: {verdict.quarantined_files}")
    if not verdict.findings:
        return
    table = Table("file", "problem", "why", title="mended" if repaired else "found")
    for finding in verdict.findings[:_SHOWN_MAX]:
        table.add_row(Path(finding.path).name, finding.problem, finding.detail)
    console.print(table)
    if len(verdict.findings) > _SHOWN_MAX:
        console.print(f"and {len(verdict.findings) - _SHOWN_MAX} more; --json lists all")
