"""The cache behind a plug, and its faces: one for each kind of payload that the engine has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvtier.cache.cache import Cache
from kvtier.cache.keyed import KeyedCache, Source, Target
from kvtier.clock import SystemClock
from kvtier.codecs.opaque import opaque_layout
from kvtier.interfaces import Clock
from kvtier.types import Namespace
from kvtier_adapters.payloads.options import PlugOptions
from kvtier_adapters.payloads.work import (
    Steps,
    batches,
    get_steps,
    lookup_steps,
    prefix_steps,
    put_steps,
    run_to_end,
    side_by_side,
)

T = TypeVar("T")


class PlugStore:
    """Opens a cache and gives out faces. Any thread may call; ``close`` it once nothing runs."""

    def __init__(
        self,
        options: PlugOptions,
        system: str,
        *,
        folder: str = "",
        cache: Cache | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Open the cache. ``system`` names whose keys these are. Raises as ``Cache`` does.

        ``folder`` is this process's own below each of the disk's directories. A cache that is
        given is used as it is, and closed all the same.
        """
        self.options = options
        self.clock = clock or SystemClock()
        self.cache = cache or Cache(options.cache_config(folder), clock=self.clock)
        self._system = system
        # Without a name for the weights nothing outlives the process, so they are its own.
        weights_id = options.weights_id or "those of this process"
        self._namespace = Namespace(weights_id, opaque_layout(1), tenant_salt=options.tenant_salt)
        self._faces: dict[str, Face] = {}
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._lock = threading.Lock()

    def face(self, scheme: str) -> Face:
        """Return the face of a kind of payload; the same for the same scheme.

        The scheme says all on which the bytes depend and that the keys do not say.
        """
        with self._lock:
            if scheme not in self._faces:
                text = f"{self._system}; {scheme}"
                lanes = [
                    KeyedCache(
                        self.cache, self._namespace, text, clock=self.clock, stirred=self._stir
                    )
                    for _ in range(self.options.copy_threads)
                ]
                self._faces[scheme] = Face(lanes, self.options, self.clock)
            return self._faces[scheme]

    def listen(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called when steps may go on: they need not wait for their next turn.

        From any thread; it neither blocks nor raises.
        """
        with self._lock:
            self._listeners += (listener,)

    def run(self, steps: Steps[T]) -> T:
        """Drive steps in the calling thread, which has nothing else to do."""
        news = threading.Event()
        self.listen(news.set)
        try:
            return run_to_end(steps, news)
        finally:
            with self._lock:
                self._listeners = tuple(each for each in self._listeners if each != news.set)

    def forget_all(self) -> None:
        """Invalidate everything that was ever kept for these weights and this tenant."""
        self.cache.invalidate(self._namespace)

    @property
    def healthy(self) -> bool:
        """Tell whether all tiers work."""
        return not self.cache.stats().degraded

    def cancel(self) -> None:
        """Begin nothing more: what is under way ends soon, and what is begun later at once."""
        with self._lock:
            faces = list(self._faces.values())
        for face in faces:
            face.close()

    def close(self) -> None:
        """Close the faces, then the cache."""
        self.cancel()
        self.cache.close()

    def _stir(self) -> None:
        for listener in self._listeners:
            listener()


class Face:
    """Payloads of one kind, with the deadlines of the options. Any thread may call.

    Several keyed caches that differ in nothing: each copies in a thread of its own, so a batch is
    shared out among them.
    """

    def __init__(self, lanes: Sequence[KeyedCache], options: PlugOptions, clock: Clock) -> None:
        """Use keyed caches of one namespace and scheme, and own them."""
        self._lanes = lanes
        self._options = options
        self._clock = clock

    def put(self, items: Sequence[tuple[bytes, Source]]) -> Steps[list[bool]]:
        """See ``put_steps``; the deadline runs from now on, also before the first step."""
        deadline = self._clock.now() + self._options.store_deadline_s
        return side_by_side(
            [
                put_steps(lane, items[start:end], deadline)
                for lane, start, end in self._shares(len(items))
            ]
        )

    def get(self, keys: Sequence[bytes], into: Sequence[Target]) -> Steps[list[bool]]:
        """See ``get_steps``; the deadline runs from now on."""
        deadline = self._clock.now() + self._options.load_deadline_s
        return side_by_side(
            [
                get_steps(lane, keys[start:end], into[start:end], deadline)
                for lane, start, end in self._shares(len(keys))
            ]
        )

    def contains(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Tell which payloads are held, at once; None: not known yet. Takes one batch."""
        return self._lanes[0].contains(keys)

    def lookup(self, keys: Sequence[bytes]) -> Steps[list[bool]]:
        """See ``lookup_steps``; the deadline runs from now on."""
        return lookup_steps(self._lanes[0], keys, self._clock, self._lookup_deadline)

    def prefix(self, keys: Sequence[bytes], *, at_once: int) -> Steps[int]:
        """See ``prefix_steps``; the deadline runs from now on."""
        deadline = self._lookup_deadline
        return prefix_steps(self._lanes[0], keys, self._clock, deadline, at_once=at_once)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget payloads; from now on they are not found."""
        for some in batches(keys):
            for lane in self._lanes:  # One that still deletes a payload hides it for itself alone.
                lane.delete(some)

    def close(self) -> None:
        """End what is under way. Once is enough."""
        for lane in self._lanes:
            lane.close()

    @property
    def _lookup_deadline(self) -> float:
        return self._clock.now() + self._options.lookup_deadline_s

    def _shares(self, count: int) -> Iterator[tuple[KeyedCache, int, int]]:
        share = -(-count // len(self._lanes)) or 1
        for lane, start in zip(self._lanes, range(0, count, share), strict=False):
            yield lane, start, min(start + share, count)
