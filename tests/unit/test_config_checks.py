"""A configuration that is built in Python: every field is of its type, or the error names it."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from kvtier.config import CacheConfig, DiskConfig, RemoteConfig, TenantQuota, parse_size
from kvtier.constants import GIB
from kvtier.errors import ConfigError, shortly

WHOLE: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "disk.": (DiskConfig, {"path": "/kv"}),
    "remotes.": (RemoteConfig, {"url": "memory://x"}),
    "tenant_quotas.": (TenantQuota, {"tenant": "0" * 64, "quota_bytes": 1}),
    "": (CacheConfig, {"dram_bytes": GIB}),
}
NONSENSE: tuple[Any, ...] = (object(), b"x", {}, 10**5000, math.nan, -1, ("x",), 1.5)
#: What of that some fields take.
RIGHT = {("remotes.", name) for name in ("ttl_s", "absent_s", "deadline_s")} | {
    ("", name) for name in ("load_deadline_s", "pending_deadline_s", "gpu_time_worth")
}


@pytest.mark.parametrize("where", WHOLE)
def test_b113_nonsense_in_any_field_is_an_error_that_names_it(where: str) -> None:
    made, right = WHOLE[where]
    for field in fields(made):
        for value in NONSENSE:
            if value == 1.5 and (where, field.name) in RIGHT:
                continue
            if value == ("x",) and field.name == "more_paths":
                continue
            with pytest.raises(ConfigError, match=rf"^{where}{field.name} = ") as caught:
                made(**{**right, field.name: value})
            assert len(str(caught.value)) < 400


def test_a_mode_is_no_text_that_looks_like_one() -> None:
    """It would be compared by identity, and never be what it says."""
    mode: Any = "back"
    with pytest.raises(ConfigError, match=r"disk\.mode = 'back': allowed is a WriteMode: through"):
        DiskConfig("/kv", mode=mode)


def test_a_url_is_never_shown() -> None:
    url: Any = b"redis://user:secret@host"
    with pytest.raises(ConfigError, match=r"remotes\.url") as caught:
        RemoteConfig(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("size", [2**63, "9" * 30, "8388608TiB"])
def test_a_size_that_no_machine_has_is_refused(size: int | str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_size(size)
    assert parse_size("8388607TiB") == 8388607 << 40


def test_long_values_are_cut_where_they_are_shown() -> None:
    assert shortly("short") == "'short'"
    assert shortly("x" * 5000).endswith("...' (5002 characters)")
    assert len(shortly("x" * 5000)) < 200
    assert shortly(10**5000) == "a very long int"
