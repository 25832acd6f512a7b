"""How far a load is with what it has to bring up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.cache.pieces import Piece
from kvtier.cache.worth.patience import Patience, Progress
from kvtier.constants import READ_STEP_BYTES
from kvtier.types import Tier


def gives_up(
    patience: Patience | None, now: float, pieces: Sequence[Piece], chunk_tokens: int
) -> bool:
    """Tell whether a load's patience has come to its end; ``pieces`` are those that count."""
    return patience is not None and patience.over(now, progress_of(pieces, chunk_tokens))


def progress_of(pieces: Iterable[Piece], chunk_tokens: int) -> Progress:
    """Return how far a load's pieces are, in order; a chunk has so many tokens."""
    below = came = 0.0
    coming: list[float] = []
    complete, unbroken = 0, True
    for piece in pieces:
        share = _share(piece)
        unbroken = unbroken and share >= 1.0
        if unbroken:
            complete = piece.chunk * chunk_tokens + piece.tokens.stop
        if piece.tier is Tier.DRAM:
            continue
        below += 1
        came += share
        if piece.fill is not None and share < 1.0:
            section, step = 1 / max(_sections(piece), 1), READ_STEP_BYTES / _nbytes(piece)
            # The first read of a fill is of one section, later ones are of more.
            coming.append(min(max(section, step) if share else section, 1.0 - share))
    if not below:
        return Progress(1.0, 0.0, complete)
    beside = sum(coming) - max(coming, default=0.0)
    return Progress(came / below, beside / below, complete)


def _share(piece: Piece) -> float:
    if piece.complete or (piece.record is not None and piece.fill is None):
        return 1.0
    if piece.fill is None:
        return 0.0
    verified = sum(min(piece.fill.verified[shard], n) for shard, n in piece.sections.items())
    return verified / max(_sections(piece), 1)


def _sections(piece: Piece) -> int:
    return sum(piece.sections.values())


def _nbytes(piece: Piece) -> int:
    assert piece.record is not None, "a fill without a record"
    return piece.record.entry.nbytes
