"""Run beside SGLang's own sources: its factory loads our back end, with its faults if asked for.

``sglang_program.py FOLDER`` with orders as JSON on standard input. SGLang has no build for CPUs, so
its packages' ``__init__`` are passed over: ``hicache_storage.py`` and ``backend_factory.py`` are
the real files. The host pool is ours, laid out as SGLang's page-first MHA pool.
"""

from __future__ import annotations

import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
#: How often each call is made while SGLang fails three in ten.
FAULTY_ROUNDS = 40
PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage")


def prepare(folder: str) -> None:
    """Make SGLang's modules importable one by one."""
    for name in PACKAGES:
        module = types.ModuleType(name)
        module.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = module
    sys.path.insert(0, str(ROOT))


def open_back_end(orders: dict[str, Any]) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="org/model",
        extra_config={
            "backend_name": "kvtier",
            "module_path": "kvtier_adapters.sglang",
            "class_name": "KVTierHiCache",
            "interface_v1": orders["interface_v1"],
            "kvtier": orders["options"],
        },
    )
    return StorageBackendFactory.create_backend("dynamic", config, object())


class Session:
    """A back end with a pool of KV and one of state, as SGLang's controller registers them."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from sglang.srt.mem_cache.hicache_storage import PoolName

        from tests.lib.hicache_double import PageFirstPool

        self.back_end = open_back_end(orders)
        self.pool, self.state = PageFirstPool(pages=32), PageFirstPool(pages=32, dim=8)
        self.pool.fill(1)
        self.state.fill(2)
        self.back_end.register_mem_pool_host(self.pool)
        self.back_end.register_mem_host_pool_v2(self.pool, PoolName.KV)
        self.back_end.register_mem_host_pool_v2(self.state, PoolName.MAMBA)
        self.back_end.on_host_pools_registered()
        self.keys = [f"{number:064x}" for number in range(16)]

    def zero_copy(self) -> dict[str, Any]:
        """Store pages and load them into other slots."""
        source, target = self.pool.slots(*range(16)), self.pool.slots(*range(16, 32))
        stored = self.back_end.batch_set_v1(self.keys, source)
        prefix = self.back_end.batch_exists([*self.keys, "f" * 64])
        wanted = self.pool.kv_buffer[:, : len(source)].clone()
        self.pool.kv_buffer[:, len(source) :] = 0
        loaded = self.back_end.batch_get_v1(self.keys, target)
        return {
            "stored": stored,
            "prefix": prefix,
            "loaded": loaded,
            "right": self._right(wanted, loaded),
            "absent": self.back_end.batch_get_v1(["e" * 64], target[: self.pool.page_size]),
        }

    def several_pools(self) -> dict[str, Any]:
        """Store state at one place of a prompt; only there can it be restored."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        keys = self.keys[:4]
        self.back_end.batch_set_v1(keys, self.pool.slots(0, 1, 2, 3))

        def transfer(key: str, slot: int) -> Any:
            return PoolTransfer(
                name=PoolName.MAMBA,
                host_indices=self.state.slots(slot),
                keys=[key],
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            )

        def found() -> list[Any]:
            said = self.back_end.batch_exists_v2(keys, [transfer(keys[2], 5)])
            pools = {str(name): pages for name, pages in said.extra_pool_hit_pages.items()}
            return [said.kv_hit_pages, pools, said.restorable_prefix_pages]

        before = found()
        stored = self.back_end.batch_set_v2([transfer(keys[2], 5)])
        after = found()
        loaded = self.back_end.batch_get_v2([transfer(keys[2], 9)])
        return {
            "before": before,
            "after": after,
            "stored": {str(name): flags for name, flags in stored.items()},
            "loaded": {str(name): flags for name, flags in loaded.items()},
            "right": torch.equal(self.state.page(5), self.state.page(9)),
        }

    def flat(self) -> dict[str, Any]:
        """The older interface: tensors of their own."""
        values = [torch.randn(64) for _ in range(3)]
        targets = [torch.zeros(64) for _ in range(4)]
        stored = self.back_end.batch_set(self.keys[:3], values)
        prefix = self.back_end.batch_exists(self.keys)
        got = self.back_end.batch_get(self.keys[:4], targets)
        return {
            "stored": stored,
            "prefix": prefix,
            "right": [torch.equal(one, value) for one, value in zip(got, values, strict=False)],
            "absent": got[3] is None and self.back_end.get(self.keys[5], targets[0]) is None,
            "one": [self.back_end.set(self.keys[9], values[0]), self.back_end.exists(self.keys[9])],
        }

    def under_faults(self) -> dict[str, Any]:
        """Many rounds while SGLang's injector fails and delays calls: never a wrong page."""
        source, target = self.pool.slots(*range(16)), self.pool.slots(*range(16, 32))
        wanted = self.pool.kv_buffer[:, : len(source)].clone()
        counts = self._no_counts()
        for _ in range(FAULTY_ROUNDS):
            counts["stored"] += self.back_end.batch_set_v1(self.keys, source).count(True)
            counts["prefix"] += self.back_end.batch_exists(self.keys)
            self.pool.kv_buffer[:, len(source) :] = 0
            loaded = self.back_end.batch_get_v1(self.keys, target)
            counts["loaded"] += loaded.count(True)
            counts["wrong"] += not self._right(wanted, loaded)
        return counts

    def v2_under_faults(self) -> dict[str, Any]:
        """The same with the second interface: pages of KV and of state together."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        pools = {PoolName.KV: self.pool, PoolName.MAMBA: self.state}

        def transfers(first: int) -> list[Any]:
            return [
                PoolTransfer(
                    name=name,
                    host_indices=pool.slots(*range(first, first + 16)),
                    keys=self.keys,
                    hit_policy=PoolHitPolicy.ALL_PAGES,
                )
                for name, pool in pools.items()
            ]

        counts = self._no_counts()
        for _ in range(FAULTY_ROUNDS):
            stored = self.back_end.batch_set_v2(transfers(0))
            said = self.back_end.batch_exists_v2(self.keys, transfers(0)[1:])
            for pool in pools.values():
                pool.kv_buffer[:, 16 * pool.page_size :] = 0
            loaded = self.back_end.batch_get_v2(transfers(16))
            counts["prefix"] += (said.restorable_prefix_pages or [])[-1:] == [16]
            for name, pool in pools.items():
                counts["stored"] += stored[name].count(True)
                counts["loaded"] += loaded[name].count(True)
                counts["wrong"] += sum(
                    not torch.equal(pool.page(number), pool.page(16 + number))
                    for number, there in enumerate(loaded[name])
                    if there
                )
        return counts

    def flat_under_faults(self) -> dict[str, Any]:
        """The same with the older interface: tensors of their own."""
        values = [torch.randn(64) for _ in self.keys]
        counts = self._no_counts()
        for _ in range(FAULTY_ROUNDS):
            counts["stored"] += self.back_end.batch_set(self.keys, values)
            counts["prefix"] += self.back_end.batch_exists(self.keys)
            got = self.back_end.batch_get(self.keys, [torch.zeros(64) for _ in self.keys])
            there = [
                (one, value) for one, value in zip(got, values, strict=True) if one is not None
            ]
            counts["loaded"] += len(there)
            counts["wrong"] += sum(not torch.equal(one, value) for one, value in there)
        return counts

    def _no_counts(self) -> dict[str, Any]:
        injector = type(self.back_end).__name__
        return {"injector": injector, "stored": 0, "prefix": 0, "loaded": 0, "wrong": 0}

    def load(self) -> dict[str, Any]:
        """Load what an earlier process stored."""
        target = self.pool.slots(*range(16, 32))
        wanted = self.pool.kv_buffer[:, : len(target)].clone()
        start = time.monotonic()
        loaded = self.back_end.batch_get_v1(self.keys, target)
        seconds = time.monotonic() - start
        return {"loaded": loaded, "right": self._right(wanted, loaded), "seconds": seconds}

    def clear(self) -> dict[str, Any]:
        self.back_end.clear()
        return {"prefix": self.back_end.batch_exists(self.keys)}

    def _right(self, wanted: torch.Tensor, loaded: list[bool]) -> bool:
        size = self.pool.page_size
        return all(
            torch.equal(self.pool.page(16 + number), wanted[:, number * size : (number + 1) * size])
            for number, there in enumerate(loaded)
            if there
        )


def main() -> None:
    prepare(sys.argv[1])
    orders = json.load(sys.stdin)
    session = Session(orders)
    found = [getattr(session, name)() for name in orders["do"]]
    session.back_end.close()
    print("RESULT " + json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
