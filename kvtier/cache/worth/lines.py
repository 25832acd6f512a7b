"""Straight lines through noisy measurements that change their mind quickly. Pure.

A line is the repeated median of Siegel (Biometrika 69, 1982): the median, over all points, of the
median slope to the other points. Nearly half of the points may be anything. So an outlier counts
for nothing, and of a window of eight points five new ones outvote the old. Where the change is by
more than half, two in a row do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from kvtier.constants import COST_PAIRS_MAX, COST_POINTS_MAX

#: Points whose x lie nearer to each other than this share of the largest say nothing of a slope.
_APART = 0.25
#: Two in a row that are so many times above the line, or below, make what was before them void.
FAR = 2.0
#: Two steps tell how prefill grows if one attends to so many times what the other does.
_GROWN = 2.0
#: Pairs of steps that say more than what was taken over from elsewhere.
_PAIRS_MIN = 4


class Line(NamedTuple):
    """``intercept + slope * x``, neither below zero."""

    intercept: float
    slope: float

    def at(self, x: float) -> float:
        """Return the line's value."""
        return self.intercept + self.slope * x


class Points:
    """The latest measurements of something that grows with x, and the line through them."""

    def __init__(self, points: Iterable[tuple[float, float]] = ()) -> None:
        self._points = deque(points, maxlen=COST_POINTS_MAX)
        self._line = _fit(self._points)

    @property
    def line(self) -> Line | None:
        """The line, or None before the first point."""
        return self._line

    def observe(self, x: float, y: float) -> None:
        """Take in a measurement; both numbers are above zero."""
        self._points.append((x, y))
        if self._line is not None and len(self._points) > 2 and self._changed(self._line):
            for _ in range(len(self._points) - 2):
                self._points.popleft()
        self._line = _fit(self._points)

    def _changed(self, line: Line) -> bool:
        """Tell whether the last two both lie far off, on the same side: one may be an outlier."""
        ratios = [y / line.at(x) for x, y in list(self._points)[-2:]]
        return min(ratios) > FAR or max(ratios) < 1 / FAR

    def kept(self) -> list[tuple[float, float]]:
        """Return what another process can go on from."""
        return list(self._points)


class PrefillPoints:
    """What computing a token costs, by how many tokens it attends to: ``level * (1 + growth * z)``.

    The growth is a property of the model. The level is how fast the device is now: the median of
    the latest steps.
    """

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=COST_POINTS_MAX)
        self._growth = _Growth()
        self._guessed = False
        self._line: Line | None = None

    @property
    def known(self) -> bool:
        """True once something was measured while serving, here or before a restart."""
        return self._line is not None and not self._guessed

    def guess(self, tokens: int, seconds: float) -> None:
        """Take a first measurement for all there is, until there is a real one."""
        if not self.known:
            self._line = Line(seconds / tokens, 0.0)
            self._guessed = True

    def adopt(self, points: Iterable[tuple[float, float]], growth: float) -> None:
        """Go on from what ``kept`` and ``growth`` said elsewhere."""
        self._guessed = False
        self._points.extend(points)
        self._growth.value = growth
        self._line = self._level()

    @property
    def line(self) -> Line | None:
        """Seconds per token over the tokens it attends to; None before the first step."""
        return self._line

    @property
    def growth(self) -> float:
        """How much dearer a token is, as a share, for each token that it attends to."""
        return self._growth.value

    def observe(self, start_token: float, tokens: int, seconds: float) -> None:
        """Take in a step that computed so many tokens of one sequence behind ``start_token``."""
        point = start_token + tokens / 2, seconds / tokens
        self._growth.observe(start_token, start_token + tokens, point)
        self._points.append(point)
        self._guessed = False
        self._line = self._level()

    def seconds(self, start_token: int, end_token: int) -> float | None:
        """Return what computing these tokens costs: ``a*n + g*n*(start + n/2)``."""
        if self._line is None:
            return None
        tokens = end_token - start_token
        return tokens * self._line.at(start_token + tokens / 2)

    def kept(self) -> list[tuple[float, float]]:
        """Return what another process can go on from, beside the growth."""
        return list(self._points)

    def _level(self) -> Line | None:
        if not self._points:
            return None
        level = median(cost / (1 + self.growth * z) for z, cost in self._points)
        return Line(level, level * self.growth)


class _Growth:
    """How much dearer a token is for each one that it attends to: the median of what pairs say.

    A pair are two steps of one prompt, or two neighbours. Between others the device may have
    become slower or faster. Prompts of one step and one length say nothing, and the value stays.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._said: deque[float] = deque(maxlen=COST_PAIRS_MAX)
        self._prompt: list[tuple[float, float]] = []
        self._end_token = 0.0

    def observe(self, start_token: float, end_token: float, point: tuple[float, float]) -> None:
        """Take in a step and what it says with those before it."""
        goes_on = start_token == self._end_token
        others = self._prompt[-COST_POINTS_MAX:] if goes_on else self._prompt[-1:]
        said = [each for other in others if (each := _pair_growth(point, other)) is not None]
        self._prompt = [*others, point] if goes_on else [point]
        self._end_token = end_token
        self._said.extend(said)
        if said and len(self._said) >= _PAIRS_MIN:
            self.value = max(median(self._said), 0.0)


def _pair_growth(one: tuple[float, float], other: tuple[float, float]) -> float | None:
    """Return the growth that two steps show; None where they lie too near to each other."""
    (near, low), (far, high) = sorted((one, other))
    # Costs of ``1 + g * near`` and ``1 + g * far``, at one level.
    rest = low * far - high * near
    return (high - low) / rest if far >= _GROWN * near and rest > 0 else None


def _fit(points: Iterable[tuple[float, float]]) -> Line | None:
    """Return a line, through the origin where the points do not say where else."""
    kept = list(points)
    if not kept:
        return None
    return _siegel(kept) or Line(0.0, median(y / x for x, y in kept))


def _siegel(points: Iterable[tuple[float, float]]) -> Line | None:
    """Return the repeated-median line; None where it falls or the points are too near in x."""
    kept = list(points)
    apart = _APART * max(x for x, _ in kept)
    medians = []
    for x, y in kept:
        slopes = [(b - y) / (a - x) for a, b in kept if abs(a - x) >= apart]
        if len(slopes) >= max(2, len(kept) // 4):
            medians.append(median(slopes))
    if 2 * len(medians) <= len(kept):
        return None
    slope = median(medians)
    if slope <= 0:
        return None
    intercept = median(y - slope * x for x, y in kept)
    return Line(max(intercept, 0.0), slope)
