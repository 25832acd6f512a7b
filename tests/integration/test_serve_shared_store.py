"""Two servers beside each other over one store: what one has computed the other one loads."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.lib.daemon import daemon
from tests.lib.prompts import tale
from tests.lib.redis_servers import redis_server
from tests.lib.reference import Tally
from tests.lib.s3_servers import CREDENTIALS, seaweed, url_of
from tests.lib.server import LOAD_ALWAYS, idle, starting

CHUNK = 64
PREFIX_TOKENS = 260
#: On two busy cores a minute and a half go by with it: over one store, and in a soak over all.
LONG_PREFIX_TOKENS = 1800
NEW_TOKENS = 8


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    with redis_server(folder) as server:
        yield server.url


@contextmanager
def s3(folder: Path) -> Iterator[str]:
    with seaweed(folder) as server:
        yield url_of(server.endpoint, "shared")


@contextmanager
def cache_server(_: Path) -> Iterator[str]:
    with daemon("--dram=512MiB") as server:
        yield server.urls[0]
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("store", "prefix_tokens"),
    [(cache_server, LONG_PREFIX_TOKENS), (redis, PREFIX_TOKENS), (s3, PREFIX_TOKENS)],
)
def test_a_prefix_that_only_one_server_has_computed_is_loaded_by_the_other(
    tmp_path: Path,
    rng: random.Random,
    scale: int,
    store: Callable[[Path], AbstractContextManager[str]],
    prefix_tokens: int,
) -> None:
    prefix = tale(rng, prefix_tokens if scale == 1 else LONG_PREFIX_TOKENS)
    shared_tokens = len(prefix) // CHUNK * CHUNK
    options = [f"--chunk-tokens={CHUNK}", "--dram=256MiB"]
    first_prompt, second_prompt = prefix + tale(rng, 20), prefix + tale(rng, 30)
    environment = {**os.environ, **CREDENTIALS}
    with store(tmp_path) as url:
        options += [f"--remote={url}", LOAD_ALWAYS]
        with (
            starting(*options, environment=environment) as first,
            starting(*options, environment=environment) as second,
        ):
            for server in (first, second):
                server.wait_for_line("  curl ")
                server.wait_for_tier("remote", "ok")
            cold = first.ask(first_prompt, NEW_TOKENS)
            first.wait_until(idle)
            same, other = (second.ask(text, NEW_TOKENS) for text in (first_prompt, second_prompt))
            assert second.tier("remote")["state"] == "ok", second.health()
            assert first.stop() == second.stop() == 0
    assert sum(cold.cached.values()) == 0
    assert same.cached["remote"] >= shared_tokens
    assert sum(other.cached.values()) >= shared_tokens
    assert same.text == cold.text
    tally = Tally()
    tally.check(second_prompt, other.tokens)
    tally.assert_few_ties()
