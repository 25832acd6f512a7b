"""What a measurement is shown as: a table, advice, JSON, a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvtier.errors import ConfigError
from kvtier.registry import import_problem
from kvtier_engine.quality.results import Noise, Report, Result

#: Mean KL in nats up to which a loss is called so. KL is the gate: a few thousand positions do not
#: resolve a quarter of a percent of perplexity. Half a percent is about 0.005.
VERDICTS: Final = (
    (0.0, "exact"),
    (0.0001, "no measurable loss"),
    (0.001, "very small loss"),
    (0.005, "small loss"),
)
WORSE: Final = "visible loss"
#: A change of perplexity, in percent, that is a visible loss once it is certain.
PPL_CHANGE_VISIBLE_PERCENT: Final = 0.5
#: Mean KL up to which a codec may be advised without a second thought, and with one.
_KL_CAREFREE: Final = 0.001
_KL_DENSE: Final = 0.005
_RAW_BITS: Final = 16.0


def result_table(report: Report) -> Table:
    """Return a row per codec; fits 80 columns."""
    title = (
        f"{report.model}, {report.text}, {report.mode}: {report.windows} x "
        f"({report.prefix_tokens} + {report.continuation_tokens}) tokens"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    table.padding, table.pad_edge = 0, False
    table.add_column("codec", no_wrap=True)
    for name in ("bits", "KL mean", "KL p99", "top-1 %", "ppl %", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in report.results:
        figures = each.figures
        table.add_row(
            each.codec,
            f"{each.bits_per_value:.3f}",
            f"{figures.kl_mean:.6f}",
            f"{figures.kl_p99:.6f}",
            f"{figures.top1_percent:.2f}",
            f"{figures.ppl_change_percent:+.3f}",
            f"{figures.ppl_change_low:+.3f} .. {figures.ppl_change_high:+.3f}",
        )
    return table


def verdict(result: Result) -> str:
    """Say how large a codec's loss is: by its mean KL, unless perplexity is clearly worse."""
    if _is_clearly_worse(result):
        return WORSE
    for limit, words in VERDICTS:
        if result.figures.kl_mean <= limit:
            return words
    return WORSE


def recommendation(report: Report) -> str:
    """Say what each codec costs, what was not measured, and which one to take."""
    lines = [
        f"{each.codec}: {verdict(each)} (KL {each.figures.kl_mean:.1e})" for each in report.results
    ]
    lines += [f"{each.codec}: not measured: {each.reason}" for each in report.skipped]
    return "\n".join([*lines, _advice(report)])


def _advice(report: Report) -> str:
    careful = _densest(report, _KL_CAREFREE)
    dense = _densest(report, _KL_DENSE)
    if dense is None:
        return "None of these saves anything at a small loss: store raw."
    if careful is None:
        return f"Take {_sized(dense)} if its loss is acceptable to you, else raw."
    if dense is careful:
        return f"Take {_sized(careful)}."
    return f"Take {_sized(careful)}; where room matters more than quality, {_sized(dense)}."


def _densest(report: Report, kl_mean_max: float) -> Result | None:
    good = [
        each
        for each in report.results
        if each.figures.kl_mean <= kl_mean_max
        and each.bits_per_value < _RAW_BITS
        and not _is_clearly_worse(each)
    ]
    return min(good, key=lambda each: (each.bits_per_value, each.figures.kl_mean), default=None)


def _is_clearly_worse(result: Result) -> bool:
    return result.figures.ppl_change_low > PPL_CHANGE_VISIBLE_PERCENT


def _sized(result: Result) -> str:
    return f"{result.codec} ({_RAW_BITS / result.bits_per_value:.2f} times as much KV per byte)"


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON's values. ``snr_db`` is null where nothing was lost."""
    return {
        "model": report.model,
        "text": report.text,
        "mode": report.mode.value,
        "windows": report.windows,
        "prefix_tokens": report.prefix_tokens,
        "continuation_tokens": report.continuation_tokens,
        "results": [
            {
                "codec": each.codec,
                "bits_per_value": each.bits_per_value,
                **asdict(each.figures),
                "snr_db": {"k": list(each.noise.k), "v": list(each.noise.v)},
                "verdict": verdict(each),
            }
            for each in report.results
        ],
        "skipped": [asdict(each) for each in report.skipped],
        "recommendation": _advice(report),
    }


def save_plot(path: Path, report: Report) -> None:
    """Draw signal to noise, codec by layer, a panel for K and one for V.

    Raises ``MissingExtraError`` without matplotlib and ``ConfigError`` for a path that cannot be
    written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise import_problem(error, "--plot") from error
    figure = Figure(figsize=(9.0, 2.0 + 0.7 * len(report.results)), layout="constrained")
    panels: Any = figure.subplots(2, 1, sharex=True)
    known = [db for each in report.results for db in (*each.noise.k, *each.noise.v) if db]
    colours = {"vmin": min(known, default=0.0), "vmax": max(known, default=1.0)}
    parts: dict[str, Callable[[Noise], tuple[float | None, ...]]] = {
        "K": lambda noise: noise.k,
        "V": lambda noise: noise.v,
    }
    for panel, (name, part) in zip(panels, parts.items(), strict=True):
        image = _draw(panel, report, name, part, colours)
    panels[-1].set_xlabel("layer")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(f"{report.model}, {report.mode}: signal to noise of KV (white: exact)")
    figure.colorbar(image, ax=list(panels), label="dB")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error


def _draw(
    panel: Any,
    report: Report,
    name: str,
    part: Callable[[Noise], tuple[float | None, ...]],
    colours: dict[str, float],
) -> Any:
    nothing = float("nan")
    rows = [[nothing if db is None else db for db in part(each.noise)] for each in report.results]
    image = panel.imshow(rows, aspect="auto", interpolation="nearest", cmap="viridis", **colours)
    panel.set_yticks(range(len(rows)), [each.codec for each in report.results])
    panel.set_ylabel(name)
    return image
