"""The control plane against its own description: whatever is sent, the answer is one that it names.

The program runs, and Schemathesis makes up requests of every kind that the description allows and
of some that it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from schemathesis import BaseSchema, Case, GenerationMode, openapi
from schemathesis.core.result import Ok

from tests.lib.daemon import Daemon, daemon

TOKEN = "secret-of-the-operator"
EXAMPLES = 30
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("control")
    (folder / "operator").write_text(TOKEN)
    (folder / "tokens").write_text("ann secret-of-ann\nben secret-of-ben\n")
    options = (
        f"--admin-token-file={folder}/operator",
        f"--token-file={folder}/tokens",
        f"--disk={folder}/disk",
        "--disk-bytes=64MiB",
    )
    with daemon(*options) as running:
        running.wait_until_ready()
        yield running
        assert running.stop() == 0
        assert "secret" not in "\n".join(running.log)


@pytest.fixture(scope="module")
def schema(running: Daemon) -> BaseSchema:
    described = openapi.from_url(f"{running.http}/openapi.json")
    # Of what stops the server there is a test of its own.
    return described.exclude(path="/v1/drain")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_answer_is_one_that_is_described(schema: BaseSchema, mode: GenerationMode) -> None:
    tried = 0
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and operation.body.items == []:
            continue
        tried += 1

        @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def hold(case: Case[Any]) -> None:
            case.call_and_validate(headers=HEADERS)

        hold()
    assert tried >= (16 if mode is GenerationMode.POSITIVE else 6)
