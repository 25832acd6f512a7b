"""What an L2 adapter has to remember: results to be asked for, locks, and sizes for quotas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from kvtier_adapters.lmcache.limits import KEYS_MAX, LOCKS_MAX, RESULTS_MAX

T = TypeVar("T")


class Results(Generic[T]):
    """Results by task, each taken once. At most ``RESULTS_MAX``; the oldest are forgotten.

    Not safe from several threads: whoever owns it has a lock.
    """

    def __init__(self) -> None:
        self._results: OrderedDict[int, T] = OrderedDict()

    def add(self, task: int, result: T) -> None:
        """Keep a result."""
        self._results[task] = result
        if len(self._results) > RESULTS_MAX:
            self._results.popitem(last=False)

    def take(self, task: int) -> T | None:
        """Return a task's result, the first time; None: not yet, or not any more."""
        return self._results.pop(task, None)

    def take_all(self) -> dict[int, T]:
        """Return all results that nobody took."""
        results, self._results = dict(self._results), OrderedDict()
        return results


class Locks:
    """How many lookups have locked an object that has not been unlocked. Owner has a lock."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, int] = {}

    def lock(self, key: Hashable) -> bool:
        """Count one more; False: too many objects are locked, and this one is not."""
        if key not in self._counts and len(self._counts) >= LOCKS_MAX:
            return False
        self._counts[key] = self._counts.get(key, 0) + 1
        return True

    def unlock(self, key: Hashable) -> None:
        """Count one less; one that is not locked stays so."""
        count = self._counts.pop(key, 0) - 1
        if count > 0:
            self._counts[key] = count

    def __contains__(self, key: Hashable) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        return len(self._counts)


class Sizes:
    """Bytes of objects that were told to LMCache's quotas. Owner has a lock.

    Every method returns what changed, as the keys and sizes to tell of.
    """

    def __init__(self) -> None:
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()

    def add(self, found: Iterable[tuple[Hashable, int]]) -> list[tuple[Hashable, int]]:
        """Count objects that are held; return those that were not counted yet."""
        new = [(key, nbytes) for key, nbytes in dict(found).items() if key not in self._sizes]
        self._sizes.update(new)
        return new

    def remove(self, keys: Iterable[Hashable]) -> list[tuple[Hashable, int]]:
        """Count objects no longer; return those that were counted."""
        return [(key, self._sizes.pop(key)) for key in dict.fromkeys(keys) if key in self._sizes]

    def trim(self) -> list[tuple[Hashable, int]]:
        """Count the oldest no longer that are beyond ``KEYS_MAX``; return them."""
        return [self._sizes.popitem(last=False) for _ in range(len(self._sizes) - KEYS_MAX)]

    def __len__(self) -> int:
        return len(self._sizes)
