"""The storage back end that SGLang's HiCache loads: its interface, over a ``PageDesk``."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvtier.clock import SystemClock
from kvtier_adapters.payloads.complaints import Complaints
from kvtier_adapters.payloads.options import plug_options
from kvtier_adapters.payloads.store import PlugStore
from kvtier_adapters.sglang.desk import KV, PageDesk
from kvtier_adapters.sglang.identity import SYSTEM, check_ranks, folder_name

OPTIONS = "kvtier"


class KVTierHiCache(HiCacheStorage):  # type: ignore[misc]
    """HiCache's third level in a KVTier cache: DRAM, disk, remotes, verified and bounded.

    One per rank, each with a cache of its own. Pages move between SGLang's host pool and the cache
    without a copy in between. Every call ends in time, and none raises.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        """Open the cache that ``extra_config["kvtier"]`` describes.

        Raises ``KVTierError`` for options that cannot be: then SGLang does not start.
        """
        del kwargs  # SGLang passes none to back ends that it loads by name.
        self.registered_pools: dict[str, Any] = {}
        table = (storage_config.extra_config or {}).get(OPTIONS)
        options = plug_options(table, f"extra_config.{OPTIONS}")
        check_ranks(storage_config, options)
        clock = SystemClock()
        store = PlugStore(options, SYSTEM, folder=folder_name(storage_config), clock=clock)
        self._zero_copy = bool((storage_config.extra_config or {}).get("interface_v1"))
        self._metrics = bool(storage_config.enable_storage_metrics)
        self._desk = PageDesk(store, storage_config, Complaints("KVTier below SGLang", clock))

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Use the pool of the KV. Raises ``LayoutError`` for one that cannot be used."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Use a pool of other state. Raises ``LayoutError`` for one that cannot be used."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(_text(host_pool_name), host_pool)

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """Count the pages before the first that is not held."""
        del extra_info
        return self._desk.prefix(keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Fill pages of the KV pool."""
        del extra_info
        return self._desk.get(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Store pages of the KV pool; one that is held already counts as stored."""
        del extra_info
        return self._desk.put(KV, keys, host_indices)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: object = None
    ) -> PoolTransferResult:
        """Tell which prefixes can be restored, with all pools that have a say."""
        del extra_info
        wanted = [
            (_text(one.name), _text(one.hit_policy), len(one.keys or ()) or 1)
            for one in pool_transfers or ()
        ]
        lengths, reach = self._desk.found(keys, wanted)
        names = {_text(one.name): one.name for one in pool_transfers or ()}
        reached = {names.get(name, name): pages for name, pages in reach.items() if pages}
        return PoolTransferResult(lengths[-1] if lengths else 0, reached, lengths)

    def batch_get_v2(self, transfers: Any, extra_info: object = None) -> dict[Any, list[bool]]:
        """Fill pages of several pools."""
        del extra_info
        return {
            one.name: self._desk.get(_text(one.name), one.keys or [], one.host_indices)
            for one in transfers
        }

    def batch_set_v2(self, transfers: Any, extra_info: object = None) -> dict[Any, list[bool]]:
        """Store pages of several pools."""
        del extra_info
        return {
            one.name: self._desk.put(_text(one.name), one.keys or [], one.host_indices)
            for one in transfers
        }

    def get(self, key: str, target_location: Any = None, target_sizes: object = None) -> Any:
        """Fill a tensor and return it; None: it is not there. Without ``interface_v1``."""
        del target_sizes
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: object = None
    ) -> list[Any]:
        """Fill tensors and return them, None for each that is not there."""
        del target_sizes
        there = self._desk.get_flat(keys, target_locations)
        return [
            target if filled else None
            for target, filled in zip(target_locations, there, strict=True)
        ]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Store a tensor's bytes. Without ``interface_v1``."""
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Store tensors' bytes; tells whether all are held."""
        del target_locations, target_sizes
        return all(self._desk.put_flat(keys, values))

    def exists(self, key: str) -> bool:
        """Tell whether a page is held."""
        return self.batch_exists([key]) == 1

    def clear(self) -> bool:
        """Forget every page of these weights, for every server that shares them."""
        return self._desk.clear()

    def get_stats(self) -> Any:
        """Return what was moved since the last call; None where SGLang wants no metrics."""
        if not self._metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        got, put = self._desk.take_moved("get"), self._desk.take_moved("put")
        return StorageMetrics(
            prefetch_pgs=[moved.pages for moved in got],
            backup_pgs=[moved.pages for moved in put],
            prefetch_bandwidth=[moved.gigabytes_per_s for moved in got],
            backup_bandwidth=[moved.gigabytes_per_s for moved in put],
        )

    def close(self) -> None:
        """End what is under way, then close the cache."""
        self._desk.close()

    def _register(self, name: str, host_pool: Any) -> None:
        if name == KV and not self._zero_copy:
            self._desk.register_flat(host_pool)
            return
        page_size = getattr(host_pool, "logical_page_size", None) or host_pool.page_size
        self._desk.register(name, host_pool, torch.arange(page_size))


def _text(name: Any) -> str:
    """Names and policies of SGLang are enums of text."""
    return str(getattr(name, "value", name))
