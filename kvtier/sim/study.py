"""A study: one trace, many policies, capacities and codecs, replayed by several processes."""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvtier import registry
from kvtier.admission.budget import Budgeted, WriteBudget
from kvtier.config import parse_size
from kvtier.errors import ConfigError, RegistryError, nearest
from kvtier.interfaces import AdmissionPolicy
from kvtier.sim import optimum
from kvtier.sim.replay import Outcome, chunk_keys, replay
from kvtier.sim.shapes import ModelShape, chunk_bytes
from kvtier.sim.trace import HINTS, Trace
from kvtier.types import ChunkKey, Hint

#: The name of the optimum among policies; it decides itself what is worth a write.
MIN: Final = "min"
EVERYTHING: Final = "everything"
WARM_UP_SHARE: Final = 0.1
WORKERS_DEFAULT: Final = 2
# A request's session goes on when one of its last blocks is used again; the very last may have
# been partly filled, and a template may end differently once more follows.
_ENDING_BLOCKS: Final = 3
# Below this many block accesses in all, starting processes costs more than it saves.
_ACCESSES_ALONE_MAX: Final = 300_000
_DAY_S: Final = 86_400.0
_POLL_S: Final = 0.2
# Requests within less time than this say nothing of a day.
_SPAN_S_MIN: Final = 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """What one policy and admission do at one capacity with one codec, after the warm-up.

    ``capacity`` is as it was asked for. Bytes written are those of chunks newly kept; per day they
    are 0 where the requests measured span less than a second.
    """

    policy: str
    admission: str
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


class Job(NamedTuple):
    """One replay. ``chunks`` is the capacity, ``chunks_a_day`` the write budget (0: none)."""

    policy: str
    admission: str
    chunks: int
    chunks_a_day: int


class _Cell(NamedTuple):
    """One result to be: ``capacity`` is as it was asked for."""

    codec: str
    capacity: str
    job: Job


@dataclass(frozen=True, slots=True)
class Plan:
    """What to find out. ``hints`` is the share of hints that are right, None to take the trace's.

    A capacity in percent is of the raw bytes of the trace's unique blocks, so a denser codec holds
    more chunks in it. ``write_bytes_per_day`` bounds what admissions let through; 0 is no bound.
    """

    policies: tuple[str, ...]
    capacities: tuple[str, ...]
    codecs: tuple[str, ...]
    shape: ModelShape
    hints: float | None = None
    seed: int = 1
    workers: int = WORKERS_DEFAULT
    admissions: tuple[str, ...] = (EVERYTHING,)
    write_bytes_per_day: int = 0

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` or ``RegistryError`` for what cannot be studied."""
        for name, values in (
            ("policy", self.policies),
            ("admission", self.admissions),
            ("capacity", self.capacities),
            ("codec", self.codecs),
        ):
            if not values:
                raise ConfigError(f"no {name} is given; name at least one")
        for policy in self.policies:
            if policy not in policy_names():
                hint = nearest(policy, policy_names())
                known = ", ".join(policy_names())
                raise RegistryError(f"no policy {policy!r}{hint}; known: {known}")
            if policy != MIN:
                registry.policies.load(policy)
        for admission in self.admissions:
            registry.admissions.load(admission)
        if self.write_bytes_per_day < 0:
            raise ConfigError(
                f"write_bytes_per_day is {self.write_bytes_per_day}; allowed: 0 (no bound) or more"
            )
        for codec in self.codecs:
            chunk_bytes(self.shape, codec, 1)
        for capacity in self.capacities:
            parse_capacity(capacity, 1, 1.0, 1.0)
        if self.hints is not None and not 0.0 <= self.hints <= 1.0:
            raise ConfigError(f"hints is {self.hints}; allowed: a probability from 0 to 1")
        if self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; allowed: 1 or more")

    def cells(self, trace: Trace) -> Iterator[_Cell]:
        """Iterate over codecs, capacities, policies and admissions, in that order of nesting."""
        raw = chunk_bytes(self.shape, "raw", trace.block_tokens)
        for codec in self.codecs:
            nbytes = chunk_bytes(self.shape, codec, trace.block_tokens)
            a_day = int(self.write_bytes_per_day / nbytes)
            if self.write_bytes_per_day and not a_day:
                raise ConfigError(
                    f"write_bytes_per_day is {self.write_bytes_per_day}; allowed: 0 (no bound), or "
                    f"at least one chunk of {codec}, {int(nbytes) + 1}"
                )
            for capacity in self.capacities:
                chunks = parse_capacity(capacity, trace.unique_count, raw, nbytes)
                for policy in self.policies:
                    if policy == MIN:
                        yield _Cell(codec, capacity, Job(MIN, MIN, chunks, 0))
                        continue
                    for admission in self.admissions:
                        yield _Cell(codec, capacity, Job(policy, admission, chunks, a_day))


def policy_names() -> list[str]:
    """Return the policies that may be asked for, the optimum last."""
    return [*registry.policies.names(), MIN]


def parse_capacity(text: str, unique_count: int, raw_bytes: float, chunk_bytes: float) -> int:
    """Return how many chunks a capacity holds: ``5%``, then at least 1, or ``50GiB``.

    Raises ``ConfigError`` for any other text, and for a size that holds no chunk.
    """
    allowed = "a share above 0% and at most 100% (5%), or a size with its unit (50GiB)"
    number = text.removesuffix("%")
    if number != text:
        try:
            percent = float(number)
        except ValueError:
            percent = -1.0
        if not 0.0 < percent <= 100.0:
            raise ConfigError(f"capacity is {text!r}; allowed: {allowed}")
        return max(1, int(unique_count * percent / 100.0 * raw_bytes / chunk_bytes + 1e-6))
    # A bare number would be bytes; whoever writes 5 means 5% or 5GiB.
    nbytes = parse_size(text) if text[-1:].isalpha() else 0
    if nbytes <= 0:
        raise ConfigError(f"capacity is {text!r}; allowed: {allowed}")
    if nbytes < chunk_bytes:
        least = math.ceil(chunk_bytes)
        raise ConfigError(f"capacity is {text!r}; allowed: at least one chunk, {least} bytes")
    return int(nbytes / chunk_bytes)


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
    """Return a result per codec, capacity, policy and admission, in that order of nesting.

    ``on_progress`` is told the share done, from 0 to 1.
    """
    cells = list(plan.cells(trace))
    jobs = list(dict.fromkeys(cell.job for cell in cells if cell.job.policy != MIN))
    future = optimum.future_of(trace)
    outcomes: dict[Job, Outcome] = {}
    for count in sorted({cell.job.chunks for cell in cells}):
        best = optimum.optimal_hits(trace, future, count)
        outcomes[Job(MIN, MIN, count, 0)] = Outcome(*best)
    hints: Sequence[int] = trace.hints
    if plan.hints is not None:
        hints = session_hints(trace, plan.hints, plan.seed)
    alone = len(jobs) * len(trace.blocks) <= _ACCESSES_ALONE_MAX or plan.workers == 1
    run = _run_alone if alone else _run_in_processes
    outcomes.update(run(trace, hints, jobs, plan.workers, on_progress))
    measured = _Measure(trace, plan.shape)
    return [measured.result(cell, outcomes) for cell in cells]


class _Measure:
    def __init__(self, trace: Trace, shape: ModelShape) -> None:
        self._trace = trace
        self._shape = shape
        first = int(trace.request_count * WARM_UP_SHARE)
        self._measured = range(first, trace.request_count)
        self._paths = [trace.starts[i + 1] - trace.starts[i] for i in self._measured]
        span_s = trace.times_s[-1] - trace.times_s[first]
        self._days = span_s / _DAY_S if span_s >= _SPAN_S_MIN else 0.0

    def result(self, cell: _Cell, outcomes: dict[Job, Outcome]) -> Result:
        """Return the figures of a policy, beside those of the optimum."""
        nbytes = chunk_bytes(self._shape, cell.codec, self._trace.block_tokens)
        job = cell.job
        outcome, best = outcomes[job], outcomes[Job(MIN, MIN, job.chunks, 0)]
        written = int(sum(outcome.kept[i] for i in self._measured) * nbytes)
        return Result(
            job.policy,
            job.admission,
            cell.codec,
            cell.capacity,
            job.chunks,
            int(job.chunks * nbytes),
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


def _replay_job(
    job: Job,
    trace: Trace,
    hints: Sequence[int],
    keys: Sequence[ChunkKey],
    on_progress: Callable[[int], None],
) -> Outcome:
    policy = registry.policies.load(job.policy)
    admission: AdmissionPolicy | None = None
    if job.admission != EVERYTHING or job.chunks_a_day:
        admission = registry.admissions.load(job.admission)(job.chunks)
    if admission is not None and job.chunks_a_day:
        admission = Budgeted(admission, WriteBudget(job.chunks_a_day))
    return replay(trace, hints, policy, job.chunks, keys, on_progress, admission)


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
        yield job, _replay_job(job, trace, hints, keys, advance)


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

    return _replay_job(job, given.trace, given.hints, given.keys, advance)


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
