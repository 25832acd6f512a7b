"""Rows of measurements on a machine that has no more than the source tree."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    """Rows as JSON, on standard output and under ``$OUT``; ends when the time is used up."""

    def __init__(self, name: str, budget_s: float) -> None:
        self._name = name
        self._end = time.monotonic() + budget_s
        folder = Path(os.environ.get("OUT", "/tmp"))
        self._file = (folder / f"{name}.jsonl").open("a")

    @property
    def over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() > self._end

    def row(self, **figures: Any) -> None:
        """Write one row."""
        line = json.dumps({"bench": self._name, **figures}, default=str)
        print(line, flush=True)
        print(line, file=self._file, flush=True)

    def attempt_boundary(
        self, what: dict[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Write what was measured, or why it was not; the other cases go on."""
        if self.over:
            return {}
        try:
            found = measure()
        # One case that a machine cannot run keeps none of the others from it.
        except Exception as error:
            self.row(**what, error=repr(error), trace=traceback.format_exc()[-600:])
            return {}
        self.row(**what, **found)
        return found
