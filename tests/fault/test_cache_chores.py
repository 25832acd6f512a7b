"""What a directory has to note and to unlink fails too, and is tried again when nothing is new."""

from __future__ import annotations

from pathlib import Path

from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import EVER, FileFailure, FileOperation
from kvtier.types import Tier
from tests.lib.cache_setup import cache_setup, recovered, store_one, tier_stats, written


def test_a_disk_is_well_again_once_its_chores_are_done(tmp_path: Path) -> None:
    """With nothing to write, no write would ever find out that the disk works again."""
    with cache_setup(tmp_path) as setup:
        clock = FakeClock()
        engine = setup.open(clock=clock)
        key = store_one(engine, 0)
        written(engine)
        some = (FileOperation.APPEND, FileOperation.REMOVE)
        setup.files.inject(FileFailure(operations=some, last=EVER))
        engine.cache.remove([key])
        wait_until(
            lambda: tier_stats(engine.cache, Tier.DISK).state == "failing", "it does not fail"
        )
        setup.files.inject()
        wait_until(lambda: recovered(engine, clock), "it fails for ever")
