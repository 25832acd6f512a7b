"""Commands to the nodes that hold their keys, over a few connections each, wherever they move."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Final, NamedTuple

from redis import exceptions as redis_errors

from kvtier.constants import MIB
from kvtier.errors import ConnectorUnavailableError
from kvtier_connectors.redis.errors import translated
from kvtier_connectors.redis.link import Link, ended_by
from kvtier_connectors.redis.replies import ASKING, Command, Reply
from kvtier_connectors.redis.settings import Node, Settings
from kvtier_connectors.redis.topology import Topology
from kvtier_connectors.threads import Halt

#: How often a command is sent on before its redirection is its answer.
ROUNDS_MAX: Final = 6
#: A connection more is worth its while for so much payload: with less of it, threads that wait for
#: one another cost what they gain.
LANE_BYTES: Final = 16 * MIB

_TIMEOUTS: Final = (redis_errors.TimeoutError, TimeoutError)
_LOST: Final = (
    redis_errors.ConnectionError,
    redis_errors.ReadOnlyError,
    redis_errors.ClusterDownError,
    OSError,
    *_TIMEOUTS,
)


class _Lane(NamedTuple):
    """Commands, by their number, for one connection to one node."""

    node: Node
    asking: bool
    numbers: list[int]


class Lanes:
    """Runs commands in threads that may wait. Connections are kept, at most a few idle per node."""

    def __init__(self, settings: Settings, topology: Topology, executor: Executor) -> None:
        """``executor`` may be the one whose threads call: none of them waits for another one."""
        self._settings = settings
        self._topology = topology
        self._executor = executor
        self._lock = threading.Lock()
        self._idle: defaultdict[Node, list[Link]] = defaultdict(list)
        self._closed = False

    def run(self, commands: Sequence[Command], halt: Halt) -> list[Reply]:
        """Return the answer to each command, or the error that it came to; in any order within.

        Follows MOVED and ASK, and asks for the servers anew where one is lost. A connection that
        breaks is made anew once. A command may be done twice: it has to bear that.
        """
        if not commands:
            return []
        replies: list[Reply] = [None] * len(commands)
        todo = list(range(len(commands)))
        asked: dict[int, Node] = {}
        may_refresh = not halt.is_set()
        for _ in range(ROUNDS_MAX):
            nodes = self._nodes(commands, todo) | asked
            if not all(nodes.values()) and may_refresh:
                may_refresh = False
                error = self._refresh()
                nodes = self._nodes(commands, todo)
                for n in todo:
                    replies[n] = error or redis_errors.ClusterDownError("no node holds this slot")
            lanes = self._lanes(commands, nodes, asked)
            self._run_lanes(lanes, commands, replies, halt)
            todo, lost = self._redirected(commands, nodes, replies, asked)
            if lost and may_refresh and not halt.is_set():
                may_refresh = False
                self._refresh()
                todo += [n for n in lost if self._topology.node_of(commands[n].slot) != nodes[n]]
            if not todo:
                break
        return replies

    def nodes(self) -> list[Node]:
        """Return the nodes that hold keys. Raises ``ConnectorError``."""
        error = None if self._topology.primaries() else self._refresh()
        if error is not None:
            raise translated(error)
        return self._topology.primaries()

    def close(self) -> None:
        """Close what is idle; what runs is finished and closed then."""
        with self._lock:
            self._closed = True
            links = [link for idle in self._idle.values() for link in idle]
            self._idle.clear()
        for link in links:
            link.close()

    def _nodes(self, commands: Sequence[Command], todo: Sequence[int]) -> dict[int, Node | None]:
        """Return the node of each command, as far as it is known."""
        known = {slot: self._topology.node_of(slot) for slot in {commands[n].slot for n in todo}}
        return {n: known[commands[n].slot] for n in todo}

    def _lanes(
        self, commands: Sequence[Command], nodes: dict[int, Node | None], asked: dict[int, Node]
    ) -> list[_Lane]:
        """Share the commands out: one lane per node, and more for much payload."""
        groups: defaultdict[tuple[Node, bool], list[int]] = defaultdict(list)
        for number, node in nodes.items():
            if node is not None:
                groups[node, number in asked].append(number)
        lanes = []
        for (node, asking), numbers in groups.items():
            payload_bytes = sum(commands[number].payload_bytes for number in numbers)
            count = max(1, min(self._settings.connections, payload_bytes // LANE_BYTES))
            lanes += [_Lane(node, asking, numbers[start::count]) for start in range(count)]
        return lanes

    def _run_lanes(
        self, lanes: Sequence[_Lane], commands: Sequence[Command], replies: list[Reply], halt: Halt
    ) -> None:
        """Run one lane here and each other one in a thread that is free, or here as well."""

        def run(lane: _Lane) -> None:
            answers = self._run_lane(lane, [commands[n] for n in lane.numbers], halt)
            for number, answer in zip(lane.numbers, answers, strict=True):
                replies[number] = answer

        started = [(lane, self._started(run, lane)) for lane in lanes[1:]]
        try:
            for lane in lanes[:1]:
                run(lane)
            for lane, job in started:
                # One that no thread has begun: whoever could may wait for us.
                if job is None or job.cancel():
                    run(lane)
        finally:
            left = [job for _, job in started if job is not None and not job.cancel()]
            # All of them, before one may raise: they fill the caller's buffers.
            wait(left)
            for job in left:
                job.result()

    def _started(self, function: Callable[[_Lane], None], lane: _Lane) -> Future[None] | None:
        try:
            return self._executor.submit(function, lane)
        except ConnectorUnavailableError:
            # No thread, or closed meanwhile: what runs is finished, in its own thread.
            return None

    def _run_lane(self, lane: _Lane, commands: Sequence[Command], halt: Halt) -> list[Reply]:
        """In a thread: return the answers, with the error for those that have none."""
        step = 2 if lane.asking else 1
        if lane.asking:
            commands = [each for command in commands for each in (ASKING, command)]
        replies: list[Reply] = []
        problem: Exception | None = None
        for new in (False, True):
            if halt.is_set():
                problem = redis_errors.ConnectionError("the call was given up")
                break
            try:
                link = self._borrow(lane.node, halt, new=new)
            except (redis_errors.RedisError, OSError) as error:
                problem = error.with_traceback(None)
                break
            # A pair of ASKING and its command is sent again as a pair.
            del replies[len(replies) // step * step :]
            problem = self._run_on(link, commands[len(replies) :], replies, halt)
            if problem is None or isinstance(problem, _TIMEOUTS) or halt.is_set():
                break
        missing = len(commands) - len(replies)
        replies += [problem] * missing
        return replies[step - 1 :: step]

    def _run_on(
        self, link: Link, commands: Sequence[Command], replies: list[Reply], halt: Halt
    ) -> Exception | None:
        """Run commands over one connection; return what made it useless, if anything did."""
        halt.when_set(link.abort)
        try:
            link.run(commands, replies.append)
        except (redis_errors.RedisError, OSError) as error:
            link.close()
            return error.with_traceback(None)
        finally:
            halt.forget(link.abort)
        self._give_back(link)
        return None

    def _borrow(self, node: Node, halt: Halt, *, new: bool) -> Link:
        stale: list[Link] = []
        with self._lock:
            idle = self._idle[node]
            if new:
                # What was idle beside a connection that broke is most likely broken too.
                stale, self._idle[node] = idle, []
            while not new and idle:
                link = idle.pop()
                if link.quiet:
                    return link
                stale.append(link)
        for link in stale:
            link.close()
        with ended_by(halt):
            return Link(self._settings, node)

    def _give_back(self, link: Link) -> None:
        with self._lock:
            idle = self._idle[link.node]
            if not self._closed and len(idle) < self._settings.connections:
                idle.append(link)
                return
        link.close()

    def _redirected(
        self,
        commands: Sequence[Command],
        nodes: dict[int, Node | None],
        replies: Sequence[Reply],
        asked: dict[int, Node],
    ) -> tuple[list[int], list[int]]:
        """Return the commands to send on, and those whose node is lost."""
        again, lost = [], []
        for number, node in nodes.items():
            reply = replies[number]
            asked.pop(number, None)
            if node is None or not isinstance(reply, Exception):
                continue
            if isinstance(reply, redis_errors.AskError):
                target = Node(reply.host or node.host, reply.port)
                if isinstance(reply, redis_errors.MovedError):
                    self._topology.moved(commands[number].slot, target)
                else:
                    asked[number] = target
                again.append(number)
            elif isinstance(reply, _LOST):
                lost.append(number)
        return again, lost

    def _refresh(self) -> Exception | None:
        """Ask for the servers; return why that did not work."""
        try:
            self._topology.refresh()
        except (redis_errors.RedisError, OSError) as error:
            return error.with_traceback(None)
        return None
