"""What a lossy codec gave to vLLM's blocks is not packed a second time, by whichever request."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from kvtier.cache.cache import Cache
from kvtier.cache.match import Ready
from kvtier.config import CacheConfig
from kvtier.constants import MIB
from kvtier.testing.engine_double import wait_until
from kvtier.types import Fidelity, Namespace
from kvtier_adapters.vllm.scheduler_side import Duties
from tests.lib.vllm_double import VllmDouble, double_geometry
from tests.lib.vllm_double_parts import DoubleRequest
from tests.lib.vllm_traffic import tokens

NAMESPACE = replace(
    Namespace("a double", double_geometry(1, 4, 64).layout(8)), fidelity=Fidelity.LOSSY
)


class LossyDouble(VllmDouble):
    """One that does not mind that what it attends to is not quite what was computed."""

    def _row(self, rank: int, request: DoubleRequest, group: int, position: int) -> torch.Tensor:
        return self._expected(rank, request, group, position)


def test_blocks_that_came_from_a_lossy_codec_are_not_stored_by_another_request(
    rng: random.Random,
) -> None:
    # Loaded however slow this machine is.
    config = CacheConfig(dram_bytes=MIB, slab_bytes=MIB // 8, codec="fp8")
    cache = Cache(replace(config, gpu_time_worth=1e6, load_deadline_s=60.0))
    double = LossyDouble(cache, NAMESPACE, duties=Duties(4, 4, load_deadline_s=60.0))
    prompt = tokens(rng, 40)
    double.add(DoubleRequest("first", prompt))
    double.run()
    keys = cache.sequence(NAMESPACE)
    keys.append(prompt)
    # The second one has it from the cache, which loses it then; the third one has its blocks.
    second = double.add(DoubleRequest("second", prompt, max_tokens=100))
    while second.status != "running":
        double.step()
    assert second.loaded == 36
    wait_until(lambda: all(cache.remove(keys.chunk_keys)), "nothing is held any more")
    third = double.add(DoubleRequest("third", [*prompt, *range(20)], max_tokens=9))
    while third in double.queue or third in double.running:
        double.step()
    double.run()
    assert third.loaded == 0
    assert cache.match(keys) == Ready(keys, ())
    double.close()
    cache.close()
