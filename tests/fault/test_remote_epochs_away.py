"""Epochs where the remote is away, takes no writes, or holds damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cache.below import remote_epochs as module
from kvtier.cache.below.remote_epochs import EPOCH_KEYS
from kvtier.constants import (
    EPOCHS_BYTES_MAX,
    EPOCHS_MAX,
    EPOCHS_TRIES_MAX,
)
from kvtier.errors import (
    ConnectorDataError,
    ConnectorRefusedError,
    TierUnavailableError,
)
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.tiers.epoch_record import decode_epochs, encode_epochs
from kvtier.types import Namespace
from tests.lib.cache_setup import LAYOUT, NAMESPACE
from tests.lib.epoch_hosts import (
    DIGEST,
    FIVE,
    away,
    copies,
    found,
    in_time,
    known,
    state,
    stored,
    told,
)
from tests.lib.remote_lab import (
    RemoteLab,
    remote_lab,
)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


# A remote that is away


def test_b11_one_that_is_away_is_told_when_it_is_back(lab: RemoteLab) -> None:
    clock = FakeClock()
    ours = lab.open(clock=clock)
    stored(ours)
    away(lab)
    with pytest.raises(TierUnavailableError, match=r"^remote 0 has not been told.*away"):
        ours.cache.invalidate(NAMESPACE)
    assert found(ours) == 0, "it holds here"
    assert copies(lab) == [None, None]
    lab.remote.twist.clear()
    in_time(clock, lambda: None not in copies(lab), "it is not told")
    assert found(lab.open()) == 0


def test_b11_one_that_hangs_holds_an_invalidation_up_for_a_bounded_time(
    lab: RemoteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EPOCHS_TELL_S_MAX", 0.1)
    ours = lab.open(deadline_s=60.0)
    lab.remote.hold("epochs")
    with pytest.raises(TierUnavailableError, match="no answer in time"):
        ours.cache.invalidate(NAMESPACE)
    assert found(ours) == 0
    lab.remote.release()
    wait_until(lambda: None not in copies(lab), "it is not told when it answers")
    known(ours)


def test_b11_it_is_told_at_the_end_if_not_before(lab: RemoteLab) -> None:
    ours = lab.open(clock=FakeClock())
    away(lab)
    with pytest.raises(TierUnavailableError):
        ours.cache.invalidate(NAMESPACE)
    lab.remote.twist.clear()
    lab.close(ours)
    assert told(lab) == 1
    with pytest.raises(TierUnavailableError, match="closed"):
        ours.cache.invalidate(NAMESPACE)


def test_one_of_several_that_is_away_keeps_none_from_knowing(lab: RemoteLab) -> None:
    lab.remotes.append(type(lab.remote)())
    ours = lab.open()
    away(lab)
    with pytest.raises(TierUnavailableError, match=r"^remote 0 "):
        ours.cache.invalidate(NAMESPACE)
    assert set(lab.remotes[1].epochs()) == set(EPOCH_KEYS)


def test_disk_and_remote_that_are_both_away_are_both_named(lab: RemoteLab) -> None:
    clock = FakeClock()
    ours = lab.open(disk_chunks=16, clock=clock)
    ours.match(ours.sequence([]))
    obstacle = lab.folder / "disk" / "epochs.new"
    obstacle.mkdir()
    away(lab)
    with pytest.raises(TierUnavailableError, match=r"kept in memory.*; remote 0 has not"):
        ours.cache.invalidate(NAMESPACE)
    obstacle.rmdir()


def test_a_store_that_takes_no_writes_is_read_and_named(lab: RemoteLab) -> None:
    """It may be a copy for reading only: what others raise is seen, what is raised here is not."""
    clock = FakeClock()
    stored(lab.open())

    theirs = lab.open(clock=clock)
    lab.remote.put_epochs(encode_epochs({DIGEST: 3}, 0))
    in_time(clock, lambda: found(theirs) == 0, "it does not learn")
    refusal = ConnectorRefusedError("for reading only")
    # The copies are there: only a write is answered with None.
    lab.remote.twist["epochs"] = lambda answer: [refusal] if answer == [None] else answer
    with pytest.raises(TierUnavailableError, match="for reading only"):
        theirs.cache.invalidate(NAMESPACE)
    assert state(theirs) == "ok", "and it is asked"


def test_a_store_that_refuses_to_be_read_is_named_and_asked_again(lab: RemoteLab) -> None:
    """A wrong token or password is no pause that ends by itself: whoever gave it has to know."""
    clock = FakeClock()
    refusal = ConnectorRefusedError("the token is wrong")
    lab.remote.twist["epochs"] = lambda answer: [refusal for _ in answer]
    ours = lab.open(clock=clock)
    in_time(clock, lambda: state(ours) == "failing", "nobody says so")
    assert "the token is wrong" in ours.cache.stats().remotes[0].detail
    lab.remote.twist.clear()
    in_time(clock, lambda: state(ours) == "ok", "it is not asked again")


def test_a_store_that_keeps_what_is_there_is_made_to_forget_it_first(lab: RemoteLab) -> None:
    """S3 with conditions: equal keys are taken for equal bytes."""
    ours = lab.open()
    inner = lab.remote.store.write

    async def keep(items: Any) -> Any:
        there = await lab.remote.store.contains([item.key for item in items])
        await inner([item for item, kept in zip(items, there, strict=True) if not kept])
        return [None for _ in items]

    lab.remote.store.write = keep  # type: ignore[method-assign]
    assert [ours.cache.invalidate(NAMESPACE) for _ in range(3)] == [1, 2, 3]
    assert told(lab) == 3


def test_a_store_that_loses_what_is_written_is_named(lab: RemoteLab) -> None:
    ours = lab.open()
    lab.remote.loses = True
    before = lab.remote.calls["epochs"]
    with pytest.raises(TierUnavailableError, match="does not stay"):
        ours.cache.invalidate(NAMESPACE)
    # Two reads and two writes each time, and two deletions from the second one on.
    assert lab.remote.calls["epochs"] - before >= 6 * EPOCHS_TRIES_MAX - 2


# Damage


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "foreign", "no record"])
def test_b11_damage_to_both_copies_makes_everything_old(lab: RemoteLab, harm: str) -> None:
    clock = FakeClock()
    ours = lab.open(clock=clock)
    ours.cache.invalidate(Namespace("others", LAYOUT))
    stored(ours)
    record = lab.remote.epochs()[EPOCH_KEYS[0]]
    flipped = bytes([*record[:-1], record[-1] ^ 1])
    wrong = encode_epochs({b"too short": 1}, 0)
    lab.remote.put_epochs(
        {"flip": flipped, "cut": record[:-3], "empty": b"", "no record": wrong}.get(harm, b"x" * 99)
    )
    in_time(clock, lambda: found(ours) == 0, "it is believed")
    wait_until(lambda: not decode_epochs(copies(lab)[1] or b"").damaged, "it is not mended")
    floor = told(lab)
    assert floor > 1_000_000_000
    stored(ours)
    fresh = lab.open()
    assert found(fresh) == len(FIVE), "what was stored since is shared"
    assert fresh.cache.invalidate(NAMESPACE) == floor + 1


def test_one_sound_copy_makes_up_for_the_other(lab: RemoteLab) -> None:
    clock = FakeClock()
    ours = lab.open(clock=clock)
    ours.cache.invalidate(NAMESPACE)
    for harmed in EPOCH_KEYS:
        lab.remote.put(harmed, b"x" * 99)
        in_time(clock, lambda: b"x" * 99 not in copies(lab), "it is not mended")
    assert ours.cache.invalidate(NAMESPACE) == 2, "no floor rose"


def test_what_the_connector_cannot_give_is_no_damage(lab: RemoteLab) -> None:
    """Another key of encryption, say: who raised the floor for that would do so at every start."""
    ours = lab.open()
    ours.cache.invalidate(NAMESPACE)

    def wrong(_: Any) -> Any:
        raise ConnectorDataError("with another key")

    lab.remote.twist["epochs"] = wrong
    fresh = lab.open()
    assert found(fresh) == 0
    assert state(fresh) != "ok"
    with pytest.raises(TierUnavailableError, match="another key"):
        fresh.cache.invalidate(NAMESPACE)
    lab.remote.twist.clear()
    assert told(lab) == 1


def test_as_many_as_there_may_be_fit(lab: RemoteLab) -> None:
    digests = [number.to_bytes(32, "big") for number in range(EPOCHS_MAX - 1)]
    lab.remote.put_epochs(encode_epochs(dict.fromkeys(digests, 2**60), 0))
    ours = lab.open()
    assert ours.cache.invalidate(NAMESPACE) == 1
    record = decode_epochs(lab.remote.epochs()[EPOCH_KEYS[1]])
    assert (len(record.epochs), record.floor) == (EPOCHS_MAX, 0)
    assert len(lab.remote.epochs()[EPOCH_KEYS[1]]) < EPOCHS_BYTES_MAX
