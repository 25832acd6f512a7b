"""Each endpoint of the control plane asked as its clients get it wrong; and what is scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.lib.daemon import Daemon, daemon

OBJECTS = {"keys": ["00ff"]}
#: By method and path: the least body that is right, and the status that it is answered with.
RIGHT: dict[tuple[str, str], tuple[dict[str, Any] | None, int]] = {
    ("POST", "/v1/evict"): ({"objects": OBJECTS}, 200),
    ("POST", "/v1/pin"): ({"objects": OBJECTS, "seconds": 1}, 200),
    ("POST", "/v1/unpin"): ({"objects": OBJECTS}, 200),
    ("POST", "/v1/warm"): ({"objects": OBJECTS}, 200),
    ("POST", "/v1/invalidate"): ({"objects": OBJECTS}, 200),
    ("PUT", "/v1/quotas"): ({"quota_bytes": None}, 200),
    ("POST", "/v1/config"): (None, 200),
    ("POST", "/v1/verify"): (None, 202),
}
#: It stops the server: asked last.
LAST = ("POST", "/v1/drain")
WITH_BODY = [asked for asked, (body, _) in RIGHT.items() if body is not None]
WRONG_TYPES: tuple[Any, ...] = ([], "text", -1, {"a": 1}, True, [{}])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("endpoints")
    options = (f"--disk={folder}/disk", "--disk-bytes=64MiB", "--remote=memory://endpoints")
    with daemon(*options, listen=("127.0.0.1:0", f"unix:{folder}/socket")) as running:
        running.wait_until_ready()
        yield running
        assert running.ask(*LAST) == (202, {"draining": True})
        assert running.process.wait(60) == 0


def test_no_endpoint_is_left_out(running: Daemon) -> None:
    paths = running.get("/openapi.json")["paths"]
    told = {
        (method.upper(), path) for path, found in paths.items() for method in found.keys() - {"get"}
    }
    assert told == RIGHT.keys() | {LAST}


@pytest.mark.parametrize("asked", RIGHT)
def test_b106_the_least_that_is_right_is_done(running: Daemon, asked: tuple[str, str]) -> None:
    body, status = RIGHT[asked]
    assert running.ask(*asked, body)[0] == status


@pytest.mark.parametrize("asked", WITH_BODY)
def test_b106_what_is_wrong_is_told_and_never_breaks_it(
    running: Daemon, asked: tuple[str, str]
) -> None:
    """Nothing, no field, one more, one of another type: each is a 422 that says which."""
    right, _ = RIGHT[asked]
    assert right is not None
    wrong: list[Any] = [None, {}, [], "", 7, {**right, "more": 1}]
    for name in right:
        wrong.append({other: right[other] for other in right if other != name})
        wrong += [{**right, name: value} for value in WRONG_TYPES]
    wrong += [{**right, "objects": {**OBJECTS, "all": True}}] if "objects" in right else []
    for body in wrong:
        status, told = running.ask(*asked, body)
        assert status == 422, body
        assert told["error"]["type"] == "invalid"
        assert told["error"]["message"]
    assert running.get("/health")["status"] == "ok"


def test_b165_each_series_is_scraped_once(running: Daemon) -> None:
    seen = Counter(
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(running.get_text("/metrics"))
        for sample in family.samples
    )
    assert len(seen) > 50
    assert set(seen.values()) == {1}
