"""Pages of all pools in one cache: blocking calls with deadlines, from SGLang's own threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtier.errors import LayoutError
from kvtier_adapters.payloads.complaints import Complaints
from kvtier_adapters.payloads.store import Face, PlugStore
from kvtier_adapters.payloads.work import Steps
from kvtier_adapters.sglang.hits import PoolFound, restorable
from kvtier_adapters.sglang.identity import page_scheme
from kvtier_adapters.sglang.limits import FIGURES_MAX, LOOKUP_PAGES_MAX
from kvtier_adapters.sglang.pages import pages_of, piece_bytes, tensor_bytes

KV = "kv"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Moved:
    """What one batch moved: pages, and gigabytes a second."""

    pages: int
    gigabytes_per_s: float


@dataclass(frozen=True, slots=True)
class _Pool:
    host_pool: Any
    face: Face
    page_bytes: int


class PageDesk:
    """Puts, gets and looks up pages by SGLang's hashes. Any thread may call.

    A call blocks until every page has an outcome, at most about as long as the deadline of its
    kind; then nothing touches the pages' memory any more. Whatever goes wrong is a miss, or a page
    that was not stored: no call raises.
    """

    def __init__(self, store: PlugStore, config: Any, complaints: Complaints) -> None:
        """Use a store; ``config`` is SGLang's ``HiCacheStorageConfig``."""
        self._store, self._config, self._complaints = store, config, complaints
        self._pools: dict[str, _Pool] = {}
        self._kv: Face | None = None
        self._moved: dict[str, deque[Moved]] = {
            kind: deque(maxlen=FIGURES_MAX) for kind in ("get", "put")
        }
        self._lock = threading.Lock()

    def register(self, name: str, host_pool: Any, first_page: Any) -> None:
        """Use a host pool under a name; ``first_page`` are the slots of any one of its pages.

        Raises ``LayoutError`` for a pool whose pages do not lie in memory that can be told of.
        """
        if not hasattr(host_pool, "get_page_buffer_meta"):
            raise LayoutError(f"pool {name!r}: {type(host_pool).__name__} tells of no page buffers")
        sizes = piece_bytes(pages_of(host_pool, first_page, 1))
        face = self._store.face(page_scheme(self._config, name, host_pool, sizes))
        with self._lock:
            self._pools[name] = _Pool(host_pool, face, sum(sizes))
            self._kv = face if name == KV else self._kv

    def register_flat(self, host_pool: Any) -> None:
        """Use the KV pool for pages that come and go as tensors of their own."""
        self._kv = self._store.face("flat " + page_scheme(self._config, KV, host_pool, ()))

    def put(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Store pages of a pool; tells which are held."""

        def work() -> list[bool]:
            pool = self._pools[name]
            pages = pages_of(pool.host_pool, host_indices, len(keys))
            items = list(zip(_names(keys), pages, strict=True))
            return self._timed("put", pool, pool.face.put(items))

        return self._do_boundary("put", work, [False] * len(keys))

    def get(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Fill pages of a pool; tells which are there, whole and verified."""

        def work() -> list[bool]:
            pool = self._pools[name]
            pages = pages_of(pool.host_pool, host_indices, len(keys))
            return self._timed("get", pool, pool.face.get(_names(keys), pages))

        return self._do_boundary("get", work, [False] * len(keys))

    def prefix(self, keys: Sequence[str]) -> int:
        """Count the KV pages before the first that is not held."""

        def work() -> int:
            steps = self._kv_face.prefix(_names(keys), at_once=LOOKUP_PAGES_MAX)
            return self._store.run(steps)

        return self._do_boundary("lookup", work, 0)

    def found(
        self, keys: Sequence[str], wanted: Sequence[tuple[str, str, int]]
    ) -> tuple[list[int], dict[str, int]]:
        """Return what ``hits.restorable`` says, for pools by name, policy and trailing pages."""

        def work() -> tuple[list[int], dict[str, int]]:
            kv_pages = self.prefix(keys)
            names = _names(keys[:kv_pages])
            pools: dict[str, PoolFound] = {}
            for name, policy, trailing in wanted:
                known = self._pools.get(name)
                held = [False] * kv_pages
                if known is not None:
                    held = self._store.run(known.face.lookup(names))
                pools[name] = PoolFound(policy, held, trailing)
            lengths, reach = restorable(kv_pages, pools)
            return lengths, {KV: kv_pages, **reach}

        nothing: tuple[list[int], dict[str, int]] = ([], {})
        return self._do_boundary("lookup", work, nothing)

    def put_flat(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        """Store pages from tensors of their own, as SGLang's older interface has them."""

        def work() -> list[bool]:
            views = [tensor_bytes(value) for value in values]
            items = list(zip(_names(keys), views, strict=True))
            return self._store.run(self._kv_face.put(items))

        return self._do_boundary("put", work, [False] * len(keys))

    def get_flat(self, keys: Sequence[str], targets: Sequence[Any]) -> list[bool]:
        """Fill tensors of their own; tells which are there, whole and verified."""

        def work() -> list[bool]:
            views = [tensor_bytes(target) for target in targets]
            steps = self._kv_face.get(_names(keys), views)
            return self._store.run(steps)

        return self._do_boundary("get", work, [False] * len(keys))

    def clear(self) -> bool:
        """Forget every page of these weights, for every server; False: not everybody heard."""

        def work() -> bool:
            self._store.forget_all()
            return True

        return self._do_boundary("clear", work, False)

    def take_moved(self, kind: str) -> list[Moved]:
        """Return what ``get`` or ``put`` moved since the last call. Does not wait."""
        moved = self._moved[kind]
        return [moved.popleft() for _ in range(len(moved))]

    def close(self) -> None:
        """End what is under way, then close the cache."""
        self._store.close()

    @property
    def _kv_face(self) -> Face:
        if self._kv is None:
            raise LayoutError("no KV pool is registered")
        return self._kv

    def _timed(self, kind: str, pool: _Pool, steps: Steps[list[bool]]) -> list[bool]:
        """Drive steps to their end; note how fast they moved pages of a pool."""
        clock = self._store.clock
        start_s = clock.now()
        done = self._store.run(steps)
        seconds = max(clock.now() - start_s, 1e-9)
        moved_bytes = done.count(True) * pool.page_bytes
        self._moved[kind].append(Moved(len(done), moved_bytes / seconds / 1e9))
        return done

    def _do_boundary(self, kind: str, work: Callable[[], T], otherwise: T) -> T:
        try:
            return work()
        except Exception as error:  # SGLang goes on without; it is told what it can use.
            self._complaints.tell(kind, f"a {kind} raised {type(error).__name__}: {error}")
            return otherwise


def _names(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]
