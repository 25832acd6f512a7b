"""KV events as the classes that each version of vLLM has for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from kvtier.types import Tier
from kvtier_adapters.vllm.events import BlocksCame, BlocksLeft
from kvtier_adapters.vllm.versions import media

PUBLISHED = "kvtier_adapters.vllm.published"
PLACE = ("medium", "group_idx", "locality")
STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "lora_name",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    *PLACE,
)
REMOVED = ("block_hashes", *PLACE)


def struct(*names: str) -> type:
    """A class that takes these fields and no others, as vLLM's do."""

    class Struct:
        __struct_fields__ = names

        def __init__(self, **values: Any) -> None:
            assert values.keys() == set(names), values.keys() ^ set(names)
            self.__dict__.update(values)

    return Struct


@pytest.fixture(params=["0.26.0", "0.32.0"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A version of vLLM, of which there is no more than its classes of events."""
    name = str(request.param)
    more = ("ownership",) if name == "0.32.0" else ()
    modules: dict[str, dict[str, Any]] = {
        "vllm.distributed.kv_events": {
            "BlockStored": struct(*STORED, *more),
            "BlockRemoved": struct(*REMOVED, *more),
        },
        "vllm.v1.core.kv_cache_utils": {"maybe_convert_block_hash": lambda each: each.hex()},
    }
    for module, content in modules.items():
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
        sys.modules[module].__dict__.update(content)
    yield name
    sys.modules.pop(PUBLISHED, None)


def published(version: str, event: BlocksCame | BlocksLeft, *group: int) -> Any:
    module = importlib.import_module(PUBLISHED)
    return module.published(event, 4, media(version), *group)


def test_blocks_that_came(version: str) -> None:
    event = BlocksCame(Tier.DISK, (b"a", b"b"), b"p", tuple(range(8)), (3, "poet"))
    told = published(version, event)
    assert (told.block_hashes, told.parent_block_hash) == (["61", "62"], "70")
    assert (told.token_ids, told.block_size) == (list(range(8)), 4)
    assert (told.lora_id, told.lora_name) == (3, "poet")
    assert told.medium == ("FS" if version == "0.26.0" else "STORAGE")
    assert (told.locality, told.group_idx) == ("LOCAL", 0)
    assert (told.kv_cache_spec_kind, told.kv_cache_spec_sliding_window) == ("full_attention", None)
    assert getattr(told, "ownership", "disk") == "disk"


def test_the_first_blocks_of_a_prompt_have_no_parent_and_no_adapter(version: str) -> None:
    told = published(version, BlocksCame(Tier.DRAM, (b"a",), None, (1, 2, 3, 4), None))
    assert (told.parent_block_hash, told.lora_id, told.lora_name) == (None, None, None)


def test_blocks_that_left_a_remote(version: str) -> None:
    told = published(version, BlocksLeft(Tier.REMOTE, (b"a", b"b")))
    assert told.block_hashes == ["61", "62"]
    assert told.locality == "REMOTE"


def test_each_group_is_told_of_by_its_kind(version: str) -> None:
    event = BlocksCame(Tier.DRAM, (b"a",), None, (1, 2, 3, 4), None)
    told = published(version, event, 2, 128)
    assert (told.group_idx, told.kv_cache_spec_kind) == (2, "sliding_window")
    assert told.kv_cache_spec_sliding_window == 128
    assert published(version, BlocksLeft(Tier.DRAM, (b"a",)), 1).group_idx == 1
