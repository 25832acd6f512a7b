"""Hostile clients of a server, all at once and for a while, and a good one beside them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

#: Goes on until the event is set; returns what it has seen.
Client = Callable[[threading.Event], Counter[str]]


def attack(bad: Sequence[Client], good: Client, seconds: float) -> tuple[Counter[str], ...]:
    """Run them for so long; return what the bad ones together have seen, and the good one."""
    over = threading.Event()
    with ThreadPoolExecutor(len(bad) + 1) as threads:
        asking = threads.submit(good, over)
        attacking = [threads.submit(each, over) for each in bad]
        try:
            wait([asking], seconds)  # It ends before only where it fails.
        finally:
            over.set()
        seen: Counter[str] = Counter()
        for each in attacking:
            seen += each.result()
        return seen, asking.result()
