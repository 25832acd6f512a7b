"""What hosts over one remote know of epochs, and what lies there of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier.cache.below.remote_epochs import EPOCH_KEYS
from kvtier.constants import (
    EPOCHS_READ_S,
)
from kvtier.errors import (
    ConnectorUnavailableError,
)
from kvtier.keys import namespace_digest
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.tiers.epoch_record import decode_epochs
from kvtier.types import Tier
from tests.lib.cache_setup import NAMESPACE, tier_stats, written
from tests.lib.remote_lab import (
    RemoteLab,
    tokens_of,
)

FIVE = tokens_of(5)
DIGEST = namespace_digest(NAMESPACE)


def found(engine: EngineDouble) -> int:
    return engine.match(engine.sequence(FIVE)).tokens


def stored(engine: EngineDouble) -> None:
    assert engine.store(engine.sequence(FIVE))
    written(engine)


def copies(lab: RemoteLab) -> list[bytes | None]:
    """What lies in the remote of epochs."""
    return [lab.remote.epochs().get(key) for key in EPOCH_KEYS]


def told(lab: RemoteLab) -> int:
    """The epoch of the namespace as both copies in the remote have it; 0: they do not agree."""
    first, second = copies(lab)
    record = decode_epochs(first or b"")
    if record.damaged or first != second:
        return 0
    return max(record.epochs.get(DIGEST, 0), record.floor)


def state(engine: EngineDouble) -> str:
    return tier_stats(engine.cache, Tier.REMOTE).state


def known(engine: EngineDouble) -> None:
    wait_until(lambda: state(engine) == "ok", f"it does not come back: {state(engine)}")


def in_time(clock: FakeClock, condition: Callable[[], bool], what: str) -> None:
    """Let interval after interval go by until ``condition`` holds."""

    def holds() -> bool:
        clock.advance(EPOCHS_READ_S)
        return condition()

    wait_until(holds, what)


def reads_on(lab: RemoteLab, clock: FakeClock, seconds: float = EPOCHS_READ_S) -> None:
    """Let the time of the next round come, and wait until it has begun and ended."""
    before = lab.remote.calls["epochs"]
    clock.advance(seconds)
    wait_until(lambda: lab.remote.calls["epochs"] >= before + 2, "it is not read again")


def away(lab: RemoteLab, error: Exception | None = None) -> None:
    def fail(_: Any) -> Any:
        raise error or ConnectorUnavailableError("it is away")

    for operation in ("epochs", "contains", "read", "write"):
        lab.remote.twist[operation] = fail
