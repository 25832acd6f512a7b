"""The admissions keep their contract; those that break it are caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.admission.budget import Budgeted, WriteBudget
from kvtier.admission.everything import Everything
from kvtier.admission.learned import Learned
from kvtier.admission.second_touch import SecondTouch
from kvtier.interfaces import AdmissionPolicy
from kvtier.testing.admission_contract import AdmissionPolicyContract
from kvtier.types import ChunkKey, Entry, Features


class TestEverything(AdmissionPolicyContract):
    def make_admission(self, capacity_bytes: int) -> AdmissionPolicy:
        return Everything(capacity_bytes)


class TestSecondTouch(AdmissionPolicyContract):
    def make_admission(self, capacity_bytes: int) -> AdmissionPolicy:
        return SecondTouch(capacity_bytes)


class TestLearned(AdmissionPolicyContract):
    def make_admission(self, capacity_bytes: int) -> AdmissionPolicy:
        return Learned(capacity_bytes)


class TestBudgeted(AdmissionPolicyContract):
    """The budget is scarce: a chunk in a minute."""

    def make_admission(self, capacity_bytes: int) -> AdmissionPolicy:
        return Budgeted(SecondTouch(capacity_bytes), WriteBudget(14_400))


class Broken(Everything):
    """Right in everything but what a subclass breaks."""

    def __init__(self) -> None:
        super().__init__(1)
        self.seen: dict[ChunkKey, int] = {}


class Never(Broken):
    def offer(self, entry: Entry, now: float) -> bool:
        return False


class Orphans(Broken):
    """Judges every chunk for itself."""

    def offer(self, entry: Entry, now: float) -> bool:
        return entry.position != 1


class Moody(Broken):
    """Answers by what other instances were asked."""

    asked = 0

    def offer(self, entry: Entry, now: float) -> bool:
        Moody.asked += 1
        return entry.parent is None and Moody.asked % 7 == 0


class Grudging(Broken):
    """Never takes back what left."""

    def offer(self, entry: Entry, now: float) -> bool:
        return entry.key not in self.seen and entry.parent not in self.seen

    def left(self, key: ChunkKey, now: float) -> None:
        self.seen[key] = 1


class Elephant(Broken):
    def offer(self, entry: Entry, now: float) -> bool:
        self.seen[entry.key] = 1
        return True


class Strict(Broken):
    """Takes no key that it does not know."""

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        del self.seen[key]


Contract = AdmissionPolicyContract


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Never, Contract.test_what_is_asked_for_again_and_again_is_written),
        (Never, Contract.test_no_traffic_starves_what_comes_after),
        (Orphans, Contract.test_a_child_waits_for_its_parent),
        (Moody, Contract.test_one_history_has_one_outcome),
        (Grudging, Contract.test_what_left_may_come_back),
        (Elephant, Contract.test_what_is_remembered_is_bounded),
        (Strict, Contract.test_unknown_keys_are_ignored),
    ],
)
def test_what_breaks_the_contract_is_caught(
    broken: Callable[[], AdmissionPolicy], test: Callable[[AdmissionPolicyContract], None]
) -> None:
    class OfBroken(AdmissionPolicyContract):
        def make_admission(self, capacity_bytes: int) -> AdmissionPolicy:
            return broken()

    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        test(OfBroken())
