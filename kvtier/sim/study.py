"""A study: one trace, many policies, capacities and codecs, replayed by several processes."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

from kvtier import registry
from kvtier.config import parse_size
from kvtier.errors import ConfigError
from kvtier.sim import optimum
from kvtier.sim.replay import Outcome, chunk_keys, replay
from kvtier.sim.shapes import ModelShape, chunk_bytes
from kvtier.sim.trace import HINTS, Trace
from kvtier.types import ChunkKey, Hint

#: The name of the optimum among policies.
MIN: Final = "min"
WARM_UP_SHARE: Final = 0.1
WORKERS_DEFAULT: Final = 2
# A request's session goes on when one of its last blocks is used again; the very last may have
# been partly filled, and a template may end differently once more follows.
_ENDING_BLOCKS: Final = 3
# Below this many block accesses in all, starting processes costs more than it saves.
_ACCESSES_ALONE_MAX: Final = 300_000
_DAY_S: Final = 86_400.0
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Result:
    """What one policy does at one capacity with one codec, after the warm-up.

    ``capacity`` is as it was asked for. Bytes written are those of chunks newly kept.
    """

    policy: str
    codec: str
    capacity: str
    capacity_chunks: int
    capacity_bytes: int
    prefix_hit_percent: float
    flops_saved_percent: float
    bytes_written: int
    bytes_written_per_day: int
    optimum_hit_percent: float
    optimum_flops_saved_percent: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to find out. ``hints`` is the share of hints that are right, None to take the trace's.

    A capacity in percent is of the raw bytes of the trace's unique blocks, so a denser codec holds
    more chunks in it.
    """

    policies: tuple[str, ...]
    capacities: tuple[str, ...]
    codecs: tuple[str, ...]
    shape: ModelShape
    hints: float | None = None
    seed: int = 1
    workers: int = WORKERS_DEFAULT

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` or ``RegistryError`` for what cannot be studied."""
        for name, values in (("policy", self.policies), ("capacity", self.capacities)):
            if not values:
                raise ConfigError(f"no {name} is given; name at least one")
        for policy in self.policies:
            if policy != MIN:
                registry.policies.load(policy)
        for codec in self.codecs:
            chunk_bytes(self.shape, codec, 1)
        for capacity in self.capacities:
            parse_capacity(capacity, 1, 1.0, 1.0)
        if self.hints is not None and not 0.0 <= self.hints <= 1.0:
            raise ConfigError(f"hints is {self.hints}; allowed: a probability from 0 to 1")
        if self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; allowed: 1 or more")

    def cells(self, trace: Trace) -> Iterator[tuple[str, str, int]]:
        """Iterate over codecs, capacities and the chunks that these hold."""
        raw = chunk_bytes(self.shape, "raw", trace.block_tokens)
        for codec in self.codecs:
            nbytes = chunk_bytes(self.shape, codec, trace.block_tokens)
            for capacity in self.capacities:
                yield codec, capacity, parse_capacity(capacity, trace.unique_count, raw, nbytes)


def parse_capacity(text: str, unique_count: int, raw_bytes: float, chunk_bytes: float) -> int:
    """Return how many chunks a capacity holds, at least 1: ``5%`` or ``50GiB``."""
    number = text.removesuffix("%")
    if number != text:
        try:
            percent = float(number)
        except ValueError:
            percent = -1.0
        if not 0.0 < percent <= 100.0:
            raise ConfigError(f"capacity is {text!r}; allowed: above 0% and at most 100%")
        return max(1, int(unique_count * percent / 100.0 * raw_bytes / chunk_bytes + 1e-6))
    nbytes = parse_size(text)
    if nbytes <= 0:
        raise ConfigError(f"capacity is {text!r}; allowed: more than 0 bytes")
    return max(1, int(nbytes / chunk_bytes))


def session_hints(trace: Trace, right: float, seed: int) -> list[int]:
    """Return a hint per request, as an index of ``HINTS``, right with probability ``right``."""
    used_later = bytearray(trace.unique_count)
    goes_on = bytearray(trace.request_count)
    for request in range(trace.request_count - 1, -1, -1):
        path = trace.path(request)
        goes_on[request] = any(used_later[block] for block in path[-_ENDING_BLOCKS:])
        for block in path:
            used_later[block] = 1
    draw = random.Random(seed)  # noqa: S311
    says = [HINTS.index(Hint.DONE), HINTS.index(Hint.WILL_CONTINUE)]
    return [says[goes_on[i] ^ (draw.random() >= right)] for i in range(trace.request_count)]


def run_study(
    trace: Trace, plan: Plan, on_progress: Callable[[float], None] = lambda _: None
) -> list[Result]:
    """Return a result per codec, capacity and policy, in that order of nesting.

    ``on_progress`` is told the share done, from 0 to 1.
    """
    cells = list(plan.cells(trace))
    chunks = sorted({chunks for _, _, chunks in cells})
    jobs = [(p, c) for c in chunks for p in dict.fromkeys(plan.policies) if p != MIN]
    future = optimum.future_of(trace)
    outcomes: dict[tuple[str, int], Outcome] = {
        (MIN, count): Outcome(*optimum.optimal_hits(trace, future, count)) for count in chunks
    }
    hints: Sequence[int] = trace.hints
    if plan.hints is not None:
        hints = session_hints(trace, plan.hints, plan.seed)
    alone = len(jobs) * len(trace.blocks) <= _ACCESSES_ALONE_MAX or plan.workers == 1
    run = _run_alone if alone else _run_in_processes
    outcomes.update(run(trace, hints, jobs, plan.workers, on_progress))
    measured = _Measure(trace, plan.shape)
    return [
        measured.result(policy, codec, capacity, count, outcomes)
        for codec, capacity, count in cells
        for policy in plan.policies
    ]


class _Measure:
    def __init__(self, trace: Trace, shape: ModelShape) -> None:
        self._trace = trace
        self._shape = shape
        first = int(trace.request_count * WARM_UP_SHARE)
        self._measured = range(first, trace.request_count)
        self._paths = [trace.starts[i + 1] - trace.starts[i] for i in self._measured]
        self._days = (trace.times_s[-1] - trace.times_s[first]) / _DAY_S

    def result(
        self,
        policy: str,
        codec: str,
        capacity: str,
        count: int,
        outcomes: dict[tuple[str, int], Outcome],
    ) -> Result:
        """Return the figures of a policy, beside those of the optimum."""
        nbytes = chunk_bytes(self._shape, codec, self._trace.block_tokens)
        outcome, best = outcomes[policy, count], outcomes[MIN, count]
        written = int(sum(outcome.kept[i] for i in self._measured) * nbytes)
        return Result(
            policy,
            codec,
            capacity,
            count,
            int(count * nbytes),
            *self._percents(outcome),
            written,
            int(written / self._days) if self._days > 0 else 0,
            *self._percents(best),
        )

    def _percents(self, outcome: Outcome) -> tuple[float, float]:
        hits = [outcome.hits[i] for i in self._measured]
        saved = self._flops(hits) / max(self._flops(self._paths), 1.0)
        return 100.0 * sum(hits) / max(sum(self._paths), 1), 100.0 * saved

    def _flops(self, block_counts: Iterable[int]) -> float:
        tokens = self._trace.block_tokens
        return sum(self._shape.prefill_flops(0.0, count * tokens) for count in block_counts)


Job = tuple[str, int]


def _run_alone(
    trace: Trace,
    hints: Sequence[int],
    jobs: Sequence[Job],
    _workers: int,
    on_progress: Callable[[float], None],
) -> Iterator[tuple[Job, Outcome]]:
    keys = chunk_keys(trace.unique_count)
    total = max(1, len(jobs) * trace.request_count)
    done = 0

    def advance(requests: int) -> None:
        nonlocal done
        done += requests
        on_progress(done / total)

    for job in jobs:
        policy = registry.policies.load(job[0])
        yield job, replay(trace, hints, policy, job[1], keys, advance)


@dataclass(slots=True)
class _Shared:
    """What a worker process was given at its start."""

    trace: Trace
    hints: Sequence[int]
    keys: list[ChunkKey]
    done: Any  # a shared counter of requests


_given: list[_Shared] = []


def _receive(trace: Trace, hints: Sequence[int], done: Any) -> None:
    _given[:] = [_Shared(trace, hints, chunk_keys(trace.unique_count), done)]


def _run_job(job: Job) -> Outcome:
    given = _given[0]

    def advance(requests: int) -> None:
        with given.done.get_lock():
            given.done.value += requests

    policy = registry.policies.load(job[0])
    return replay(given.trace, given.hints, policy, job[1], given.keys, advance)


def _run_in_processes(
    trace: Trace,
    hints: Sequence[int],
    jobs: Sequence[Job],
    workers: int,
    on_progress: Callable[[float], None],
) -> Iterator[tuple[Job, Outcome]]:
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    total = max(1, len(jobs) * trace.request_count)
    with ProcessPoolExecutor(
        min(workers, len(jobs)), context, initializer=_receive, initargs=(trace, hints, done)
    ) as pool:
        pending: dict[Future[Outcome], Job] = {pool.submit(_run_job, job): job for job in jobs}
        while pending:
            finished, _ = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            on_progress(done.value / total)
            for each in finished:
                yield pending.pop(each), each.result()
