"""vLLM's double on caches of tests, and what is asked of it: one answer, or many at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig, DiskConfig
from kvtier.constants import MIB
from kvtier.types import Namespace, Placement
from tests.lib.vllm_double import VllmDouble, double_geometry
from tests.lib.vllm_double_parts import DoubleRequest

#: Requests of ``random_traffic``.
REQUESTS = 60


@contextmanager
def doubles(
    chunk_tokens: int, block_count: int, disk_bytes: int
) -> Iterator[Callable[..., VllmDouble]]:
    """Give what opens doubles, each on a cache of its own; all are closed at the end."""
    closing: list[Callable[[], None]] = []

    def open_double(
        disk: Path | None = None, ranks: int = 1, windows: tuple[int, ...] = (0,), **more: Any
    ) -> VllmDouble:
        config = CacheConfig(
            dram_bytes=MIB,
            slab_bytes=MIB // 8,
            disk=DiskConfig(str(disk), capacity_bytes=disk_bytes) if disk else None,
            workers=tuple(Placement(rank, rank, ranks) for rank in range(ranks)),
            load_deadline_s=0.5,
        )
        cache = Cache(config)
        layout = double_geometry(ranks, 4, block_count, windows=windows).layout(chunk_tokens)
        more = {"block_count": block_count} | more
        double = VllmDouble(
            cache, Namespace("a double", layout), ranks=ranks, windows=windows, **more
        )
        closing[:0] = [double.close, cache.close]
        return double

    yield open_double
    for close in closing:
        close()


def tokens(rng: random.Random, count: int) -> list[int]:
    """Draw tokens."""
    return [rng.randrange(1000) for _ in range(count)]


def answer(double: VllmDouble, name: str, prompt: list[int], **more: Any) -> DoubleRequest:
    """Have one request answered."""
    request = double.add(DoubleRequest(name, prompt, **more))
    double.run()
    assert request in double.done
    return request


def random_traffic(double: VllmDouble, rng: random.Random) -> None:
    """Answer requests that share prefixes, of which some are aborted and some preempted."""
    prefixes = [tokens(rng, 32) for _ in range(3)]
    for number in range(REQUESTS):
        prompt = rng.choice(prefixes)[: rng.randrange(8, 32)] + tokens(rng, rng.randrange(1, 12))
        double.add(DoubleRequest(str(number), prompt, max_tokens=rng.randrange(1, 12)))
        for _ in range(rng.randrange(4)):
            double.step()
        for request in list(double.requests.values()):
            draw = rng.random()
            if request.status == "running" and draw < 0.05:
                double.preempt(request)
            elif request.status in {"running", "loading", "waiting"} and draw > 0.97:
                double.finish(request)
    double.run()
    assert len(double.done) == REQUESTS
