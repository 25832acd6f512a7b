"""Puts, gets and lookups as steps: each goes on without waiting, whoever drives them.

A ``Steps`` is a generator that yields where it has to wait for a tier and returns what came of it.
It ends soon after its deadline, whatever the tiers do.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

from kvtier.cache.keyed import KeyedCache, Source, Target
from kvtier.cache.keyed_desk import Outcome
from kvtier.cache.keyed_transfer import Transfer
from kvtier.constants import KEYED_BATCH_MAX
from kvtier.errors import KVTierError
from kvtier.interfaces import Clock
from kvtier.types import Tier
from kvtier_adapters.payloads.limits import PAUSE_S_MAX, PAUSE_S_MIN

T = TypeVar("T")
Steps = Generator[None, None, T]


def put_steps(
    keyed: KeyedCache, items: Sequence[tuple[bytes, Source]], deadline: float
) -> Steps[list[bool]]:
    """Store payloads; returns for each whether a tier holds it. Buffers are free after the end."""
    stored: list[bool] = []
    for some in batches(items):
        outcomes = yield from _steps(keyed.put(some, deadline=deadline))
        stored += (isinstance(outcome, Tier) for outcome in outcomes)
    return stored


def get_steps(
    keyed: KeyedCache, keys: Sequence[bytes], into: Sequence[Target], deadline: float
) -> Steps[list[bool]]:
    """Fill buffers; returns for each whether the payload is in it, whole and verified.

    What a buffer holds after a miss is undefined. Buffers are free after the end.
    """
    filled: list[bool] = []
    for some in batches(list(zip(keys, into, strict=True))):
        names, targets = [key for key, _ in some], [target for _, target in some]
        outcomes = yield from _steps(keyed.get(names, targets, deadline=deadline))
        filled += (isinstance(outcome, Tier) for outcome in outcomes)
    return filled


def lookup_steps(
    keyed: KeyedCache, keys: Sequence[bytes], clock: Clock, deadline: float
) -> Steps[list[bool]]:
    """Find out which keys are held; what nobody could say by the deadline is not."""
    held: list[bool | None] = []
    for some in batches(keys):
        held += keyed.contains(some)
    while None in held and clock.now() < deadline:
        yield
        unknown = [number for number, said in enumerate(held) if said is None]
        for numbers in batches(unknown):
            for number, said in zip(
                numbers, keyed.contains([keys[number] for number in numbers]), strict=True
            ):
                held[number] = said
    return [bool(said) for said in held]


def prefix_steps(
    keyed: KeyedCache, keys: Sequence[bytes], clock: Clock, deadline: float, *, at_once: int
) -> Steps[int]:
    """Count the keys before the first that is not held, looking at ``at_once`` at a time."""
    for start in range(0, len(keys), at_once):
        held = yield from lookup_steps(keyed, keys[start : start + at_once], clock, deadline)
        if not all(held):
            return start + held.index(False)
    return len(keys)


def side_by_side(many: Sequence[Steps[list[T]]]) -> Steps[list[T]]:
    """Drive several at a time; returns what each returned, one after the other.

    When one raises, the others are driven to their end before that is raised: no buffer is
    touched any more.
    """
    active, results = dict(enumerate(many)), [list[T]() for _ in many]
    raised: Exception | None = None
    while active:
        for number, steps in list(active.items()):
            try:
                next(steps)
                continue
            except StopIteration as end:
                results[number] = end.value
            except KVTierError as error:
                raised = error
            del active[number]
        if active:
            yield
    if raised is not None:
        raise raised
    return [value for result in results for value in result]


def run_to_end(steps: Steps[T], news: threading.Event) -> T:
    """Drive steps in the calling thread: at once when ``news`` is set, and now and then."""
    pause_s = PAUSE_S_MIN
    while True:
        news.clear()
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value
        news.wait(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


def _steps(transfer: Transfer) -> Steps[list[Outcome]]:
    while (outcomes := transfer.poll()) is None:
        yield
    return outcomes


def batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Cut what one call to a keyed cache may not take at once."""
    for start in range(0, len(items), KEYED_BATCH_MAX):
        yield items[start : start + KEYED_BATCH_MAX]
