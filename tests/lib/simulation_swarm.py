"""What differs between runs of the tiers' simulation: each seed draws its own kind of machine.

Swarm testing (Groce et al., 2012): a run that leaves some kinds of steps out reaches states that a
run of everything seldom does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from kvtier.admission.everything import Everything
from kvtier.admission.learned import Learned
from kvtier.admission.second_touch import SecondTouch
from kvtier.interfaces import AdmissionPolicy
from kvtier.policies.arc import ARC
from kvtier.policies.gittins import Gittins
from kvtier.policies.lru import LRU
from kvtier.tiers.disk.tier import PolicyFactory

_POLICIES: Final[tuple[PolicyFactory, ...]] = (LRU, ARC, Gittins)
_ADMISSIONS: Final = (Everything, Everything, SecondTouch, Learned)

#: Steps that move chunks; without them nothing happens.
MOVING: Final = ("store", "end_store", "begin_write", "end_write", "begin_fill", "end_fill")
#: Steps that a run may do without, and those after which there is little left to go wrong.
RARE: Final = ("spoil", "fail", "reopen", "give_way")
ENDS: Final = ("restart", "crash", "lose_index")
COMMON: Final = ("touch", "pin", "unpin", "heal", "tick")


@dataclass(frozen=True)
class Swarm:
    """One kind of machine and of day. ``back`` writes late."""

    policy: PolicyFactory
    admission: AdmissionPolicy
    directories: int
    back: bool
    changes_logged: int
    weights: dict[str, float]


def drawn(
    draws: random.Random, capacity_bytes: int, policy: PolicyFactory | None, *, every_step: bool
) -> Swarm:
    """Draw one; ``policy`` stands in for those drawn from, ``every_step`` leaves no step out."""
    weights = dict.fromkeys(MOVING, 16.0) | {"store": 32.0, "end_store": 32.0}
    weights |= {step: draws.choice((1.0, 2.0, 4.0)) for step in COMMON}
    few = (2.0,) if every_step else (0.0, 0.3, 1.0, 2.0)
    weights |= {step: draws.choice(few) for step in RARE}
    weights |= {step: draws.choice(few) / 4 for step in ENDS}
    return Swarm(
        policy=policy or draws.choice(_POLICIES),
        admission=draws.choice(_ADMISSIONS)(capacity_bytes),
        directories=draws.choice((1, 1, 2)),
        back=draws.random() < 0.3,
        changes_logged=draws.choice((3, 20, 1 << 16)),
        weights=weights,
    )
