"""The engine of the first page closes what it opened, and says what it lacks."""

from __future__ import annotations

import sys

import pytest

from kvtier import CacheConfig
from kvtier.constants import MIB
from kvtier.errors import MissingExtraError
from kvtier.testing.small_engine import small_engine
from kvtier.types import Tier

CONFIG = CacheConfig(dram_bytes=64 * MIB)


def test_it_finds_what_it_stored_until_it_is_closed() -> None:
    with small_engine(CONFIG) as engine:
        prompt = engine.sequence(range(512))
        assert engine.store(prompt)
        match = engine.match(prompt)
        assert [hit.tier for hit in match.hits] == [Tier.DRAM, Tier.DRAM]
        engine.load(match)
    assert not engine.match(prompt).hits


def test_without_torch_it_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r'needs torch: pip install "kvtier\[torch\]"'):
        small_engine(CONFIG).__enter__()
