"""A client that hangs up ends its generation: streaming, not streaming, queued, in parts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.lib.api_fakes import ScriptedEngine
from tests.lib.api_harness import MODEL, Api, RawCall

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)]
)
async def test_b95_a_client_gone_while_queued_frees_everything(
    stream: bool, n: int, path: str, fields: dict[str, Any]
) -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    api = Api(engine)
    body = {"model": MODEL, **fields, "stream": stream, "n": n, "max_tokens": 1000}
    call = RawCall(api.app, path, body)
    running = asyncio.create_task(call.run())
    await engine.started.wait()
    call.hang_up.set()
    await running
    assert not engine.running
    assert engine.made == 0
    assert api.admission.sequences == 0
    endpoint = "completions" if path == "/v1/completions" else "chat"
    assert api.service.counters.outcomes == {(endpoint, "disconnected"): 1}


@pytest.mark.parametrize("n", [1, 3])
async def test_b95_a_client_gone_in_mid_stream_frees_everything(n: int) -> None:
    engine = ScriptedEngine(paced=True)
    api = Api(engine)
    body = {"model": MODEL, "prompt": "x", "stream": True, "n": n, "max_tokens": 1000}
    call = RawCall(api.app, "/v1/completions", body)
    running = asyncio.create_task(call.run())
    await call.sent_text(b'"text":"b"')
    call.hang_up.set()
    await running
    assert not engine.running
    assert engine.made < 50
    assert api.admission.sequences == 0


async def test_b95_a_client_gone_while_a_whole_answer_is_made() -> None:
    engine = ScriptedEngine(paced=True)
    api = Api(engine)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1000}
    call = RawCall(api.app, "/v1/completions", body)
    running = asyncio.create_task(call.run())
    await engine.started.wait()
    call.hang_up.set()
    await running
    assert not engine.running
    assert engine.made < 50


async def test_a_server_that_cancels_an_answer_frees_everything() -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    api = Api(engine)
    for stream in (False, True):
        engine.started.clear()
        body = {"model": MODEL, "prompt": "x", "stream": stream, "n": 2}
        running = asyncio.create_task(RawCall(api.app, "/v1/completions", body).run())
        await engine.started.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
        assert not engine.running
        assert api.admission.sequences == 0


async def test_a_client_gone_before_its_body_was_sent_is_not_answered() -> None:
    engine = ScriptedEngine()
    call = RawCall(Api(engine).app, "/v1/completions", None)
    call.hang_up.set()
    await call.run()
    assert not engine.requests


async def test_other_requests_go_on_when_one_client_leaves() -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    api = Api(engine)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    leaving = RawCall(api.app, "/v1/completions", body)
    staying = RawCall(api.app, "/v1/completions", body)
    tasks = [asyncio.create_task(call.run()) for call in (leaving, staying)]
    await engine.started.wait()
    leaving.hang_up.set()
    await tasks[0]
    assert engine.gate is not None
    engine.gate.set()
    await tasks[1]
    assert b'"text": "ab"' in staying.answer
