"""The environments of other engines, which ``make engines`` makes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.tiers.peers import venvs

#: Deadlines of a plug that no machine is too busy for: how soon it gives up is tried elsewhere.
PATIENT: Final = {"load_deadline_s": 60, "store_deadline_s": 60, "lookup_deadline_s": 60}


def peer(name: str) -> Path:
    """Return the folder of an engine's environment.

    ``AssertionError`` where it is not as pinned: who asked for these tests has them fail, not pass
    over them.
    """
    assert venvs.is_complete(name), f"{name} is not installed as it is pinned: `make engines`"
    return venvs.FOLDER / name
