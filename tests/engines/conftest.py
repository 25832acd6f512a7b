"""Which tests of other engines are collected: they need environments of their own, and minutes."""

from __future__ import annotations

import os
from pathlib import Path

#: Empty: none, as in a run of all other tests. ``smallest``: ``test_*_smallest.py``. ``all``.
ASKED = os.environ.get("KVTIER_ENGINES", "")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what was not asked for; what was asked for and has no environment fails."""
    if ASKED == "all" or not collection_path.name.startswith("test_"):
        return None
    smallest = collection_path.name.endswith("_smallest.py")
    return None if ASKED == "smallest" and smallest else True
