"""A trace in memory: requests as paths of blocks, in flat arrays, and how files become one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.types import Hint

HINTS: Final = tuple(Hint)
TURN_MAX: Final = 250
# Two branches make a common prefix, and the request at hand may add one.
_BRANCHES_COUNTED: Final = 3


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a file has it.

    ``blocks`` are the ids of its prefix blocks, each the name of a whole prefix. ``turn`` and
    ``hint`` are None where the file does not say.
    """

    time_s: float
    blocks: Sequence[int | str]
    prompt_tokens: int
    turn: int | None = None
    hint: Hint | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time.

    Request i's blocks are ``blocks[starts[i] : starts[i + 1]]``, dense numbers from 0 in order of
    first use. A block has one parent (-1: none), so numbers name whole prefixes. Times increase
    strictly. ``hints`` holds indices of ``HINTS``.
    """

    block_tokens: int
    times_s: array[float]
    starts: array[int]
    blocks: array[int]
    parents: array[int]
    prompt_tokens: array[int]
    turns: array[int]
    hints: array[int]

    @property
    def request_count(self) -> int:
        """Number of requests."""
        return len(self.times_s)

    @property
    def unique_count(self) -> int:
        """Number of different blocks."""
        return len(self.parents)

    def path(self, request: int) -> array[int]:
        """Return a request's blocks, first to last."""
        return self.blocks[self.starts[request] : self.starts[request + 1]]

    def paths(self) -> Iterator[array[int]]:
        """Iterate over the requests' blocks in order."""
        return map(self.path, range(self.request_count))


def make_trace(requests: Iterable[Request], block_tokens: int) -> Trace:
    """Number blocks, order requests by time, and tell sessions and their turns apart."""
    ordered = sorted(requests, key=lambda request: request.time_s)
    tree = _Tree()
    trace = Trace(
        block_tokens,
        array("d"),
        array("q", [0]),
        array("i"),
        tree.parents,
        array("q"),
        array("B"),
        array("B"),
    )
    time_s = float("-inf")
    for request in ordered:
        path = tree.path(request.blocks)
        # Requests of one instant are several accesses, so they are a microsecond apart.
        time_s = max(request.time_s, time_s + 1e-6)
        trace.times_s.append(time_s)
        trace.blocks.extend(path)
        trace.starts.append(len(trace.blocks))
        trace.prompt_tokens.append(request.prompt_tokens)
        turn = tree.note_request(path)
        trace.turns.append(min(request.turn or turn, TURN_MAX))
        trace.hints.append(HINTS.index(request.hint or Hint.NONE))
    return trace


class _Tree:
    """Numbers blocks by their place in the tree of prefixes, and follows sessions.

    A request continues a session when the deepest block that it shares with the past is where an
    earlier request ended: its last block or the one before, for the last one may have been partly
    filled. A block from which several branches go is a common prefix, and continues nothing.
    """

    def __init__(self) -> None:
        self.parents = array("i")
        self._numbers: dict[int | str, int] = {}
        self._moved: dict[tuple[int, int | str], int] = {}
        self._branches = bytearray()
        self._ended_turn = bytearray()
        self._known_count = 0

    def path(self, names: Sequence[int | str]) -> list[int]:
        """Return the numbers of blocks; one name below two parents is two blocks."""
        numbers, parents = self._numbers, self.parents
        self._known_count = len(parents)
        path: list[int] = []
        parent = -1
        for name in names:
            number = numbers.get(name)
            if number is None:
                number = numbers[name] = self._add(parent)
            elif parents[number] != parent:
                place = parent, name
                number = self._moved.get(place)
                if number is None:
                    number = self._moved[place] = self._add(parent)
            path.append(number)
            parent = number
        return path

    def note_request(self, path: list[int]) -> int:
        """Return the turn of the request whose path was asked for last, and note its end."""
        ended = self._ended_turn
        turn = 1
        new = next((i for i, block in enumerate(path) if block >= self._known_count), len(path))
        for at in range(new - 1, max(new - 3, -1), -1):
            own_branch = at == new - 1 and new < len(path)
            if ended[path[at]] and self._branches[path[at]] - own_branch < 2:
                turn = min(ended[path[at]] + 1, TURN_MAX)
                break
        for block in path[-2:]:
            ended[block] = max(ended[block], turn)
        return turn

    def _add(self, parent: int) -> int:
        number = len(self.parents)
        self.parents.append(parent)
        self._branches.append(0)
        self._ended_turn.append(0)
        if parent >= 0 and self._branches[parent] < _BRANCHES_COUNTED:
            self._branches[parent] += 1
        return number
