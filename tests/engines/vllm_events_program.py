"""Run inside vLLM's own environment: serve prompts and print what its KV events say, as JSON.

Reads its orders as ``vllm_program`` does. Rounds are served with events published over ZeroMQ; what
each round's events were is printed beside its answers.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import vllm_program  # type: ignore[import-not-found]

#: How long events of a round may take: what is written to disk is told with a later step.
HEARD_S = 60


def hear(socket: Any, timeout_ms: int) -> list[dict[str, Any]]:
    """Return the events of the messages that come until none has come for so long."""
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    heard: list[dict[str, Any]] = []
    while socket.poll(timeout_ms):
        batch = msgspec.msgpack.decode(socket.recv_multipart()[-1], type=KVEventBatch)
        for event in batch.events:
            fields = msgspec.structs.asdict(event)
            parent = fields.get("parent_block_hash")
            heard.append(
                {
                    "kind": type(event).__name__,
                    "hashes": list(map(str, fields.get("block_hashes", ()))),
                    "parent": None if parent is None else str(parent),
                    "tokens": fields.get("token_ids"),
                    "block_size": fields.get("block_size"),
                    "medium": fields.get("medium"),
                    "owner": fields.get("ownership"),
                }
            )
    return heard


def subscribed(engine: Any, endpoint: str) -> Any:
    """Return a socket that hears what is published from now on."""
    import zmq

    socket: Any = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    end = time.monotonic() + HEARD_S
    tokens = 3
    while not socket.poll(20) and time.monotonic() < end:
        tokens += 1  # Another prompt each time, so that there is something to tell.
        vllm_program.serve(engine, [{"tokens": [tokens] * 40, "salt": ""}], 1)
    return socket


def main() -> None:
    """Do what was ordered, round by round."""
    from vllm.config.kv_events import KVEventsConfig

    asked: dict[str, Any] = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/events"
        asked["engine"]["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint
        )
        engine = vllm_program.open_engine(asked)
        socket = subscribed(engine, endpoint)
        rounds: list[dict[str, Any]] = []
        for orders in asked["rounds"]:
            if orders["do"] == "reset":
                rounds.append({"done": vllm_program.forget(engine, tiers=True)})
            else:
                rounds.append(vllm_program.serve(engine, orders["prompts"], orders["count"]))
            heard: list[dict[str, Any]] = []
            # The last of a round's events come with steps that follow it.
            for _ in range(2):
                vllm_program.serve(engine, [{"tokens": [1, 2, 3], "salt": ""}], 1)
                heard += hear(socket, 500)
            rounds[-1]["events"] = heard
        print("RESULT " + json.dumps(rounds), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
