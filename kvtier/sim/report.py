"""What a study says: a table, a recommendation, a plot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvtier.constants import GIB
from kvtier.errors import ConfigError
from kvtier.registry import import_problem
from kvtier.sim.study import EVERYTHING, MIN, Result

# What reaches this share of the best figure is good enough to be recommended for being smaller.
_GOOD_SHARE: Final = 0.95


def result_table(title: str, results: Sequence[Result]) -> Table:
    """Return a row per result, the optimum beside each.

    Fits 80 columns. A codec and an admission that all rows share stand in the title instead.
    """
    codecs, admissions = _codecs(results), _admissions(results)
    for shared, what in ((codecs, "codec"), (admissions, "admission")):
        if len(shared) == 1:
            title += f"; {what} {shared[0]}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    table.padding, table.pad_edge = 0, False
    for name, is_shown in (
        ("codec", len(codecs) > 1),
        ("capacity", True),
        ("policy", True),
        ("admission", len(admissions) > 1),
    ):
        if is_shown:
            table.add_column(name, overflow="fold")
    for name in ("hit%", MIN, "FLOPs%", MIN, "write/day"):
        table.add_column(name, justify="right", no_wrap=True)
    following: list[Result | None] = [*results[1:], None]
    for each, after in zip(results, following, strict=True):
        names = [each.codec] * (len(codecs) > 1) + [_capacity_text(each), each.policy]
        if len(admissions) > 1:
            names.append("" if each.policy == MIN else each.admission)
        table.add_row(
            *names,
            f"{each.prefix_hit_percent:.1f}",
            f"{each.optimum_hit_percent:.1f}",
            f"{each.flops_saved_percent:.1f}",
            f"{each.optimum_flops_saved_percent:.1f}",
            size_text(each.bytes_written_per_day),
            end_section=after is not None
            and (after.codec, after.capacity) != (each.codec, each.capacity),
        )
    return table


def recommendation(results: Sequence[Result]) -> str:
    """Return advice: the smallest size that comes close to the best figure, and what it costs.

    Of several admissions that come close at that size, the one that writes least.
    """
    real = [each for each in results if each.policy != MIN]
    if not real:
        return "Only the optimum was asked for; name a policy to get a recommendation."
    best = max(each.prefix_hit_percent for each in real)
    if best <= 0.0:
        return "Nothing that was measured is asked for twice: no cache would bring anything."
    good = [each for each in real if each.prefix_hit_percent >= _GOOD_SHARE * best]
    smallest = min(each.capacity_bytes for each in good)
    good = [each for each in good if each.capacity_bytes == smallest]
    if len(_admissions(results)) > 1:
        chosen = min(good, key=lambda each: (each.bytes_written, -each.prefix_hit_percent))
    else:
        chosen = max(good, key=lambda each: each.prefix_hit_percent)
    others = [
        f"{_name(each, results)} {each.prefix_hit_percent:.1f} %"
        for each in real
        if (each.codec, each.capacity) == (chosen.codec, chosen.capacity) and each is not chosen
    ]
    several = len(_admissions(results)) > 1
    place = "flash" if several or chosen.admission != EVERYTHING else "DRAM"
    beside = f" ({', '.join(others)})" if others else ""
    text = (
        f"With {size_text(chosen.capacity_bytes)} of {place} and {chosen.codec}, "
        f"{_name(chosen, results)} finds {chosen.prefix_hit_percent:.1f} % of the prompts' "
        f"blocks{beside}; no policy could find more than {chosen.optimum_hit_percent:.1f} %. "
        f"That saves {chosen.flops_saved_percent:.1f} % of the prefill FLOPs, and a tier of this "
        f"size on flash would be written {size_text(chosen.bytes_written_per_day)} a day."
    )
    if chosen.codec != "raw":
        text += f" {chosen.codec} changes values: check its quality on your own text first."
    return text


def _codecs(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(each.codec for each in results))


def _admissions(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(each.admission for each in results if each.policy != MIN))


def _name(result: Result, results: Sequence[Result]) -> str:
    """Return policy and, where there are several, admission."""
    if len(_admissions(results)) < 2 or result.policy == MIN:
        return result.policy
    return f"{result.policy} with {result.admission}"


def _capacity_text(result: Result) -> str:
    """Return a capacity as it was asked for; a share with what it comes to."""
    if not result.capacity.endswith("%"):
        return result.capacity
    return f"{result.capacity} {size_text(result.capacity_bytes)}"


def size_text(nbytes: float) -> str:
    """Return a rounded size for people: ``64 GiB``, ``1.2 TiB``."""
    unit = "MiB" if nbytes < GIB else "GiB" if nbytes < 1024 * GIB else "TiB"
    amount = nbytes / {"MiB": GIB / 1024, "GiB": GIB, "TiB": 1024 * GIB}[unit]
    return f"{amount:.0f} {unit}" if amount >= 10 else f"{amount:.2g} {unit}"


def check_plot(path: Path) -> None:
    """Raise what ``save_plot`` would for a path, as far as that can be told before."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise import_problem(error, "--plot") from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"--plot {path}: allowed are the endings {', '.join(sorted(known))}")
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"--plot {path}: no file can be written there")


def save_plot(path: Path, titles: Sequence[str], results: Sequence[Sequence[Result]]) -> None:
    """Draw hit rate over capacity as a picture, a panel per trace, a line per policy and codec.

    Raises ``MissingExtraError`` without matplotlib and ``ConfigError`` for a path that cannot be
    written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise import_problem(error, "--plot") from error
    figure = Figure(figsize=(7.0, 4.5 * len(titles)), layout="constrained")
    panels: Any = figure.subplots(len(titles), 1, squeeze=False)
    for panel, title, found in zip(panels[:, 0], titles, results, strict=True):
        _draw(panel, title, found)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error


def _draw(panel: Any, title: str, results: Sequence[Result]) -> None:
    codecs = _codecs(results)
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for each in results:
        size = each.capacity_bytes / GIB
        if each.policy != MIN:
            point = size, each.prefix_hit_percent
            lines.setdefault((_name(each, results), each.codec), []).append(point)
        lines.setdefault((MIN, each.codec), []).append((size, each.optimum_hit_percent))
    for (name, codec), points in lines.items():
        sizes, hits = zip(*sorted(set(points)), strict=True)
        label = name if len(codecs) == 1 else f"{name}, {codec}"
        style = "--" if name == MIN else "-"
        panel.plot(sizes, hits, style, marker="o", markersize=4, label=label)
    panel.set_xscale("log")
    panel.set_ylim(bottom=0)
    panel.set_xlabel("capacity, GiB")
    panel.set_ylabel("prefix hit, % of blocks")
    panel.set_title(title)
    panel.grid(visible=True, alpha=0.3)
    panel.legend()
