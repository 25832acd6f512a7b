"""Replay a trace against a policy and an admission, through the protocols that tiers use."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.interfaces import AdmissionPolicy, EvictionPolicy
from kvtier.sim.trace import HINTS, TURN_MAX, Trace
from kvtier.types import ChunkKey, Entry, Features

PolicyFactory = Callable[[int, Callable[[ChunkKey], bool]], EvictionPolicy]

# Replay tells how far it is after this many requests.
_STEP: Final = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """Per request: blocks of its prefix that were held, and those that it brought and left."""

    hits: array[int]
    kept: array[int]


def chunk_keys(count: int) -> list[ChunkKey]:
    """Return the keys of blocks ``0 .. count``, spread like those of a cache."""
    return [
        ChunkKey(hashlib.sha256(number.to_bytes(8, "little")).digest()) for number in range(count)
    ]


def replay(
    trace: Trace,
    hints: Sequence[int],
    make_policy: PolicyFactory,
    capacity: int,
    keys: Sequence[ChunkKey],
    on_progress: Callable[[int], None] = lambda _: None,
    admission: AdmissionPolicy | None = None,
) -> Outcome:
    """Return what a cache of ``capacity`` blocks with this policy would have hit.

    ``hints`` holds an index of ``HINTS`` per request. A request accesses its blocks from the last
    to the first, at one instant; a block that is not held is admitted and then touched.
    ``admission`` (None: everything) is offered what a request does not find, from the first to the
    last, and refuses what is not worth a write; blocks count one byte each there as well.
    ``on_progress`` is called now and then with the number of requests done since the last call.
    """
    policy = make_policy(capacity, lambda _: False)
    number_of = {key: number for number, key in enumerate(keys)}
    features = [[Features(turn, hint) for hint in HINTS] for turn in range(TURN_MAX + 1)]
    held = bytearray(trace.unique_count)
    hits, kept = array("i"), array("i")
    admit, touch, parents = policy.admit, policy.touch, trace.parents
    refused: set[ChunkKey] = set()
    for request, path in enumerate(trace.paths()):
        now = trace.times_s[request]
        feature = features[trace.turns[request]][hints[request]]
        missing = bytes([held[block] for block in path]).find(0)
        hit = len(path) if missing < 0 else missing
        hits.append(hit)
        if admission is not None and missing >= 0:
            missed = [
                Entry(keys[b], keys[parents[b]] if parents[b] >= 0 else None, 1, at, feature)
                for at, b in enumerate(path)
                if not held[b]
            ]
            refused = _refused(admission, missed, now)
        for at in range(len(path) - 1, -1, -1):
            block = path[at]
            key = keys[block]
            if not held[block]:
                if key in refused:
                    continue
                parent = parents[block]
                entry = Entry(key, keys[parent] if parent >= 0 else None, 1, at, feature)
                victims = admit(entry, now)
                if victims is None:
                    continue
                for victim in victims:
                    held[number_of[victim]] = 0
                    if admission is not None:
                        admission.left(victim, now)
                held[block] = 1
            elif admission is not None:
                admission.touch(key, now, feature)
            touch(key, now, feature)
        kept.append(max(0, sum([held[block] for block in path]) - hit))
        if request % _STEP == _STEP - 1:
            on_progress(_STEP)
    on_progress(trace.request_count % _STEP)
    return Outcome(hits, kept)


def _refused(admission: AdmissionPolicy, missed: Iterable[Entry], now: float) -> set[ChunkKey]:
    """Offer what a request brought, and return what is not written.

    As in a tier, a block whose parent is refused goes with it, whatever the admission says.
    """
    refused: set[ChunkKey] = set()
    for entry in missed:
        if not admission.offer(entry, now) or entry.parent in refused:
            refused.add(entry.key)
    return refused
