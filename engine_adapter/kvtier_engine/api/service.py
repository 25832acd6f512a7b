"""Runs calls: admission, generation, answer or stream, outcome. What every endpoint shares."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from kvtier.interfaces import Clock
from kvtier.obs.stats import Histogram
from kvtier_engine.api.admission import Admission
from kvtier_engine.api.calls import Call
from kvtier_engine.api.errors import (
    SERVER_ERROR,
    ApiError,
    bad_request,
    context_length_exceeded,
    internal_error,
    queue_full,
    unavailable,
)
from kvtier_engine.api.generation import Collected, SequenceFailedError, UsageTotals, merged
from kvtier_engine.api.held import Held, NothingHeld, until_held
from kvtier_engine.api.limits import WARM_WAIT_S
from kvtier_engine.api.ports import Generator
from kvtier_engine.api.streaming import (
    CLIENT_GONE,
    ClientGoneError,
    EventStream,
    sse,
    while_connected,
)
from kvtier_engine.refusal import (
    ContextLengthError,
    EngineStoppedError,
    QueueFullError,
    RequestRefusedError,
)

_log = logging.getLogger(__name__)


#: What requests are counted by.
ENDPOINTS: Final = ("completions", "chat", "warm", "unpin")


class Outcome(StrEnum):
    """How a request ended. ``refused``: it was at fault itself; ``aborted``: the server stopped."""

    OK = "ok"
    REFUSED = "refused"
    QUEUE_FULL = "queue_full"
    DISCONNECTED = "disconnected"
    ABORTED = "aborted"
    ERROR = "error"


_OUTCOME_OF_STATUS: Final = {
    HTTPStatus.TOO_MANY_REQUESTS: Outcome.QUEUE_FULL,
    HTTPStatus.SERVICE_UNAVAILABLE: Outcome.ABORTED,
}


@dataclass(slots=True)
class RequestCounters:
    """Requests by endpoint and outcome, and how long whole answers took."""

    outcomes: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    duration: Histogram = field(default_factory=Histogram)


class Service:
    """Owner of the request counters. One event loop's thread only."""

    def __init__(
        self, engine: Generator, admission: Admission, clock: Clock, held: Held | None = None
    ) -> None:
        """``held`` looks into the tiers, if there are any."""
        self._engine = engine
        self._held = held or NothingHeld()
        self._admission = admission
        self._clock = clock
        self._counters = RequestCounters()

    @property
    def counters(self) -> RequestCounters:
        """The running counts, to be read on the event loop's thread."""
        return self._counters

    def refused(self, endpoint: str) -> None:
        """Count a request that was not understood or not allowed."""
        self._counters.outcomes[endpoint, Outcome.REFUSED] += 1

    async def answer(self, call: Call, receive: Receive) -> Response:
        """Run a call. A client that hangs up ends its generation at once, streaming or not."""
        headers = {"x-request-id": call.call_id}
        if call.unpins:
            return JSONResponse(self._unpinned(call), headers=headers)
        if call.stream:
            return EventStream(self._events(call), headers)
        try:
            body = await while_connected(receive, self._collected(call))
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        return Response(json.dumps(body), media_type="application/json", headers=headers)

    async def _collected(self, call: Call) -> dict[str, Any]:
        choices = [Collected() for _ in call.requests]
        usage = UsageTotals(call.choices)
        with self._running(call):
            streams = [self._engine.generate(request) for request in call.requests]
            async with aclosing(merged(streams)) as deltas:
                async for index, delta in deltas:
                    choices[index].add(delta)
                    usage.note(index, delta.usage)
            if call.warms:
                deadline = self._clock.now() + WARM_WAIT_S
                await until_held(self._held, call.requests, self._clock, deadline)
        body = call.renderer.answer(choices, self._usage(call, usage))
        if call.warms:
            body["prompts"] = [
                {"prompt_tokens": len(each.prompt), "held_tokens": self._held.tokens(each)}
                for each in call.requests
            ]
        return body

    def _unpinned(self, call: Call) -> dict[str, Any]:
        """Unpin the prompts; nothing is computed, so it takes no place."""
        body = call.renderer.answer([], {})
        body["prompts"] = [
            {"prompt_tokens": len(each.prompt), "unpinned_tokens": self._held.unpin(each)}
            for each in call.requests
        ]
        self._counters.outcomes[call.endpoint, Outcome.OK] += 1
        return body

    async def _events(self, call: Call) -> AsyncGenerator[bytes, None]:
        usage = UsageTotals(call.choices)
        with self._running(call):
            streams = [self._engine.generate(request) for request in call.requests]
            async with aclosing(merged(streams)) as deltas:
                async for index, delta in deltas:
                    usage.note(index, delta.usage)
                    for event in call.renderer.events(index, delta):
                        yield event
            if call.include_usage:
                yield call.renderer.usage_event(self._usage(call, usage))
            yield sse("[DONE]")

    def _usage(self, call: Call, usage: UsageTotals) -> dict[str, Any]:
        """Return the usage; to who asked for pins it says how much of the prompts has one now."""
        report = usage.report(drop_output=call.drop_output)
        firsts = call.requests[:: call.choices]
        if any(each.features.pin_s for each in firsts):
            pinned = sum(self._held.pinned_tokens(each) for each in firsts)
            report["prompt_tokens_details"]["kvtier"]["pinned"] = pinned
        if call.requests[0].explain:
            report["kvtier"] = {"why": usage.why()}
        return report

    @contextmanager
    def _running(self, call: Call) -> Iterator[None]:
        """Hold the call's places and note its outcome; only ``ApiError`` comes out."""
        outcome = Outcome.DISCONNECTED
        started = self._clock.now()
        try:
            with self._admission.hold(len(call.requests)), _errors_boundary(call):
                yield
            outcome = Outcome.OK
            self._counters.duration.observe(self._clock.now() - started)
        except ApiError as error:
            server = error.kind == SERVER_ERROR
            default = Outcome.ERROR if server else Outcome.REFUSED
            outcome = _OUTCOME_OF_STATUS.get(error.status, default)
            raise
        finally:
            self._counters.outcomes[call.endpoint, outcome] += 1


@contextmanager
def _errors_boundary(call: Call) -> Iterator[None]:
    """Turn whatever an engine may raise into the ``ApiError`` that the client may see."""
    try:
        yield
    except ContextLengthError as error:
        raise context_length_exceeded(error.prompt_tokens, error.max_tokens, error.limit) from error
    except QueueFullError as error:
        raise queue_full() from error
    except EngineStoppedError as error:
        raise unavailable("The engine has stopped.", code="engine_stopped") from error
    except RequestRefusedError as error:
        raise bad_request(f"The engine refused the request: {error}.") from error
    except SequenceFailedError as error:
        if error.aborted:
            raise unavailable("The server gave this request up.", code="aborted") from error
        _log.error("%s failed: %s", call.call_id, error)
        raise internal_error(call.call_id) from error
    # A bug becomes an answer, whose id leads to the log.
    except Exception as error:
        _log.exception("%s failed", call.call_id)
        raise internal_error(call.call_id) from error
