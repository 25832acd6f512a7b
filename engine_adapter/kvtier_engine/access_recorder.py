"""The engine's access log: noted on its thread, hashed and written on another."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvtier.cache.sequence import Sequence
from kvtier.constants import CLOSE_DEADLINE_S_DEFAULT
from kvtier.keys import namespace_digest
from kvtier.obs.access_log import AccessLog, kept_salt
from kvtier.types import Namespace, Tier
from kvtier_engine.request import Request
from kvtier_engine.types import GenerateRequest

_log = logging.getLogger(__name__)

#: Requests noted and not written yet; a file system that is slower loses those beyond.
REQUESTS_QUEUED_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class _Admitted:
    time_s: float
    spec: GenerateRequest
    hit_tokens: Mapping[Tier, int]


class AccessRecorder:
    """Takes admitted requests and has a thread of its own log them.

    Whatever becomes of the log, ``note`` returns at once and no request is any the worse. A log
    that a fault has ended gets no further line, and one warning says so.
    """

    def __init__(
        self, log: AccessLog, namespace: Namespace, *, wall: Callable[[], float] = time.time
    ) -> None:
        """Take over ``log``. ``namespace`` is the engine's own; a request's salt is put in."""
        self._access_log = log
        self._namespace = namespace
        self._wall = wall
        self._changed = threading.Condition()
        self._queue: deque[_Admitted] = deque()
        self._closed = False
        self._left_out = 0
        # A daemon: a file system that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run_boundary, name="kvtier-access-log", daemon=True
        )

    def start(self) -> None:
        """Start the thread; what was noted before is written then."""
        self._thread.start()

    def note(self, request: Request) -> None:
        """Take in a request that has just begun to run for the first time. Engine's thread."""
        admitted = _Admitted(self._wall(), request.spec, dict(request.cached_by_tier or {}))
        with self._changed:
            if self._closed or len(self._queue) >= REQUESTS_QUEUED_MAX:
                self._left_out += 1
                return
            self._queue.append(admitted)
            self._changed.notify_all()

    def close(self, timeout_s: float = CLOSE_DEADLINE_S_DEFAULT) -> None:
        """Write what was noted, as far as time allows, and close the log. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        else:
            self._access_log.close()
        if self._left_out and self._access_log.fault is None:
            _log.warning("the access log lacks %d requests", self._left_out)
            self._left_out = 0

    def _run_boundary(self) -> None:
        """Be the thread. What arrives here is a bug of the recorder: the log ends."""
        try:
            while self._access_log.fault is None and self._wait():
                self._write(self._queue.popleft())
        # The log is worth less than the requests.
        except Exception:
            _log.exception("the access log has ended")
        if self._access_log.fault is not None:
            _log.warning("the access log has ended: %s", self._access_log.fault)
        self._access_log.close()
        with self._changed:
            self._closed = True
            self._queue.clear()

    def _wait(self) -> bool:
        """Sleep until there is something to write; False when there never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return bool(self._queue)

    def _write(self, admitted: _Admitted) -> None:
        spec = admitted.spec
        namespace = replace(self._namespace, tenant_salt=spec.cache_salt)
        sequence = Sequence(namespace, namespace_digest(namespace))
        sequence.append(spec.prompt)
        self._access_log.write(
            admitted.time_s,
            sequence.chunk_keys,
            chunk_tokens=sequence.chunk_tokens,
            prompt_tokens=len(spec.prompt),
            hit_tokens=admitted.hit_tokens,
            features=spec.features,
        )


def open_recorder(path: Path, namespace: Namespace) -> AccessRecorder:
    """Return a recorder into a file; its salt stands beside it. Raises ``ConfigError``."""
    salt = kept_salt(path.with_name(path.name + ".salt"))
    return AccessRecorder(AccessLog(path, salt), namespace)
