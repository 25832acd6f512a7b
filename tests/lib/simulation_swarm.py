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
from kvtier.config import WriteMode
from kvtier.interfaces import AdmissionPolicy
from kvtier.policies.arc import ARC
from kvtier.policies.gittins import Gittins
from kvtier.policies.lru import LRU
from kvtier.tiers.disk.tier import PolicyFactory
from kvtier.types import Namespace
from tests.lib.cache_world import NAMESPACES

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


#: What an engine does; without it nothing happens.
SERVING: Final = {"arrive": 12.0, "engine": 8.0, "poll": 12.0, "work": 16.0, "answer": 12.0}
PASSING: Final = {"wait": 24.0, "wait_long": 0.5, "heal": 1.0}
MISHAPS: Final = ("cancel", "kill_worker", "invalidate", "remove", "spoil", "fail_disk")
ENDINGS: Final = ("restart", "crash")


@dataclass(frozen=True)
class RemoteSwarm:
    """One remote and how it is used; ``capacity_chunks`` 0: others write there too."""

    capacity_chunks: int
    ttl_s: float
    absent_s: float
    mode: WriteMode
    connections: int
    deadline_s: float
    byte_codec: str | None


@dataclass(frozen=True)
class CacheSwarm:
    """One kind of machine, of tiers and of day."""

    workers: int
    dram_chunks: int
    directories: int
    disk_chunks: int
    disk_mode: WriteMode
    byte_codec: str | None
    policy: str
    admission: str
    remotes: tuple[RemoteSwarm, ...]
    namespaces: tuple[Namespace, ...]
    weights: dict[str, float]


def drawn_cache(draws: random.Random, *, every_step: bool) -> CacheSwarm:
    """Draw a machine; ``every_step`` gives it every tier and every kind of step."""
    few = (1.0,) if every_step else (0.0, 0.2, 1.0)
    weights = SERVING | PASSING
    weights |= {step: draws.choice(few) for step in (*MISHAPS, "fail_remote")}
    weights |= {step: draws.choice(few) / 4 for step in ENDINGS}
    modes = tuple(WriteMode)
    remotes = tuple(
        RemoteSwarm(
            capacity_chunks=draws.choice((0, 0, 12)),
            ttl_s=draws.choice((0.5, 60.0)),
            absent_s=draws.choice((0.05, 1.0)),
            mode=draws.choice(modes),
            connections=draws.choice((1, 2, 8)),
            deadline_s=draws.choice((0.1, 1.0)),
            byte_codec=draws.choice((None, "zstd")),
        )
        for _ in range(1 if every_step else draws.choice((0, 1, 1, 2)))
    )
    return CacheSwarm(
        workers=draws.choice((1, 2)),
        dram_chunks=draws.choice((4, 8, 16)),
        directories=1 if every_step else draws.choice((0, 1, 1, 2)),
        disk_chunks=draws.choice((8, 24)),
        disk_mode=draws.choice(modes),
        byte_codec=draws.choice((None, None, "zstd")),
        policy=draws.choice(("lru", "arc", "gittins")),
        admission=draws.choice(("everything", "everything", "second-touch", "learned")),
        remotes=remotes,
        namespaces=NAMESPACES[: draws.choice((1, 2))],
        weights=weights,
    )
