"""``kvtier quality``: what a codec costs on the user's own model and text.

Importing this loads no torch, so that the list of commands stays quick and works without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.registry import import_problem
from kvtier_engine.options import BUNDLED_MODEL, DeviceChoice
from kvtier_engine.quality.codecs import ALL
from kvtier_engine.quality.report import as_json, recommendation, result_table, save_plot
from kvtier_engine.quality.results import Mode, Report
from kvtier_engine.quality.text import read_text
from kvtier_engine.quality.windows import TOKENS_DEFAULT


def quality(
    model: Annotated[
        str, typer.Option(help=f"{BUNDLED_MODEL}, a .gguf file or a Hugging Face folder.")
    ] = BUNDLED_MODEL,
    codec: Annotated[str, typer.Option(help=f"Codecs, by comma, or {ALL}.")] = ALL,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 file; else a book that ships with KVTier.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens to feed, all windows together. "
            f"Default: {', '.join(f'{count} {mode}' for mode, count in TOKENS_DEFAULT.items())}."
        ),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(help="A prefix comes back from a tier, or all KV is packed when written."),
    ] = Mode.STORAGE,
    calibration: Annotated[
        Path | None,
        typer.Option(help="What kvtier calibrate --output wrote, for codecs that need one."),
    ] = None,
    device: Annotated[DeviceChoice, typer.Option(help="Where the model runs.")] = DeviceChoice.AUTO,
    plot: Annotated[
        Path | None, typer.Option(help="Draw signal to noise per layer into this file.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002
) -> None:
    """Measure what KV codecs cost in quality on your own model and text."""
    name, content = read_text(text)
    try:
        from kvtier_engine.quality.study import Study
    except ImportError as error:
        raise import_problem(error, "kvtier quality") from error
    with _progress() as progress:
        task = progress.add_task(f"load {model}", total=None)
        study = Study(
            model=model,
            device=device,
            codec=codec,
            text=content,
            mode=mode,
            tokens=TOKENS_DEFAULT[mode] if tokens is None else tokens,
            calibration=calibration,
        )
        progress.update(task, description=f"measure {mode}", total=study.work_tokens)
        report = study.run(name, lambda count: progress.advance(task, count))
    if plot is not None:
        save_plot(plot, report)
    if json_output:
        typer.echo(json.dumps(as_json(report), indent=2, allow_nan=False))
    else:
        _show(report)


def _show(report: Report) -> None:
    console = Console()
    console.print(result_table(report))
    console.print(recommendation(report), soft_wrap=True, highlight=False, markup=False)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
