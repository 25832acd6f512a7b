"""What a calibration is worth, as values, a table and words. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from kvtier.codecs.assay import CODES_DB, MISSED_DB_MAX


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, on text that the calibration was not learned from; sink tokens left out.

    ``mean_share``: how much of the energy of K before RoPE goes with the calibrated mean, and
    ``k_expected_db`` what that makes of the signal to noise of K. ``k_db`` and ``v_db``: the
    signal to noise of what ``int4`` gives back.
    """

    layer: int
    mean_share: float
    k_expected_db: float
    k_db: float
    v_db: float

    @property
    def weak(self) -> bool:
        """Whether the codec loses clearly more here than it should."""
        return (
            self.k_db < self.k_expected_db - MISSED_DB_MAX or self.v_db < CODES_DB - MISSED_DB_MAX
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A calibration and how it does."""

    model: str
    text: str
    tokens: int
    digest: str
    layers: tuple[Layer, ...]

    @property
    def weak_layers(self) -> tuple[int, ...]:
        """Layers in which the codec misses what is expected."""
        return tuple(each.layer for each in self.layers if each.weak)


def layer_table(report: Report) -> Table:
    """Show a row per layer."""
    table = Table(title=f"{report.model}, {report.tokens} tokens of {report.text}, as int4")
    table.add_column("layer", justify="right")
    table.add_column("mean's share of K", justify="right")
    for name in ("K expected", "K", "V"):
        table.add_column(f"{name}, dB", justify="right")
    for each in report.layers:
        decibels = (each.k_expected_db, each.k_db, each.v_db)
        table.add_row(
            f"{each.layer}{' weak' if each.weak else ''}",
            f"{100 * each.mean_share:.0f} %",
            *(f"{value:.1f}" for value in decibels),
        )
    return table


def summary(report: Report) -> str:
    """Say what the calibration is worth, and what to store with."""
    share = fmean(each.mean_share for each in report.layers)
    gain = fmean(each.k_db for each in report.layers) - CODES_DB
    lines = [
        f"calibration {report.digest}",
        f"{100 * share:.0f} % of the energy of K before RoPE is one vector per layer and head.",
        f"Taking it away gains {gain:.1f} dB, {gain / 6.02:.1f} bits a value of K.",
    ]
    if weak := report.weak_layers:
        layers = ", ".join(map(str, weak))
        lines.append(
            f"Layers {layers} lose more than {MISSED_DB_MAX:g} dB beyond what is expected: store "
            "this model with int6."
        )
    else:
        lines.append("All layers keep what is expected: int4 and int5k4v-c fit this model.")
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON's values."""
    return {**asdict(report), "weak_layers": list(report.weak_layers)}
