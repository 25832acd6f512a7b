"""What tells SGLang's pages apart, and how far a prompt is there when several pools have a say."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError, LayoutError
from kvtier_adapters.payloads.options import PlugOptions
from kvtier_adapters.sglang.hits import ALL_PAGES, TRAILING_PAGES, PoolFound, restorable
from kvtier_adapters.sglang.identity import check_ranks, folder_name, page_scheme, rank_text
from kvtier_adapters.sglang.pages import pages_of, piece_bytes, tensor_bytes
from tests.lib.hicache_double import PageFirstPool, StorageConfig

CONFIG = StorageConfig(tp_size=2)


def scheme(config: StorageConfig = CONFIG, pool: str = "kv", **form: object) -> str:
    host_pool = PageFirstPool(**form)  # type: ignore[arg-type]
    return page_scheme(config, pool, host_pool, (1024, 1024))


def test_b16_b27_whatever_a_page_depends_on_tells_it_apart() -> None:
    class PageHeadPool(PageFirstPool):
        layout = "page_head"

    schemes = [
        scheme(),
        scheme(replace(CONFIG, tp_rank=1)),
        scheme(replace(CONFIG, tp_size=4)),
        scheme(replace(CONFIG, pp_size=2)),
        scheme(replace(CONFIG, pp_size=2, pp_rank=1)),
        scheme(replace(CONFIG, attn_cp_size=2, attn_cp_rank=1)),
        scheme(replace(CONFIG, model_name="org/model-int8")),
        scheme(pool="swa"),
        scheme(dtype=torch.float16),
        scheme(page_size=16),
        scheme(layers=3),
        scheme(heads=1),
        scheme(dim=32),
        page_scheme(CONFIG, "kv", PageHeadPool(), (1024, 1024)),
        page_scheme(CONFIG, "kv", PageFirstPool(), (2048,)),
    ]
    for one, other in combinations(schemes, 2):
        assert one != other
    assert scheme() == scheme()
    assert scheme(replace(CONFIG, dp_rank=1)) == scheme(), "replicas of the data rank share"
    assert scheme(pages=3) == scheme(), "the size of the pool has no say"


def test_latent_kv_is_shared_by_tensor_ranks_and_their_mamba_state_is_not() -> None:
    latent = replace(CONFIG, is_mla_model=True)
    other = replace(latent, tp_rank=1)
    assert rank_text(latent) == rank_text(other)
    assert rank_text(latent, "mamba") != rank_text(other, "mamba")


def test_every_process_of_a_server_has_a_folder_of_its_own() -> None:
    configs = [
        StorageConfig(tp_rank=tp, pp_rank=pp, attn_cp_rank=cp, dp_rank=dp)
        for tp in range(2)
        for pp in range(2)
        for cp in range(2)
        for dp in range(2)
    ]
    assert len({folder_name(config) for config in configs}) == len(configs)


def test_b113_ranks_that_could_never_share_are_refused() -> None:
    latent = replace(CONFIG, is_mla_model=True)
    with pytest.raises(ConfigError, match=r"remote is missing: of the 2 ranks .*one writes"):
        check_ranks(latent, PlugOptions())
    remote = ("kvtier+unix:///run/kvtier.sock",)
    check_ranks(latent, PlugOptions(remote=remote, weights_id="w"))
    check_ranks(replace(latent, tp_size=1), PlugOptions())
    check_ranks(CONFIG, PlugOptions())


# Pages


def test_pages_are_seen_where_they_lie() -> None:
    pool = PageFirstPool()
    pool.fill(1)
    for number, page in zip((3, 0), pages_of(pool, pool.slots(3, 0), 2), strict=True):
        k, v = pool.page(number).reshape(2, -1).view(torch.uint8)
        assert [bytes(piece) for piece in page] == [k.numpy().tobytes(), v.numpy().tobytes()]
    assert piece_bytes(pages_of(pool, pool.slots(0, 1), 2)) == (1024, 1024)


def test_what_is_no_page_is_refused() -> None:
    pool = PageFirstPool()
    with pytest.raises(LayoutError, match="2 pieces in 2 sizes for 4 pages"):
        pages_of(pool, pool.slots(0), 4)
    with pytest.raises(LayoutError, match="0 pages"):
        pages_of(pool, pool.slots(0), 0)
    with pytest.raises(LayoutError, match="2 forms"):
        piece_bytes([(memoryview(b"ab"),), (memoryview(b"a"),)])
    with pytest.raises(LayoutError, match="in one piece"):
        tensor_bytes(torch.zeros(4, 4).T)
    assert bytes(tensor_bytes(torch.tensor([1, 2], dtype=torch.uint8))) == b"\x01\x02"


# Hits


@given(
    held=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=0, max_size=3),
    policies=st.lists(st.sampled_from([ALL_PAGES, TRAILING_PAGES, "block_groups"]), min_size=3),
    trailing=st.lists(st.integers(1, 4), min_size=3),
    kv_pages=st.integers(0, 6),
)
def test_a_length_is_restorable_if_every_pool_has_what_it_must(
    held: list[list[bool]], policies: list[str], trailing: list[int], kv_pages: int
) -> None:
    pools = {f"pool{n}": PoolFound(policies[n], pages, trailing[n]) for n, pages in enumerate(held)}
    lengths, reach = restorable(kv_pages, pools)

    def allowed(found: PoolFound, length: int) -> bool:
        if found.policy == ALL_PAGES:
            return all(found.held[:length])
        if found.policy == TRAILING_PAGES:
            return all(found.held[max(0, length - found.trailing) : length])
        return True

    expected = [
        length
        for length in range(1, kv_pages + 1)
        if all(allowed(found, length) for found in pools.values())
    ]
    assert lengths == expected
    for name, found in pools.items():
        if found.policy == "block_groups":
            assert name not in reach
        else:
            own = [n for n in range(1, kv_pages + 1) if allowed(found, n)]
            assert reach[name] == max(own, default=0)
