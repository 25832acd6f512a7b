"""What fits a protocol and what does not, for the type checker and at run time alike.

mypy reads this file with the rest of the tests: a line that must be refused carries an ignore, and
an ignore that nothing needs is an error.
"""

from __future__ import annotations

import pytest

from kvtier.clock import SystemClock
from kvtier.codecs.centred import CENTRED
from kvtier.codecs.raw import RawCodec
from kvtier.interfaces import BlockCodec, Clock, Connector, EvictionPolicy, Listable, PagedPool
from kvtier.policies.lru import LRU
from kvtier.registry import codecs, connectors, policies
from kvtier.testing.calibrations import made_up_calibration
from kvtier.testing.clock import FakeClock
from kvtier.testing.faults import Faulty
from kvtier.testing.pools import TorchPool
from kvtier.types import ChunkKey, Entry, GroupKind, KVGroup, ShardKey, ShardLayout
from kvtier_connectors.memory import MemoryConnector


def test_what_ships_fits() -> None:
    group = KVGroup(GroupKind.FULL, layers=(0,), kv_heads=1, k_dim=4, v_dim=4, dtype="float32")
    clock: Clock = SystemClock()
    fake: Clock = FakeClock()
    codec: BlockCodec = RawCodec()
    policy: EvictionPolicy = LRU(4096, lambda key: False)
    connector: Connector = MemoryConnector()
    listable: Listable = MemoryConnector()
    decorated: Connector = Faulty(MemoryConnector())
    pool: PagedPool = TorchPool([group], block_count=1)
    assert isinstance(clock, Clock)
    assert isinstance(fake, Clock)
    assert isinstance(codec, BlockCodec)
    assert isinstance(policy, EvictionPolicy)
    assert isinstance(connector, Connector)
    assert isinstance(listable, Listable)
    assert isinstance(decorated, Connector)
    assert isinstance(pool, PagedPool)


def test_a_missing_method_does_not_fit() -> None:
    class Sleepless:
        def now(self) -> float:
            return 0.0

    clock: Clock = Sleepless()  # type: ignore[assignment]
    assert not isinstance(clock, Clock)


def test_another_signature_does_not_fit() -> None:
    class Hasty:
        def admit(self, entry: Entry) -> list[ChunkKey]:
            return [entry.key]

        def touch(self, key: ChunkKey) -> None: ...

        def remove(self, key: ChunkKey) -> None: ...

    policy: EvictionPolicy = Hasty()  # type: ignore[assignment]
    entry = Entry(ChunkKey(b"k" * 32), None, 1, 0)
    with pytest.raises(TypeError):
        policy.admit(entry, 0.0)


def test_kinds_of_keys_are_kept_apart() -> None:
    chunk = ChunkKey(b"k" * 32)
    shard: ShardKey = chunk  # type: ignore[assignment]
    plain: bytes = chunk
    assert shard == plain


@pytest.mark.parametrize("name", codecs.names())
def test_every_registered_codec_fits(name: str) -> None:
    layout = ShardLayout(2, 1, 8, 8, "float32", 16)
    given = (made_up_calibration(layout),) if name in CENTRED else ()
    assert isinstance(codecs.load(name)(*given), BlockCodec)


@pytest.mark.parametrize("name", policies.names())
def test_every_registered_policy_fits(name: str) -> None:
    assert isinstance(policies.load(name)(4096, lambda key: False), EvictionPolicy)


def test_every_registered_connector_is_named_by_its_scheme() -> None:
    assert "memory" in connectors.names()
