"""``kvtier import-lmcache``: take over what LMCache kept in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from kvtier.config import format_size, parse_size
from kvtier_adapters.lmcache.migration import ImportReport, import_folder
from kvtier_adapters.lmcache.naming import SYSTEM
from kvtier_adapters.payloads.options import PlugOptions
from kvtier_adapters.payloads.store import PlugStore


def import_lmcache(
    folder: Annotated[Path, typer.Argument(help="The base_path of an fs or fs_native adapter.")],
    layout: Annotated[
        str,
        typer.Option(
            help="The objects' layout, as the adapter's status tells: bfloat16[2,32,256,1024]"
        ),
    ],
    weights_id: Annotated[str, typer.Option(help="As in the adapter's options.")],
    disk: Annotated[Path | None, typer.Option(help="KVTier's disk tier to fill.")] = None,
    disk_bytes: Annotated[str, typer.Option(help="The most that it may take.")] = "10GiB",
    remote: Annotated[list[str] | None, typer.Option(help="A remote to fill.")] = None,
    dram: Annotated[str, typer.Option(help="Memory to work with.")] = "1GiB",
    tenant_salt: Annotated[str, typer.Option(help="As in the adapter's options.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002
) -> None:
    """Bring the objects of LMCache's fs or fs_native adapter into KVTier's disk or a remote."""
    options = PlugOptions(
        dram_bytes=parse_size(dram),
        disk=() if disk is None else (str(disk),),
        disk_bytes=parse_size(disk_bytes),
        remote=tuple(remote or ()),
        weights_id=weights_id,
        tenant_salt=tenant_salt,
    )
    store = PlugStore(options, SYSTEM)
    try:
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("import", total=None)
            report = import_folder(
                folder,
                store,
                layout,
                lambda done, total: bar.update(task, completed=done, total=total),
            )
    finally:
        store.close()
    if json_output:
        typer.echo(json.dumps(_as_json(report), indent=2))
    else:
        _show(report)


def _as_json(report: ImportReport) -> dict[str, object]:
    return {
        "found": report.found,
        "stored": report.stored,
        "held": report.held,
        "bytes": report.bytes,
        "left_out": dict(report.left_out),
    }


def _show(report: ImportReport) -> None:
    size = format_size(report.bytes)
    typer.echo(f"{report.found} objects found, {report.stored} stored ({size}), {report.held} held")
    for reason, count in sorted(report.left_out.items()):
        typer.echo(f"  {count} left out: {reason}")
