"""What a router learns from the KV events that the plug for vLLM gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig, DiskConfig
from kvtier.constants import MIB
from kvtier.testing.engine_double import wait_until
from kvtier.types import Namespace, Tier
from kvtier_adapters.vllm.events import BlocksCame, BlocksLeft
from tests.lib.vllm_double import VllmDouble, double_geometry
from tests.lib.vllm_double_parts import BLOCK_TOKENS, DoubleRequest
from tests.lib.vllm_traffic import tokens

CHUNK_TOKENS = 8
NAMESPACE = Namespace("a double", double_geometry(1, BLOCK_TOKENS, 64).layout(CHUNK_TOKENS))


class Router:
    """Believes what it is told."""

    def __init__(self, double: VllmDouble) -> None:
        self._double = double
        self.held: dict[Tier, set[bytes]] = {}
        self.tokens: dict[bytes, tuple[int, ...]] = {}
        self.parents: dict[bytes, bytes | None] = {}

    def hear(self) -> None:
        for event in self._double.side.take_events():
            known = self.held.setdefault(event.tier, set())
            if isinstance(event, BlocksLeft):
                assert known >= set(event.hashes), "what was not there has left"
                known -= set(event.hashes)
                continue
            assert isinstance(event, BlocksCame)
            assert len(event.tokens) == len(event.hashes) * BLOCK_TOKENS
            known |= set(event.hashes)
            self.parents[event.hashes[0]] = event.parent
            for number, each in enumerate(event.hashes):
                start = number * BLOCK_TOKENS
                self.tokens[each] = event.tokens[start : start + BLOCK_TOKENS]

    def of(self, tier: Tier) -> set[bytes]:
        return self.held.get(tier, set())


@contextmanager
def engine(disk: Path | None = None, *, dram_bytes: int = MIB) -> Iterator[VllmDouble]:
    config = CacheConfig(
        dram_bytes=dram_bytes,
        slab_bytes=dram_bytes // 8,
        disk=DiskConfig(str(disk), capacity_bytes=MIB) if disk else None,
        events=True,
    )
    cache = Cache(config)
    double = VllmDouble(cache, NAMESPACE)
    try:
        yield double
    finally:
        double.close()
        cache.close()


def answer(double: VllmDouble, name: str, prompt: list[int], salt: str = "") -> DoubleRequest:
    request = double.add(DoubleRequest(name, prompt, cache_salt=salt))
    double.run()
    assert request in double.done
    return request


def test_blocks_are_told_by_the_hashes_and_tokens_that_vllm_has(rng: random.Random) -> None:
    with engine() as double:
        router = Router(double)
        request = answer(double, "first", tokens(rng, 30))
        router.hear()
        # Three whole chunks of two blocks each.
        hashes = request.block_hashes[:6]
        assert router.of(Tier.DRAM) == set(hashes)
        told = [token for each in hashes for token in router.tokens[each]]
        assert told == request.prompt[:24]
        assert [router.parents[hashes[block]] for block in (0, 2, 4)] == [None, *hashes[1:4:2]]


def test_what_leaves_a_tier_is_told_and_nothing_is_told_that_is_not_there(
    rng: random.Random,
) -> None:
    with engine(dram_bytes=MIB // 16) as double:
        router = Router(double)
        for number in range(30):
            answer(double, str(number), tokens(rng, 40))
            router.hear()
        held = double.side.stats().tiers[0].chunks
        assert len(router.of(Tier.DRAM)) == 2 * held
        # Of 150 that were stored.
        assert 0 < held < 100


def test_after_a_restart_the_disk_is_told_as_requests_use_it(
    rng: random.Random, tmp_path: Path
) -> None:
    prompt = tokens(rng, 40)
    with engine(tmp_path) as double:
        answer(double, "first", prompt)
    with engine(tmp_path) as double:
        router = Router(double)
        router.hear()
        assert not router.of(Tier.DISK)
        request = answer(double, "second", prompt)
        router.hear()
        assert router.of(Tier.DISK) == router.of(Tier.DRAM) == set(request.block_hashes[:10])


def test_a_reset_takes_back_what_every_tenant_had(rng: random.Random) -> None:
    with engine() as double:
        router = Router(double)
        prompt = tokens(rng, 20)
        for salt in ("", "one", "other"):
            answer(double, salt, prompt, salt)
        router.hear()
        assert len(router.of(Tier.DRAM)) == 3 * 4
        # Theirs are other blocks: who asks for them has other hashes.
        assert double.side.reset()
        router.hear()
        assert not router.of(Tier.DRAM)
        request = answer(double, "again", prompt, "one")
        router.hear()
        assert router.of(Tier.DRAM) == set(request.block_hashes[:4])


def test_without_events_nothing_is_kept(rng: random.Random) -> None:
    cache = Cache(CacheConfig(dram_bytes=MIB, slab_bytes=MIB // 8))
    double = VllmDouble(cache, NAMESPACE)
    answer(double, "first", tokens(rng, 20))
    wait_until(lambda: not double.side.busy, "stores are done")
    assert double.side.take_events() == []
    double.close()
    cache.close()
