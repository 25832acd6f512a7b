"""``kvtier calibrate``: learn a model's calibration ahead of its traffic.

Importing this loads no torch, so that the list of commands stays quick and works without it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.codecs.calibration import Calibration
from kvtier.codecs.calibration_store import FOLDER, CalibrationStore
from kvtier.codecs.centred import CENTRED
from kvtier.errors import ConfigError
from kvtier.registry import import_problem
from kvtier.types import Namespace
from kvtier_engine.calibration.report import Report, as_json, layer_table, summary
from kvtier_engine.options import BUNDLED_MODEL, DeviceChoice
from kvtier_engine.quality.text import read_text


def calibrate(
    model: Annotated[
        str, typer.Option(help=f"{BUNDLED_MODEL}, a .gguf file or a Hugging Face folder.")
    ] = BUNDLED_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 file; else a book that ships with KVTier.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to learn from.")] = 8192,
    disk: Annotated[
        Path | None,
        typer.Option(help="A disk tier: engines over it use this calibration, if none is there."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the calibration's bytes here.")] = None,
    device: Annotated[DeviceChoice, typer.Option(help="Where the model runs.")] = DeviceChoice.AUTO,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002
) -> None:
    """Learn the mean of K that int4 and int5k4v-c take away, and tell what it is worth."""
    name, content = read_text(text)
    try:
        from kvtier_engine.calibration.learn import Lesson
        from kvtier_engine.device import device_name
        from kvtier_engine.weights.load import load_model
    except ImportError as error:
        raise import_problem(error, "kvtier calibrate") from error
    with _progress() as progress:
        task = progress.add_task(f"load {model}", total=None)
        loaded = load_model(model, device=device_name(device), dtype="float32")
        lesson = Lesson(loaded, content, tokens)
        progress.update(task, description="calibrate", total=lesson.work_tokens)
        calibration = lesson.learn(lambda count: progress.advance(task, count))
        layers = lesson.assess(calibration, lambda count: progress.advance(task, count))
    report = Report(loaded.name, name, tokens, calibration.digest, layers)
    if report.weak_layers:
        calibration = replace(calibration, weak_layers=report.weak_layers)
        report = replace(report, digest=calibration.digest)
    kept = [] if disk is None else _keep(disk, lesson.namespace, calibration)
    if output is not None:
        _write(output, calibration)
    if json_output:
        typer.echo(json.dumps({**as_json(report), "kept": kept}, indent=2))
    else:
        _show(report, kept)


def _keep(disk: Path, namespace: Namespace, calibration: Calibration) -> list[str]:
    """Offer the calibration; tell which one each codec has now."""
    store = CalibrationStore(disk / FOLDER)
    offered = calibration.digest
    return [
        f"{codec}: {found}" if found == offered else f"{codec}: {found}, which was there before"
        for codec in CENTRED
        for found in (store.offer(namespace, codec, calibration).digest,)
    ]


def _write(path: Path, calibration: Calibration) -> None:
    try:
        path.write_bytes(calibration.to_bytes())
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror or error}") from error


def _show(report: Report, kept: list[str]) -> None:
    console = Console()
    console.print(layer_table(report))
    lines = "\n".join([summary(report), *kept])
    console.print(lines, soft_wrap=True, highlight=False, markup=False)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
