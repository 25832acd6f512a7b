"""A cache over codecs, a worker, and two pools: where KV is computed, and where it comes back."""

from __future__ import annotations

from pathlib import Path

import torch

from kvtier.cache.cache import Cache
from kvtier.cache.match import Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.worker import CacheWorker
from kvtier.config import CacheConfig, DiskConfig, RemoteConfig
from kvtier.constants import MIB
from kvtier.registry import split_codec
from kvtier.testing.engine_double import wait_until
from kvtier.testing.pools import Arrangement, TorchPool
from kvtier.tiers.disk.files import FileSystem
from kvtier.types import (
    Blocks,
    Fidelity,
    GroupKind,
    KVGroup,
    KVLayout,
    LoadOutcome,
    Namespace,
    Part,
    Placement,
)
from tests.lib.cache_setup import idle

CHUNK = 32
BLOCK = 16
CHUNKS = 3
GROUP = KVGroup(GroupKind.FULL, (0, 1, 2), kv_heads=2, k_dim=64, v_dim=64, dtype="float32")
LAYOUT = KVLayout((GROUP,), chunk_tokens=CHUNK, section_layers=2)
LOSSY = Namespace("weights", LAYOUT, fidelity=Fidelity.LOSSY)
EXACT = Namespace("weights", LAYOUT)
BLOCKS = Blocks(0, (tuple(range(CHUNKS * CHUNK // BLOCK)),), BLOCK)


class Room:
    """A cache with a worker and two pools: where KV is computed and where it is brought back."""

    def __init__(
        self,
        folder: Path,
        codec: str,
        disk_codec: str | None = None,
        *,
        disk_bytes: int = 64 * MIB,
        directories: int = 1,
        files: FileSystem | None = None,
        remote: str = "",
        remote_codec: str | None = None,
        remote_bytes: int = 0,
    ) -> None:
        """``disk_codec`` as the option has it: ``int4``, ``zstd``, ``int8+zstd``.

        With the URL of a ``remote`` there is no disk; ``remote_codec`` is its byte codec.
        """
        block, byte = split_codec(disk_codec) if disk_codec else (None, None)
        more = tuple(str(folder / f"disk{number}") for number in range(1, directories))
        disk = DiskConfig(
            str(folder / "disk"), disk_bytes, more_paths=more, codec=block, byte_codec=byte
        )
        there = RemoteConfig(remote or "memory://", remote_bytes, byte_codec=remote_codec)
        remotes = (there,) if remote else ()
        config = CacheConfig(
            16 * MIB, None if remote else disk, remotes, codec=codec, slab_bytes=MIB
        )
        self.cache = Cache(config, files=files)
        self.worker = CacheWorker(Placement(), self.cache.arena, codecs=self.cache.codecs)
        count = CHUNKS * CHUNK // BLOCK
        self.computed, self.restored = (
            TorchPool([GROUP], block_count=count, arrangement=Arrangement.STACKED) for _ in range(2)
        )
        generator = torch.Generator().manual_seed(3)
        for view in self.views(self.computed):
            view.copy_(torch.randn(view.shape, generator=generator))
        self.restored.poison()

    def views(self, pool: TorchPool) -> list[torch.Tensor]:
        return [pool.layer_view(0, layer, part) for layer in range(3) for part in Part]

    def sequence(self, namespace: Namespace) -> Sequence:
        sequence = self.cache.sequence(namespace)
        sequence.append(range(CHUNKS * CHUNK))
        return sequence

    def store(self, sequence: Sequence, pool: TorchPool | None = None) -> bool:
        self.worker.register_pool(pool or self.computed)
        plan = self.cache.begin_store(sequence, range(CHUNKS), BLOCKS)
        if plan is None:
            return False
        self.worker.execute(plan)

        def done() -> bool:
            self.cache.finish(self.worker.poll())
            return self.cache.store_done(plan.plan_id)

        wait_until(done, "a store")
        wait_until(lambda: not self.cache.stats().writes_queued, "the disk")
        return True

    def load(self, sequence: Sequence) -> LoadOutcome | None:
        wait_until(lambda: isinstance(self.cache.match(sequence), Ready), "the disk")
        match = self.cache.match(sequence)
        assert isinstance(match, Ready)
        self.worker.register_pool(self.restored)
        load = self.cache.begin_load(match, BLOCKS)
        if load is None:
            return None

        def done() -> bool:
            for plan in load.poll():
                self.worker.execute(plan)
            self.cache.finish(self.worker.poll())
            return load.outcome is not None

        wait_until(done, "a load")
        # What brought the bytes ends a little after the load that they were for.
        wait_until(lambda: idle(self.cache.stats()), "reads")
        return load.outcome

    def error(self) -> float:
        """Return the greatest difference between what was computed and what came back."""
        pairs = zip(self.views(self.computed), self.views(self.restored), strict=True)
        return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)

    def close(self) -> None:
        self.worker.close()
        self.cache.check_integrity()
        self.cache.close()


def bytes_below(folder: Path) -> int:
    """What all shards in the room's directories take."""
    return sum(path.stat().st_size for path in folder.rglob("*.kvs"))
