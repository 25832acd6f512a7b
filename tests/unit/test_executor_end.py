"""What the executor's loop leaves behind when it ends: nothing."""

from __future__ import annotations

import gc
import math
import threading
from concurrent.futures import Future

import pytest

from kvtier.cache.executor import Executor
from kvtier.testing.clock import FakeClock

WAIT_S = 30.0


@pytest.mark.parametrize("round_", range(8))
def test_what_is_begun_while_the_loop_ends_is_given_up(
    round_: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A task that nobody waits for would be reported as destroyed while it was pending."""
    executor = Executor(FakeClock(), lanes=1, tick=lambda: None)
    executor.start()
    ready: Future[object] = Future()
    ready.set_result("value")
    begun = threading.Semaphore(0)

    def again(outcome: object) -> None:
        del outcome
        begun.release()
        executor.watch(ready, again, deadline=math.inf, late=again)

    for turn in range(32):  # They end at different points of their turns.
        again(None)
        for _ in range(turn + round_):
            assert begun.acquire(timeout=WAIT_S)
    executor.close(0.0)
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []
