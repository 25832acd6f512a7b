"""The L2 tasks of LMCache's server over a cache of payloads: submitted, signalled, asked once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier_adapters.lmcache.books import Locks, Results, Sizes
from kvtier_adapters.lmcache.limits import LAYOUTS_MAX, STORES_ACTIVE_MAX
from kvtier_adapters.lmcache.naming import L2_SCHEME, SEAL_BYTES, seal, sealed_bytes
from kvtier_adapters.payloads.complaints import Complaints
from kvtier_adapters.payloads.runner import Job, Runner
from kvtier_adapters.payloads.store import PlugStore
from kvtier_adapters.payloads.work import Steps


@dataclass(frozen=True, slots=True)
class Named:
    """An object: LMCache's key, and the foreign key that it is kept under."""

    key: Hashable
    name: bytes


@dataclass(frozen=True, slots=True)
class Object(Named):
    """An object with its memory, which is the caller's and lives until the task has ended."""

    memory: memoryview
    layout: str


class Notices(Protocol):
    """What LMCache's quotas and listeners are told. From the desk's threads; does not raise."""

    def stored(self, keys: list[Any], sizes: list[int]) -> None:
        """Tell of objects that are held now."""
        ...

    def accessed(self, keys: list[Any]) -> None:
        """Tell of objects that were loaded."""
        ...

    def deleted(self, keys: list[Any], sizes: list[int]) -> None:
        """Tell of objects that are no longer held, or no longer counted."""
        ...


@dataclass(frozen=True, slots=True)
class Signals:
    """Called when a result can be asked for. From the desk's threads."""

    stored: Callable[[], None]
    looked_up: Callable[[], None]
    loaded: Callable[[], None]


class L2Desk:
    """Tasks and what came of them. Any thread may call; no call waits for a tier.

    Every task that is submitted has one result, soon after its deadline at the latest, whatever
    the tiers do. Memory of a task is touched no more once its result is there.
    """

    def __init__(
        self, store: PlugStore, notices: Notices, signals: Signals, complaints: Complaints
    ) -> None:
        """Begin to work, in two threads: one for stores, one for what requests wait for."""
        self._store, self._face = store, store.face(L2_SCHEME)
        self._notices, self._signals, self._complaints = notices, signals, complaints
        self._numbers = itertools.count()
        self._stored: Results[int] = Results()
        self._looked_up: Results[list[bool]] = Results()
        self._loaded: Results[list[bool]] = Results()
        self._locks, self._sizes = Locks(), Sizes()
        self._layouts: dict[str, None] = {}
        self._lock = threading.Lock()
        self._loads = Runner("kvtier-lmcache-load", complaints)
        self._stores = Runner("kvtier-lmcache-store", complaints, active_max=STORES_ACTIVE_MAX)
        for runner in (self._loads, self._stores):
            store.listen(runner.wake)

    def submit_store(self, objects: Sequence[Object]) -> int:
        """Begin to store; the result is the bytes that were stored, or -1 if not all were."""
        task = next(self._numbers)
        items = [(one.name, (one.memory, seal(len(one.memory), one.layout))) for one in objects]
        self._note_layouts(objects)
        job = Job(self._face.put(items), lambda came: self._end_store(task, objects, came))
        self._stores.submit(job)
        return task

    def take_stored(self) -> dict[int, int]:
        """Return the results of stores, each once."""
        with self._lock:
            return self._stored.take_all()

    def submit_lookup(self, objects: Sequence[Named]) -> int:
        """Begin to look up; what is found is locked against ``delete`` until ``unlock``.

        A lock does not keep the cache from evicting: then the load is a miss.
        """
        task = next(self._numbers)
        steps = self._face.lookup([one.name for one in objects])
        self._loads.submit(Job(steps, lambda came: self._end_lookup(task, objects, came)))
        return task

    def take_looked_up(self, task: int) -> list[bool] | None:
        """Return what a lookup found, once; None: not yet."""
        with self._lock:
            return self._looked_up.take(task)

    def unlock(self, keys: Iterable[Hashable]) -> None:
        """Take back one lock of each object."""
        with self._lock:
            for key in keys:
                self._locks.unlock(key)

    def submit_load(self, objects: Sequence[Object]) -> int:
        """Begin to fill memory; the result tells which objects are there, whole and verified."""
        task = next(self._numbers)
        steps = self._load(objects)
        self._loads.submit(Job(steps, lambda came: self._end_load(task, objects, came)))
        return task

    def take_loaded(self, task: int) -> list[bool] | None:
        """Return what a load filled, once; None: not yet."""
        with self._lock:
            return self._loaded.take(task)

    def fail(self, kind: str, count: int) -> int:
        """Return a task whose result, that nothing was done for any object, is there already."""
        task = next(self._numbers)
        if kind == "store":
            self._end_store(task, (), None)
        elif kind == "lookup":
            self._post(self._looked_up, task, [False] * count, self._signals.looked_up)
        else:
            self._post(self._loaded, task, [False] * count, self._signals.loaded)
        return task

    def delete(self, objects: Sequence[Named]) -> None:
        """Forget objects that no lookup has locked; the others stay."""
        with self._lock:
            free = [one for one in objects if one.key not in self._locks]
            gone = self._sizes.remove(one.key for one in free)
        self._face.delete([one.name for one in free])
        self._tell_deleted(gone)

    @property
    def figures(self) -> dict[str, int]:
        """What is under way and remembered, for who looks after the adapter."""
        with self._lock:
            locks, keys = len(self._locks), len(self._sizes)
        jobs = self._loads.jobs + self._stores.jobs
        return {"jobs": jobs, "locked": locks, "keys": keys, **self._complaints.counts}

    def close(self) -> None:
        """End what is under way, then close the cache."""
        self._store.cancel()
        self._loads.close()
        self._stores.close()
        self._store.close()

    @property
    def layouts(self) -> list[str]:
        """The first ``LAYOUTS_MAX`` layouts that were stored, as an import takes them."""
        with self._lock:
            return list(self._layouts)

    def _note_layouts(self, objects: Sequence[Object]) -> None:
        with self._lock:
            for layout in {one.layout for one in objects}:
                if len(self._layouts) < LAYOUTS_MAX:
                    self._layouts[layout] = None

    def _load(self, objects: Sequence[Object]) -> Steps[list[bool]]:
        seals = [bytearray(SEAL_BYTES) for _ in objects]
        into = [(one.memory, found) for one, found in zip(objects, seals, strict=True)]
        filled = yield from self._face.get([one.name for one in objects], into)
        wrong: list[bytes] = []
        for number, (one, found) in enumerate(zip(objects, seals, strict=True)):
            if filled[number] and sealed_bytes(found, one.layout) != len(one.memory):
                filled[number] = False
                wrong.append(one.name)
        if wrong:
            # They make room: the next store is of the layout that is in use now.
            self._face.delete(wrong)
            text = "objects of another layout under the same keys; give each its own weights_id"
            self._complaints.tell("other_layout", text)
        return filled

    def _end_store(self, task: int, objects: Sequence[Object], stored: list[bool] | None) -> None:
        sizes = [
            (one.key, len(one.memory))
            for one, kept in zip(objects, stored or [False] * len(objects), strict=True)
            if kept
        ]
        self._count(sizes)
        complete = stored is not None and len(sizes) == len(objects)
        if not complete:
            self._complaints.tell("not_stored", "a store task did not store all its objects")
        nbytes = sum(nbytes for _, nbytes in sizes) if complete else -1
        self._post(self._stored, task, nbytes, self._signals.stored)

    def _end_lookup(self, task: int, objects: Sequence[Named], held: list[bool] | None) -> None:
        held = held or [False] * len(objects)
        with self._lock:
            found = [
                there and self._locks.lock(one.key)
                for one, there in zip(objects, held, strict=True)
            ]
        self._post(self._looked_up, task, found, self._signals.looked_up)

    def _end_load(self, task: int, objects: Sequence[Object], filled: list[bool] | None) -> None:
        filled = filled or [False] * len(objects)
        pairs = list(zip(objects, filled, strict=True))
        found = [one for one, there in pairs if there]
        # What was there before this process began is counted when it is first seen.
        self._count([(one.key, len(one.memory)) for one in found])
        with self._lock:
            gone = self._sizes.remove(one.key for one, there in pairs if not there)
        self._tell_deleted(gone)
        if found:
            self._notices.accessed([one.key for one in found])
        self._post(self._loaded, task, filled, self._signals.loaded)

    def _count(self, sizes: list[tuple[Hashable, int]]) -> None:
        with self._lock:
            new, old = self._sizes.add(sizes), self._sizes.trim()
        if new:
            self._notices.stored([key for key, _ in new], [nbytes for _, nbytes in new])
        self._tell_deleted(old)

    def _tell_deleted(self, gone: list[tuple[Hashable, int]]) -> None:
        if gone:
            self._notices.deleted([key for key, _ in gone], [nbytes for _, nbytes in gone])

    def _post(
        self, results: Results[Any], task: int, result: Any, signal: Callable[[], None]
    ) -> None:
        with self._lock:
            results.add(task, result)
        signal()
