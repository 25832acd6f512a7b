"""The L2 adapter that LMCache's multiprocess server loads: its interface, over an ``L2Desk``."""

from __future__ import annotations

import logging
import os
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from kvtier.clock import SystemClock
from kvtier_adapters.lmcache.desk import L2Desk, Named, Object, Signals
from kvtier_adapters.lmcache.naming import SYSTEM, layout_text, object_name
from kvtier_adapters.payloads.complaints import Complaints
from kvtier_adapters.payloads.memory import memory_at
from kvtier_adapters.payloads.options import PlugOptions, plug_options
from kvtier_adapters.payloads.store import PlugStore

_log = logging.getLogger("kvtier.adapters")


class KVTierL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]
    """The options that stand under ``adapter_params``."""

    def __init__(self, options: PlugOptions) -> None:
        """Hold options."""
        super().__init__()
        self.options = options

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> KVTierL2AdapterConfig:
        """Read the options. Raises ``ConfigError``, which LMCache shows."""
        return cls(plug_options(d, "adapter_params"))

    @classmethod
    def help(cls) -> str:
        """Say what there is."""
        return f"KVTier's options, each once:\n{PlugOptions.__doc__}"


class KVTierL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Keeps LMCache's objects in a KVTier cache: DRAM, disk, remotes, verified and bounded.

    KVTier bounds itself, so LMCache's global eviction has nothing to do here; its quotas per salt
    work on what it is told of. Whatever goes wrong is a failed store or a miss.
    """

    def __init__(self, config: KVTierL2AdapterConfig, l1_memory_desc: object = None) -> None:
        """Open the cache. Raises ``KVTierError``, upon which LMCache does not start."""
        super().__init__(max_capacity_bytes=0)
        del l1_memory_desc  # Objects say where they lie.
        clock = SystemClock()
        complaints = Complaints("KVTier below LMCache", clock)
        store = PlugStore(config.options, SYSTEM, clock=clock)
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self._descriptors = [os.eventfd(0, flags) for _ in range(3)]
        signals = Signals(*(lambda fd=fd: os.eventfd_write(fd, 1) for fd in self._descriptors))
        self._complaints, self._store = complaints, store
        self._desk = L2Desk(store, _Listeners(self), signals, complaints)

    def get_store_event_fd(self) -> int:
        """Signalled when stores have ended."""
        return self._descriptors[0]

    def get_lookup_and_lock_event_fd(self) -> int:
        """Signalled when lookups have ended."""
        return self._descriptors[1]

    def get_load_event_fd(self) -> int:
        """Signalled when loads have ended."""
        return self._descriptors[2]

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """See ``L2Desk.submit_store``."""
        found = self._objects_boundary(keys, objects)
        return self._desk.fail("store", 0) if found is None else self._desk.submit_store(found)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return results by task, each once."""
        return {
            task: L2StoreResult(nbytes >= 0, max(nbytes, 0))
            for task, nbytes in self._desk.take_stored().items()
        }

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: object) -> int:
        """See ``L2Desk.submit_lookup``."""
        del group_layout_descs  # Checked when objects are loaded.
        found = self._names_boundary(keys)
        if found is None:
            return self._desk.fail("lookup", len(keys))
        return self._desk.submit_lookup(found)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return which objects are held, once; None: not known yet."""
        return _bitmap(self._desk.take_looked_up(task_id))

    def submit_unlock(self, keys: list[Any]) -> None:
        """Unlock what a lookup locked. Does not fail."""
        self._desk.unlock(keys)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """See ``L2Desk.submit_load``."""
        found = self._objects_boundary(keys, objects)
        if found is None:
            return self._desk.fail("load", len(keys))
        return self._desk.submit_load(found)

    def query_load_result(self, task_id: int) -> Any:
        """Return which objects are filled, once; None: not known yet."""
        return _bitmap(self._desk.take_loaded(task_id))

    def delete(self, keys: list[Any]) -> None:
        """Forget objects, but for those that a lookup has locked."""
        found = self._names_boundary(keys)
        if found is not None:
            self._desk.delete(found)

    def report_status(self) -> dict[str, Any]:
        """Tell how the tiers are, and what is under way."""
        stats = self._store.cache.stats()
        return {
            "is_healthy": self._store.healthy,
            "type": type(self).__name__,
            **self._desk.figures,
            "layouts": self._desk.layouts,
            "tiers": {
                str(tier.tier): {
                    "state": tier.state,
                    "detail": tier.detail,
                    "used_bytes": tier.used_bytes,
                    "capacity_bytes": tier.capacity_bytes,
                    "corrupt": tier.counters.corrupt_shards,
                }
                for tier in stats.tiers
            },
        }

    def close(self) -> None:
        """End what is under way, close the cache, and then the descriptors."""
        self._desk.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def tell_boundary(self, kind: str, *what: list[Any]) -> None:
        """Tell the base class, and so LMCache's listeners; what those raise is not ours."""
        tell = {
            "stored": self._notify_keys_stored,
            "accessed": self._notify_keys_accessed,
            "deleted": self._notify_keys_deleted,
        }[kind]
        try:
            tell(*what)
        except Exception:  # LMCache's own code: the others are told all the same.
            _log.exception("a listener of LMCache raised")

    def _names_boundary(self, keys: list[Any]) -> list[Named] | None:
        try:
            return [Named(key, object_name(key)) for key in keys]
        except Exception as error:  # Another LMCache than this was written for.
            self._complaints.tell("unknown", f"a key that cannot be read: {error!r}")
            return None

    def _objects_boundary(self, keys: list[Any], objects: list[Any]) -> list[Object] | None:
        try:
            return [_object(key, one) for key, one in zip(keys, objects, strict=True)]
        except Exception as error:  # Another LMCache than this was written for.
            self._complaints.tell("unknown", f"an object that cannot be read: {error!r}")
            return None


class _Listeners:
    """Hands notices to the adapter's base class."""

    def __init__(self, adapter: KVTierL2Adapter) -> None:
        self._adapter = adapter

    def stored(self, keys: list[Any], sizes: list[int]) -> None:
        self._adapter.tell_boundary("stored", keys, sizes)

    def accessed(self, keys: list[Any]) -> None:
        self._adapter.tell_boundary("accessed", keys)

    def deleted(self, keys: list[Any], sizes: list[int]) -> None:
        self._adapter.tell_boundary("deleted", keys, sizes)


def _object(key: Any, memory: Any) -> Object:
    view = memory_at(memory.data_ptr, memory.get_size())
    return Object(key, object_name(key), view, _layout(memory.metadata))


def _layout(metadata: Any) -> str:
    """Objects of one tensor may have ``shape`` and ``dtype`` alone."""
    if metadata.shapes is None or metadata.dtypes is None:
        return layout_text([metadata.shape], [metadata.dtype])
    return layout_text(metadata.shapes, metadata.dtypes)


def _bitmap(found: list[bool] | None) -> Any:
    if found is None:
        return None
    bitmap = Bitmap(len(found))
    for number, there in enumerate(found):
        if there:
            bitmap.set(number)
    return bitmap
