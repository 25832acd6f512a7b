"""When a remote's epochs are read: again and again, and ever more rarely when it refuses."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.cache.below.remote_epochs import RemoteEpochs
from kvtier.cache.below.remote_source import Remote
from kvtier.cache.tenancy.epochs import Epochs
from kvtier.constants import EPOCHS_READ_S, HEALTH_BACKOFF_S_MAX, HEALTH_BACKOFF_S_MIN
from kvtier.errors import ConnectorRefusedError
from kvtier.testing.clock import FakeClock
from kvtier.tiers.remote.channel import Channel
from kvtier.tiers.remote.tier import RemoteTier
from tests.lib.remote_lab import ToyRemote

STEP_S = 0.25


class Lab:
    """A keeper over a toy, whose ticks are ours."""

    def __init__(self, channel: Channel, remote: ToyRemote, clock: FakeClock) -> None:
        self.remote = remote
        self.tier = RemoteTier(0, clock, random.Random(1), ttl_s=1.0, absent_s=1.0)
        self._clock, self._lock = clock, threading.Lock()
        self._keeper = RemoteEpochs(
            Remote(self.tier, channel), 1, Epochs(1, 1), self._lock, clock, lambda: None
        )

    def tick(self) -> None:
        """Tick, and wait for the round that this may have begun."""
        with self._lock:
            self._keeper.tick()
            latest = self._keeper.first()
        latest.result(20.0)

    def next_round_s(self) -> float:
        """Let time go by until the remote is asked again; return how long that took."""
        asked, waited_s = self.remote.calls["epochs"], 0.0
        while self.remote.calls["epochs"] == asked:
            assert waited_s <= 2 * HEALTH_BACKOFF_S_MAX, "it is asked no more"
            self._clock.advance(STEP_S)
            waited_s += STEP_S
            self.tick()
        return waited_s


@contextmanager
def opened() -> Iterator[Lab]:
    remote, clock = ToyRemote(), FakeClock()
    draws = random.Random(1)
    channel = Channel(
        lambda: remote, clock, draws, lambda: None, connections=1, deadline_s=20.0, name="test"
    )
    try:
        yield Lab(channel, remote, clock)
    finally:
        channel.close(5.0)


def test_one_that_refuses_to_be_read_is_asked_ever_more_rarely() -> None:
    """With a wrong token it would refuse two times a second for ever, from every engine."""
    with opened() as lab:
        refusal = ConnectorRefusedError("the token is wrong")
        lab.remote.twist["epochs"] = lambda answer: [refusal for _ in answer]
        lab.tick()
        assert lab.tier.state == ("failing", "the token is wrong")
        waits = [lab.next_round_s() for _ in range(8)]
        assert waits == [min(HEALTH_BACKOFF_S_MIN * 2**n, HEALTH_BACKOFF_S_MAX) for n in range(8)]
        assert lab.tier.breaker.closed, "a refusal is no fault of the way there"
        lab.remote.twist.clear()
        assert lab.next_round_s() == HEALTH_BACKOFF_S_MAX
        assert lab.tier.state == ("ok", "")
        assert lab.next_round_s() == EPOCHS_READ_S, "all is forgiven"
