"""One client's connection: who it is, what it asks, and that nothing of it stays when it goes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine
from typing import Any, Final, Protocol

from kvtier.constants import (
    DAEMON_AT_ONCE_MAX,
    DAEMON_CONNECTION_BYTES_MAX,
    DAEMON_REQUEST_S_MAX,
    DAEMON_REQUESTS_MAX,
    WIRE_SMALL_BYTES,
)
from kvtier.interfaces import Clock
from kvtier.wire import (
    FROM_CLIENT,
    WIRE_VERSION,
    WIRE_VERSION_SOCKET,
    Contains,
    Data,
    Delete,
    Done,
    Found,
    Hello,
    Kind,
    Lease,
    Map,
    Message,
    Read,
    Refused,
    Release,
    Status,
    Take,
    Welcome,
    Write,
    version_of,
)
from kvtier.wire_fields import WireError, WireVersionError
from kvtier.wire_link import Link
from kvtier.wire_parser import Frame
from kvtier_server.budget import Budget
from kvtier_server.counters import Counters
from kvtier_server.credentials import certificate_name, peer_uid
from kvtier_server.objects import Fault, Filling, Objects
from kvtier_server.refusals import peer_name
from kvtier_server.shared import Shared, Sharing

_log = logging.getLogger("kvtier.daemon")

#: What strangers may say is little, and costs little.
_SAID_FIRST: Final = frozenset({Kind.HELLO})
_ASKED: Final = FROM_CLIENT - _SAID_FIRST


class Plane(Protocol):
    """What a session needs of the server that it belongs to."""

    @property
    def clock(self) -> Clock:
        """The cache's clock."""
        ...

    @property
    def budget(self) -> Budget:
        """Bytes under way of all sessions."""
        ...

    @property
    def counters(self) -> Counters:
        """What the server has done."""
        ...

    @property
    def sharing(self) -> Sharing | None:
        """What clients on Unix sockets share; None: no memory is shared."""
        ...

    def admit(self, token: bytes, uid: int | None, certificate: str | None) -> Objects | None:
        """Return the objects that a client may use; None: it may not come in."""
        ...

    def enter(self, session: Session) -> str:
        """Take note of a new session; return why it is not served, nothing if it is."""
        ...

    def turned_away(self, session: Session, why: str) -> None:
        """Take note that a session is not let in; ``why`` holds no secret."""
        ...

    def cut(self, session: Session, why: str) -> None:
        """Count, tell the operator and hang up: what is held for the session is let go."""
        ...

    def left(self, session: Session) -> None:
        """Take note that a session is over."""
        ...


class Session:
    """The ``Owner`` of one connection. Everything happens in the loop's thread."""

    def __init__(self, plane: Plane, *, unix: bool) -> None:
        self._plane = plane
        self._unix = unix
        self._objects: Objects | None = None
        self._version = WIRE_VERSION_SOCKET
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self._full = False
        self._writing: tuple[Write, Filling | Fault] | None = None
        self._shared: Shared | None = None
        self.link = Link(_SAID_FIRST, self)

    @property
    def welcomed(self) -> bool:
        """True once the client may ask."""
        return self._objects is not None

    @property
    def objects(self) -> Objects | None:
        """What the client may use; None until it is welcomed."""
        return self._objects

    @property
    def peer(self) -> str:
        """Who is at the other end, as an operator knows it."""
        told = self.link.transport.get_extra_info
        return peer_name(told("peername"), peer_uid(told("socket")) if self._unix else None)

    @property
    def idle(self) -> bool:
        """True while nothing is under way."""
        leases = self._shared is not None and self._shared.busy
        return not (self._tasks or self._writing is not None or leases)

    def overdue(self, now_s: float) -> bool:
        """Tell whether it holds a lease for longer than it may."""
        return self._shared is not None and self._shared.overdue(now_s)

    def opened(self) -> None:
        """See ``Owner``."""
        if refusal := self._plane.enter(self):
            self._refuse(Status.UNAVAILABLE, refusal)

    def arrived(self, frame: Frame) -> None:
        """See ``Owner``."""
        message = frame.message
        if self._shared is not None and self._serve_shared(self._shared, message):
            return
        if isinstance(message, Hello):
            self._welcome(message)
        elif version_of(message.kind) > self._version:
            self._refuse(Status.REFUSED, f"version {self._version} of the wire was agreed upon")
        else:
            self._serve(message, frame.payload_bytes)

    def payload_arrived(self) -> None:
        """See ``Owner``."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._begin(self.link.send(self._concluded(*writing)), 0)

    def broken(self, error: WireError) -> None:
        """See ``Owner``."""
        self._plane.counters.malformed += 1
        known = isinstance(error, WireVersionError)
        self._refuse(Status.REFUSED if known else Status.CORRUPT, str(error))

    def closed(self, error: Exception | None) -> None:
        """See ``Owner``: give back all that is held for this client."""
        del error
        for task in self._tasks:
            task.cancel()
        if self._writing is not None and isinstance(self._writing[1], Filling):
            self._writing[1].abort()
        self._writing = None
        if self._shared is not None:
            self._shared.end()
        self._plane.left(self)

    def refuse(self, text: str) -> None:
        """End the session from the server's side."""
        self._refuse(Status.UNAVAILABLE, text)

    def _refuse(self, status: Status, text: str) -> None:
        self.link.send_now(Refused(status, text[:200]))
        self.link.close()

    def _welcome(self, hello: Hello) -> None:
        sharing = self._plane.sharing if self._unix else None
        newest = WIRE_VERSION_SOCKET if sharing is None else WIRE_VERSION
        if not hello.version_min <= newest or hello.version_max < WIRE_VERSION_SOCKET:
            asked = f"{hello.version_min} .. {hello.version_max}"
            spoken = f"{WIRE_VERSION_SOCKET} .. {newest}"
            self._turn_away(f"versions {asked} of the wire; spoken here are {spoken}")
            return
        self._objects = self._plane.admit(hello.token, *self._peer())
        if self._objects is None:
            what = "the token is wrong" if hello.token else "a token is needed"
            self._turn_away(f"not allowed: {what}")
            return
        if sharing is not None and hello.version_max >= WIRE_VERSION:
            with contextlib.suppress(OSError):  # It is served by the socket.
                self._shared = Shared(sharing, self._objects, self.link, self._plane)
                self._version = WIRE_VERSION
        self.link.accept(_ASKED)
        self.link.send_now(Welcome(self._version))

    def _turn_away(self, why: str) -> None:
        self._plane.turned_away(self, why)
        self._refuse(Status.REFUSED, why)

    def _peer(self) -> tuple[int | None, str | None]:
        """Return the user at the other end, or the name that its certificate gives it."""
        told = self.link.transport.get_extra_info
        if self._unix:
            return peer_uid(told("socket")), None
        return None, certificate_name(told("peercert"))

    def _serve(self, message: Message, payload_bytes: int) -> None:
        objects = self._objects
        assert objects is not None, "served before it was welcomed"
        if isinstance(message, Write):
            # It holds up its own connection, and announces what may have no room at all.
            self._begin(self._write(objects, message, payload_bytes), 0)
        elif isinstance(message, Read):
            if not (self._prompt and self._read_at_once(objects, message)):
                self._begin(self._read(objects, message), message.nbytes)
        elif isinstance(message, Contains):
            self._begin(self._contains(objects, message), 0)
        elif isinstance(message, Delete):
            self._begin(self._delete(objects, message), 0)

    def _serve_shared(self, shared: Shared, message: Message) -> bool:
        """Serve what is asked of shared memory; False: it is something else."""
        if isinstance(message, Lease):
            if not (self._prompt and shared.lease_at_once(message)):
                self._begin(shared.lease(message, self._deadline()), 0)
        elif isinstance(message, Release):
            if not shared.release(message):
                self._refuse(Status.CORRUPT, "a lease that there is not")
        elif isinstance(message, Take):
            self._begin(shared.take(message, self._deadline()), message.nbytes)
        elif isinstance(message, Map):
            self._begin(shared.map(message), 0)
        else:
            return False
        return True

    @property
    def _prompt(self) -> bool:
        """True while an answer can be given at once, and others have had their turn."""
        return self.link.taken < DAEMON_AT_ONCE_MAX and self.link.clear

    def _read_at_once(self, objects: Objects, message: Read) -> bool:
        """Answer with a little of what lies in memory; False: that cannot be done at once."""
        if message.nbytes > WIRE_SMALL_BYTES:
            return False
        held = objects.hold(objects.address(message.key))
        if held is None:
            return False
        data = held.data[message.offset : message.offset + message.nbytes]
        self.link.put(Data(message.request, Status.OK, ""), payload=data)
        self._count_read(len(data))
        del data
        held.release()
        return True

    def _count_read(self, nbytes: int) -> None:
        self._plane.counters.reads += 1
        self._plane.counters.read_bytes += nbytes

    async def _contains(self, objects: Objects, message: Contains) -> None:
        self._plane.counters.lookups += len(message.keys)
        found = await objects.contains(message.keys, deadline=self._deadline())
        await self.link.send(Found(message.request, tuple(found)))

    async def _delete(self, objects: Objects, message: Delete) -> None:
        gone = await objects.delete(message.keys, deadline=self._deadline())
        status, text = (Status.OK, "") if gone else (Status.LATE, "some are being written or read")
        await self.link.send(Done(message.request, status, text))

    async def _read(self, objects: Objects, message: Read) -> None:
        held = await objects.read(message.key, deadline=self._deadline())
        counters = self._plane.counters
        if isinstance(held, Fault):
            counters.absent += held.status is Status.ABSENT
            await self.link.send(Data(message.request, held.status, held.text))
            return
        try:
            data = held.data[message.offset : message.offset + message.nbytes]
            await self.link.send(Data(message.request, Status.OK, ""), data)
            self._count_read(len(data))
            del data
        finally:
            held.release()

    async def _write(self, objects: Objects, message: Write, nbytes: int) -> None:
        """Make room, then let the payload come; without room it comes and goes nowhere."""
        filling = await objects.reserve(message.key, nbytes, deadline=self._deadline())
        if not nbytes:
            await self.link.send(self._concluded(message, filling))
            return
        self._writing = (message, filling)
        self.link.place(filling.data if isinstance(filling, Filling) else None)

    def _concluded(self, message: Write, outcome: Filling | Fault) -> Done:
        """Store what is whole, at once: a task may end before it begins. Return the answer."""
        counters = self._plane.counters
        if isinstance(outcome, Fault):
            counters.unwritten += 1
            return Done(message.request, outcome.status, outcome.text)
        counters.writes += 1
        counters.written_bytes += len(outcome.data)
        outcome.commit()
        return Done(message.request, Status.OK, "")

    def _deadline(self) -> float:
        return self._plane.clock.now() + DAEMON_REQUEST_S_MAX

    def _begin(self, work: Coroutine[Any, Any, None], nbytes: int) -> None:
        """Do some work beside the others; read no further while too much is under way."""
        self._bytes += nbytes
        self._plane.budget.take(self, nbytes)
        task = asyncio.get_running_loop().create_task(self._work_boundary(work))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, work, nbytes))
        self._brake()

    def _ended(
        self, work: Coroutine[Any, Any, None], nbytes: int, task: asyncio.Task[None]
    ) -> None:
        """Give back what a task has taken, which may have been cancelled before it began."""
        work.close()
        self._tasks.discard(task)
        self._bytes -= nbytes
        self._plane.budget.give(self, nbytes)
        self._brake()

    async def _work_boundary(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except ConnectionError:
            self.link.abort()
        except TimeoutError:
            self._plane.cut(self, "it takes no answers")
        # A bug ends this connection, and no other one.
        except Exception:
            _log.exception("a request failed")
            self.link.abort()

    def _brake(self) -> None:
        """Stop reading above this connection's limits; go on below them."""
        full = len(self._tasks) >= DAEMON_REQUESTS_MAX or self._bytes > DAEMON_CONNECTION_BYTES_MAX
        if full and not self._full:
            self._full = True
            self.link.pause()
        elif self._full and not full:
            self._full = False
            self.link.resume()
