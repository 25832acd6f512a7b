"""Options of the plug for vLLM, and the versions that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.config import Durability, WriteMode
from kvtier.constants import GIB, MIB
from kvtier.errors import ConfigError
from kvtier.types import Placement, Tier
from kvtier_adapters.vllm.options import BlockForm, Options, parse_options
from kvtier_adapters.vllm.versions import TESTED, check_version, media

ONE = (Placement(),)


def test_nothing_said_is_a_gibibyte_of_dram_and_no_disk() -> None:
    config = parse_options({}).cache_config(ONE, shared=False)
    assert (config.dram_bytes, config.disk, config.remotes, config.codec) == (GIB, None, (), "raw")


def test_all_options_reach_the_cache() -> None:
    options = parse_options(
        {
            "dram": "256MiB",
            "policy": "arc",
            "codec": "int8",
            "disk": ["/a", "/b"],
            "disk_bytes": "2GiB",
            "disk_codec": "int4+zstd",
            "disk_mode": "back",
            "disk_policy": "gittins",
            "disk_admission": "second-touch",
            "disk_write_bytes_per_day": 5,
            "durability": "batch",
            "remote": "redis://host",
            "remote_bytes": "3GiB",
            "remote_mode": "back",
            "remote_deadline_s": 1,
            "load_deadline_s": 2,
            "pending_deadline_s": 3,
            "gpu_time_worth": 4,
            "tenant_quota": "1GiB",
        }
    )
    config = options.cache_config(ONE, shared=True, folder="engine-1")
    disk, (remote,) = config.disk, config.remotes
    assert disk is not None
    assert (config.dram_bytes, config.policy, config.codec) == (256 * MIB, "arc", "int8")
    assert disk.paths == ("/a/engine-1", "/b/engine-1")
    assert (disk.capacity_bytes, disk.codec, disk.byte_codec) == (2 * GIB, "int4", "zstd")
    assert (disk.mode, disk.policy, disk.admission) == (WriteMode.BACK, "gittins", "second-touch")
    assert (disk.write_bytes_per_day, disk.durability) == (5, Durability.BATCH)
    assert (remote.url, remote.capacity_bytes) == ("redis://host", 3 * GIB)
    assert (remote.mode, remote.deadline_s) == (WriteMode.BACK, 1.0)
    assert (config.load_deadline_s, config.pending_deadline_s) == (2.0, 3.0)
    assert (config.gpu_time_worth, config.tenant_quota_bytes, config.shared) == (4.0, GIB, True)


def test_dram_below_a_slab_is_one_slab() -> None:
    config = parse_options({"dram": "8MiB"}).cache_config(ONE, shared=False)
    assert config.slab_bytes == 8 * MIB


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"drum": "1GiB"}, "no 'drum' (did you mean 'dram'?)"),
        ({"dram_bytes": 1}, "no 'dram_bytes'"),
        ({"dram": "1XB"}, "kv_connector_extra_config.dram: not a size: '1XB'"),
        ({"dram": "many"}, "not a size: 'many'"),
        ({"blocks": "plain"}, "blocks = 'plain': allowed is auto, opaque"),
        ({"any_version": "yes"}, "any_version = 'yes': allowed is a bool"),
        ({"disk": [3]}, "disk = 3"),
    ],
)
def test_an_option_that_cannot_be_is_named(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(table)
    assert said in str(caught.value)
    assert "kv_connector_extra_config" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "block", "chunk"), [(256, 16, 256), (256, 96, 288), (128, 128, 128), (512, 128, 512)]
)
def test_a_chunk_is_whole_blocks(asked: int, block: int, chunk: int) -> None:
    assert Options(chunk_tokens=asked).chunk_tokens_for(block) == chunk


def test_a_chunk_that_was_asked_for_is_not_changed() -> None:
    with pytest.raises(ConfigError, match=r"chunk_tokens = 100: allowed is a multiple .* 16"):
        Options(chunk_tokens=100).chunk_tokens_for(16)


@pytest.mark.parametrize(
    ("window", "block", "chunk"), [(1023, 16, 256), (127, 16, 128), (127, 128, 128), (7, 16, 16)]
)
def test_a_chunk_is_no_longer_than_the_smallest_window(window: int, block: int, chunk: int) -> None:
    assert Options().chunk_tokens_for(block, window) == chunk
    assert Options(chunk_tokens=block).chunk_tokens_for(block, window) == block


def test_a_chunk_that_was_asked_for_and_is_longer_is_refused() -> None:
    with pytest.raises(ConfigError, match="window is 128 tokens; allowed is up to 128"):
        Options(chunk_tokens=512).chunk_tokens_for(16, 127)


def test_blocks_are_read_or_opaque() -> None:
    assert parse_options({}).blocks is BlockForm.AUTO
    assert parse_options({"blocks": "opaque"}).blocks is BlockForm.OPAQUE


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1+cu130", "0.32.0", "0.32.0.post1+cpu"])
def test_tested_versions_are_taken(version: str) -> None:
    check_version(version, forced=False)


@pytest.mark.parametrize("version", ["0.25.0", "0.27.3", "0.33.0", "1.26.0", "dev", ""])
def test_other_versions_are_refused_unless_forced(version: str) -> None:
    assert TESTED == ((0, 26), (0, 32))
    with pytest.raises(ConfigError, match=r"tested with 0.26 and 0.32.*any_version"):
        check_version(version, forced=False)
    check_version(version, forced=True)


@pytest.mark.parametrize(
    ("version", "disk"), [("0.26.0", "FS"), ("0.32.1", "STORAGE"), ("0.40.0", "STORAGE")]
)
def test_each_version_has_its_words_for_tiers(version: str, disk: str) -> None:
    assert media(version)[Tier.DRAM] == "CPU"
    assert media(version)[Tier.DISK] == disk


def test_without_dram_chunks_pass_through_from_a_store_below() -> None:
    config = parse_options({"dram": 0, "remote": "kvtier+unix:///s"}).cache_config(
        ONE, shared=False
    )
    assert config.dram_bytes == 0
    with pytest.raises(ConfigError, match="dram_bytes = 0"):
        parse_options({"dram": 0}).cache_config(ONE, shared=False)
