"""Settings: sizes, validation, tables, and messages that name the field."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import (
    CacheConfig,
    DiskConfig,
    Durability,
    RemoteConfig,
    TenantQuota,
    WriteMode,
    format_size,
    from_table,
    parse_size,
)
from kvtier.constants import (
    GIB,
    KIB,
    LOAD_DEADLINE_S_DEFAULT,
    MIB,
    PENDING_DEADLINE_S_DEFAULT,
    SLAB_BYTES_DEFAULT,
)
from kvtier.errors import ConfigError
from kvtier.types import Placement


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (123, 123),
        (0, 0),
        ("0", 0),
        ("123", 123),
        ("512MiB", 512 * MIB),
        ("1GiB", GIB),
        ("10 KiB", 10 * KIB),
        (" 2TiB ", 2048 * GIB),
    ],
)
def test_parse_size(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MiB",
        "1MB",
        "1 GB",
        "1.5GiB",
        "-1",
        "-1MiB",
        -1,
        True,
        "1e9",
        "1 2MiB",
        "1mib",
        "1K",
        "1  MiB",
        "0x10",
        "1_000",
        "\uff11MiB",
        "9" * 5000,
    ],
)
def test_parse_size_refuses(text: str | int) -> None:
    with pytest.raises(ConfigError, match="whole number of bytes, KiB, MiB, GiB or TiB"):
        parse_size(text)


def test_parse_size_hints_at_the_binary_unit() -> None:
    with pytest.raises(ConfigError, match="did you mean 'MiB'"):
        parse_size("1MB")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (64 * MIB, "64 MiB"),
        (10 * GIB, "10 GiB"),
        (10 * GIB + 1, "10 GiB"),
        (5000 * GIB, "4.9 TiB"),
    ],
)
def test_format_size(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(count=st.integers(0, 1023), unit=st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_whole_sizes_survive_formatting(count: int, unit: str) -> None:
    nbytes = parse_size(f"{count}{unit}")
    if count:
        assert parse_size(format_size(nbytes)) == nbytes


def test_defaults() -> None:
    config = CacheConfig(dram_bytes=GIB)
    assert config.disk is None
    assert (config.codec, config.policy) == ("raw", "lru")
    assert config.slab_bytes == SLAB_BYTES_DEFAULT
    assert config.workers == (Placement(),)
    assert not config.shared
    assert config.load_deadline_s == LOAD_DEADLINE_S_DEFAULT
    assert config.pending_deadline_s == PENDING_DEADLINE_S_DEFAULT
    disk = DiskConfig("/data")
    assert (disk.capacity_bytes, disk.durability, disk.mode) == (10 * GIB, "none", "through")


def test_configs_are_frozen() -> None:
    config = CacheConfig(dram_bytes=GIB)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.codec = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": ""}, "codec = ''"),
        ({"policy": ""}, "policy = ''"),
        ({"slab_bytes": 0}, "slab_bytes = 0: allowed is a positive multiple of 4096"),
        ({"slab_bytes": 5000}, "slab_bytes = 5000"),
        (
            {"dram_bytes": MIB},
            r"dram_bytes = 1048576: allowed is at least one slab \(64 MiB\), or 0 ",
        ),
        ({"dram_bytes": 0}, "dram_bytes = 0: allowed is .*, or 0 with a disk or a remote$"),
        ({"dram_bytes": MIB, "disk": DiskConfig("/d")}, "dram_bytes = 1048576: allowed is"),
        ({"dram_bytes": 0, "disk": DiskConfig("/d"), "exported_to": "a"}, "dram_bytes = 0: allow"),
        (
            {"dram_bytes": 0, "disk": DiskConfig("/d", mode=WriteMode.BACK)},
            "mode = 'back': allowed is through, where dram_bytes is 0",
        ),
        (
            {"dram_bytes": 0, "remotes": (RemoteConfig("memory://a", mode=WriteMode.BACK),)},
            "mode = 'back': allowed is through, where dram_bytes is 0",
        ),
        ({"load_deadline_s": 0.0}, "load_deadline_s = 0.0: allowed is more than 0"),
        ({"load_deadline_s": float("inf")}, "load_deadline_s = inf"),
        ({"pending_deadline_s": -1.0}, "pending_deadline_s = -1.0"),
        ({"pending_deadline_s": float("nan")}, "pending_deadline_s = nan"),
        ({"workers": ()}, "workers = "),
        ({"workers": (Placement(0), Placement(0))}, "workers = "),
        ({"workers": (Placement(0, 0, 2), Placement(1, 0, 2))}, "one worker for each rank"),
        ({"workers": (Placement(0, 0, 2), Placement(1, 1, 4))}, "one size for all workers"),
        ({"workers": (Placement(0, 2, 2),)}, r"workers.tp_rank = 2: allowed is 0 \.\. 1"),
        ({"workers": (Placement(0, stage=-1),)}, "workers.stage = -1"),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"dram_bytes": GIB, **changes}
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "capacity_bytes", "message"),
    [("", GIB, "disk.path = ''"), ("/d", 0, "disk.capacity_bytes = 0"), ("/d", -GIB, "-1073")],
)
def test_a_disk_that_cannot_be_is_refused(path: str, capacity_bytes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiskConfig(path, capacity_bytes)


def test_from_a_toml_table() -> None:
    table = tomllib.loads(
        """
        dram_bytes = "1GiB"
        policy = "lru"
        load_deadline_s = 3
        [disk]
        path = "/data"
        capacity_bytes = 1_000_000
        durability = "batch"
        mode = "back"
        [[workers]]
        worker = 0
        tp_size = 2
        [[workers]]
        worker = 1
        tp_rank = 1
        tp_size = 2
        """
    )
    assert from_table(CacheConfig, table) == CacheConfig(
        dram_bytes=GIB,
        disk=DiskConfig("/data", 1_000_000, Durability.BATCH, WriteMode.BACK),
        load_deadline_s=3.0,
        workers=(Placement(0, 0, 2), Placement(1, 1, 2)),
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"dram_byte": 1}, r"the configuration has no 'dram_byte' \(did you mean 'dram_bytes'\?"),
        ({}, "dram_bytes"),
        ({"dram_bytes": "1GB"}, "dram_bytes: not a size: '1GB'"),
        ({"dram_bytes": 1.5}, "dram_bytes: not a size: 1.5"),
        ({"dram_bytes": GIB, "shared": 1}, "shared = 1: allowed is a bool"),
        ({"dram_bytes": GIB, "codec": 3}, "codec = 3: allowed is a str"),
        ({"dram_bytes": GIB, "load_deadline_s": "3"}, "load_deadline_s = '3': allowed is a float"),
        ({"dram_bytes": GIB, "load_deadline_s": 10**400}, "load_deadline_s = 1.*a float holds"),
        ({"dram_bytes": GIB, "disk": "/data"}, "disk = '/data': allowed is a table"),
        ({"dram_bytes": GIB, "disk": {}}, "disk: .*path"),
        (
            {"dram_bytes": GIB, "disk": {"path": "/d", "durabilty": "each"}},
            r"disk has no 'durabilty' \(did you mean 'durability'\?\); allowed: admission",
        ),
        (
            {"dram_bytes": GIB, "disk": {"path": "/d", "durability": "bach"}},
            r"disk.durability = 'bach': allowed is none, batch, each \(did you mean 'batch'\?\)",
        ),
        ({"dram_bytes": GIB, "disk": {"path": "/d", "mode": 1}}, "disk.mode = 1: allowed is thr"),
        ({"dram_bytes": GIB, "workers": 2}, "workers = 2: allowed is a list"),
        ({"dram_bytes": GIB, "workers": [2]}, "workers = 2: allowed is a table"),
        ({"dram_bytes": GIB, "workers": [{"rank": 1}]}, "workers has no 'rank'.*tp_rank"),
    ],
    ids=str,
)
def test_b113_a_setting_that_has_no_effect_is_an_error(
    table: dict[str, object], message: str
) -> None:
    """Misspelt names and values of the wrong kind never pass in silence."""
    with pytest.raises(ConfigError, match=message):
        from_table(CacheConfig, table)


def test_where_names_the_table() -> None:
    with pytest.raises(ConfigError, match=r"^cache has no 'x'"):
        from_table(CacheConfig, {"x": 1}, "cache")
    with pytest.raises(ConfigError, match=r"^cache.disk has no 'x'"):
        from_table(CacheConfig, {"dram_bytes": GIB, "disk": {"x": 1}}, "cache")


@pytest.mark.parametrize("again", ["/kv/", "/kv/.", "/kv/../kv"])
def test_a_directory_under_another_spelling_is_refused(again: str) -> None:
    """It would be locked by the first, and half of the bound never used."""
    with pytest.raises(ConfigError, match="each named once"):
        DiskConfig("/kv", more_paths=(again,))


@pytest.mark.parametrize(
    ("first", "second"), [("/kv", "/kv/below"), ("/kv/a/b", "/kv/a"), ("kv", "kv/../kv/x/.")]
)
def test_a_directory_inside_another_is_refused(first: str, second: str) -> None:
    """Each is bounded by itself: what lies below would count twice, or be taken for rubbish."""
    with pytest.raises(ConfigError, match="none inside another"):
        DiskConfig(first, more_paths=("/elsewhere", second))
    assert DiskConfig("/kv", more_paths=("/kv2", "/kv-3")).paths == ("/kv", "/kv2", "/kv-3")


@pytest.mark.parametrize("paths", [("/k\0v",), ("/kv", "/k\0v"), ("/kv", "")])
def test_a_path_that_no_system_takes_is_refused(paths: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"disk\.path"):
        DiskConfig(paths[0], more_paths=paths[1:])


def test_one_text_is_not_several_directories() -> None:
    """Each of its letters would become a directory."""
    with pytest.raises(
        ConfigError, match=r"disk\.more_paths = 'kv2': .*a tuple, each of it a text"
    ):
        DiskConfig("/kv", more_paths=cast("Any", "kv2"))


@pytest.mark.parametrize("size", [1e9, 1.5, True, "1GiB", None, -1])
def test_b113_a_size_is_a_whole_number(size: object) -> None:
    """Rounded or taken for a truth value, it would be another size than was meant."""
    given: Any = size
    for name in ("dram_bytes", "slab_bytes", "tenant_quota_bytes"):
        with pytest.raises(ConfigError, match=name):
            CacheConfig(**{"dram_bytes": GIB, name: given})
    for name in ("capacity_bytes", "write_bytes_per_day"):
        with pytest.raises(ConfigError, match=f"disk.{name}"):
            DiskConfig("/kv", **{name: given})
    with pytest.raises(ConfigError, match="quota_bytes"):
        TenantQuota("0" * 64, given)


def test_quotas_come_from_a_table_and_name_each_tenant_once() -> None:
    quota = {"tenant": "ab" * 32, "quota_bytes": "1GiB"}
    table = {"dram_bytes": GIB, "tenant_quota_bytes": "2GiB", "tenant_quotas": [quota]}
    config = from_table(CacheConfig, table)
    assert config.tenant_quota_bytes == 2 * GIB
    assert config.tenant_quotas == (TenantQuota("ab" * 32, GIB),)
    with pytest.raises(ConfigError, match="each tenant once"):
        from_table(CacheConfig, {**table, "tenant_quotas": [quota, quota]})


def test_a_disk_codec_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="codec"):
        DiskConfig("/kv", codec="")
