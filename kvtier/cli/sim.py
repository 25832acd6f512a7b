"""``kvtier sim``: what a cache of some size, codec and policy would have done for a trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvtier import registry
from kvtier.config import parse_size
from kvtier.sim.reader import read_trace
from kvtier.sim.report import check_plot, recommendation, result_table, save_plot
from kvtier.sim.shapes import CODEC_BYTES, MODEL_SHAPES, model_shape
from kvtier.sim.study import (
    EVERYTHING,
    MIN,
    WORKERS_DEFAULT,
    Plan,
    Result,
    policy_names,
    run_study,
)
from kvtier.sim.trace import Trace


def sim(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...", help="Mooncake JSON lines or KVTier's access log; .zst too."
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(help=f"By comma: {', '.join(policy_names())}; {MIN} is the optimum."),
    ] = f"lru,arc,gittins,{MIN}",
    capacity: Annotated[
        str, typer.Option(help="Sizes, by comma: 50GiB, or 5% of the unique blocks.")
    ] = "1%,5%,10%",
    codec: Annotated[str, typer.Option(help=f"Codecs, by comma: {', '.join(CODEC_BYTES)}.")] = (
        "raw"
    ),
    model_shape_name: Annotated[
        str, typer.Option("--model-shape", help=f"One of {', '.join(MODEL_SHAPES)}.")
    ] = "llama-3.1-8b",
    admission: Annotated[
        str,
        typer.Option(
            help="What is written to a tier on flash, by comma: "
            f"{', '.join(registry.admissions.names())}."
        ),
    ] = EVERYTHING,
    write_bytes_per_day: Annotated[
        str, typer.Option(help="Bound what is written: 10TiB a day; 0 is no bound.")
    ] = "0",
    hints: Annotated[
        float | None,
        typer.Option(help="Give session hints that are right with this probability (0 to 1)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the hints.")] = 1,
    workers: Annotated[int, typer.Option(help="Processes at work.")] = WORKERS_DEFAULT,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit rate over capacity into this file.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002
) -> None:
    """Tell what a cache would have done for a trace, and what no cache could do better."""
    plan = Plan(
        policies=_names(policy),
        capacities=_names(capacity),
        codecs=_names(codec),
        shape=model_shape(model_shape_name),
        hints=hints,
        seed=seed,
        workers=workers,
        admissions=_names(admission),
        write_bytes_per_day=parse_size(write_bytes_per_day),
    )
    if plot is not None:
        check_plot(plot)  # Before the work that would be lost.
    found = _found(traces, plan)
    if plot is not None:
        save_plot(plot, [path.name for path, _, _ in found], [each for _, _, each in found])
    if json_output:
        rows = [{"trace": str(path), **asdict(row)} for path, _, rows in found for row in rows]
        typer.echo(json.dumps({"results": rows}, indent=2))
    else:
        _show(found)


def _found(traces: Sequence[Path], plan: Plan) -> list[tuple[Path, Trace, list[Result]]]:
    found: list[tuple[Path, Trace, list[Result]]] = []
    with _progress() as progress:
        for path in traces:
            reading = progress.add_task(f"read {path.name}", total=_size(path))
            trace = read_trace(path, partial(progress.advance, reading))
            replaying = progress.add_task(f"replay {path.name}", total=1.0)

            def show(share: float, task: TaskID = replaying) -> None:
                progress.update(task, completed=share)

            found.append((path, trace, run_study(trace, plan, show)))
            show(1.0)
    return found


def _show(found: Iterable[tuple[Path, Trace, Sequence[Result]]]) -> None:
    console = Console()
    for path, trace, results in found:
        title = (
            f"{path.name}: {trace.request_count} requests, {trace.unique_count} unique blocks of "
            f"{trace.block_tokens} tokens"
        )
        console.print(result_table(title, results))
        console.print(recommendation(results) + "\n")


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _size(path: Path) -> int | None:
    """Return the size of a file; reading tells what is wrong with one that has none."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
