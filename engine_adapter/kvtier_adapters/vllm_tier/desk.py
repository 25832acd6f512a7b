"""vLLM's jobs between its CPU tier and a cache: every one comes back, once and in time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import KVTierError
from kvtier_adapters.payloads.complaints import Complaints
from kvtier_adapters.payloads.runner import Job, Runner
from kvtier_adapters.payloads.store import PlugStore
from kvtier_adapters.payloads.work import Steps
from kvtier_adapters.vllm_tier.doubts import Doubts
from kvtier_adapters.vllm_tier.limits import DRAIN_EXTRA_S, STORES_ACTIVE_MAX


@dataclass(frozen=True, slots=True)
class Finished:
    """What came of a job. ``good`` are the keys that were moved, in the job's order."""

    job_id: int
    good: tuple[bytes, ...]
    asked: int
    seconds: float

    @property
    def complete(self) -> bool:
        """Tell whether all keys were moved."""
        return len(self.good) == self.asked


class TierDesk:
    """Lookups, cascades and promotions of one replica. For vLLM's scheduler thread.

    No call waits for a tier but ``drain`` and ``close``. A promotion's memory is touched no more
    once it has come back. Every job comes back, soon after its deadline at the latest.
    """

    def __init__(self, store: PlugStore, scheme: str, complaints: Complaints) -> None:
        """Begin to work, in two threads: one for what requests wait for, one for cascades."""
        self._store, self._face = store, store.face(scheme)
        self._complaints = complaints
        self._doubts = Doubts(store.options.lookup_deadline_s)
        self._finished: list[Finished] = []
        self._open_jobs = 0
        self._lock = threading.Lock()
        self._loads = Runner("kvtier-vllm-load", complaints)
        self._stores = Runner("kvtier-vllm-store", complaints, active_max=STORES_ACTIVE_MAX)
        for runner in (self._loads, self._stores):
            store.listen(runner.wake)

    def held(self, key: bytes) -> bool | None:
        """Tell whether a chunk is held; None: not known yet, ask again. In microseconds."""
        now = self._store.clock.now()
        with self._lock:
            if self._doubts.doubted(key, now):
                return False
        try:
            (said,) = self._face.contains([key])
        except KVTierError as error:
            self._complaints.tell("lookup", f"a lookup raised {type(error).__name__}: {error}")
            said = False
        with self._lock:
            return self._doubts.answer(key, said, now)

    def store(self, job_id: int, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        """Begin to keep chunks."""
        items = list(zip(keys, chunks, strict=True))
        self._submit(self._stores, job_id, keys, self._face.put(items), loads=False)

    def load(self, job_id: int, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        """Begin to fill chunks."""
        self._submit(self._loads, job_id, keys, self._face.get(keys, chunks), loads=True)

    def fail(self, job_id: int, asked: int) -> None:
        """Have a job come back with nothing done."""
        with self._lock:
            self._open_jobs += 1
            self._finished.append(Finished(job_id, (), max(asked, 1), 0.0))

    def take_finished(self) -> list[Finished]:
        """Return the jobs that came back since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
            self._open_jobs -= len(finished)
        return finished

    @property
    def open_jobs(self) -> int:
        """Jobs that ``take_finished`` has not returned."""
        with self._lock:
            return self._open_jobs

    def drain(self) -> bool:
        """Block until all jobs have come back; False: a copy still runs, which is a bug."""
        options = self._store.options
        timeout_s = max(options.load_deadline_s, options.store_deadline_s) + DRAIN_EXTRA_S
        return self._loads.drain(timeout_s) and self._stores.drain(timeout_s)

    def forget_all(self) -> None:
        """Invalidate every chunk of these weights, as after they were changed."""
        try:
            self._store.forget_all()
        except KVTierError as error:  # It holds for this process, and is told to others later.
            self._complaints.tell("forget", f"not everybody heard: {error}")

    def close(self) -> None:
        """End what is under way, then close the cache."""
        self._store.cancel()
        self._loads.close()
        self._stores.close()
        self._store.close()

    def _submit(
        self,
        runner: Runner,
        job_id: int,
        keys: Sequence[bytes],
        steps: Steps[list[bool]],
        *,
        loads: bool,
    ) -> None:
        begun_s = self._store.clock.now()
        with self._lock:
            self._open_jobs += 1

        def ended(moved: list[bool] | None) -> None:
            now = self._store.clock.now()
            flags = moved if moved is not None else [False] * len(keys)
            good = tuple(key for key, there in zip(keys, flags, strict=True) if there)
            with self._lock:
                if loads:
                    bad = (key for key, there in zip(keys, flags, strict=True) if not there)
                    self._doubts.failed(bad, now)
                else:
                    self._doubts.stored(good)
                self._finished.append(Finished(job_id, good, len(keys), now - begun_s))
            if len(good) < len(keys):
                kind = "promotion" if loads else "cascade"
                self._complaints.tell(kind, f"a {kind} moved {len(good)} of {len(keys)} chunks")

        runner.submit(Job(steps, ended))
