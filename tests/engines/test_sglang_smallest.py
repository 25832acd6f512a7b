"""SGLang's own factory loads the back end; its injected failures and delays lose no byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lib.peers import PATIENT, peer

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "engines" / "sglang_program.py"
RUN_S = 480.0
PAGES = 16
#: Where in a file the bytes of a page begin; behind them it is filled up to whole blocks.
PAYLOAD_START = 4096

pytestmark = pytest.mark.timeout(1000)


def run(folder: Path, *do: str, faults: dict[str, str] | None = None, **orders: Any) -> list[Any]:
    """Have SGLang load the back end and do something with it; return what came of each."""
    options = {
        "dram": "64MiB",
        "disk": str(folder / "kv"),
        "disk_bytes": "1GiB",
        "weights_id": "weights 1",
        **PATIENT,
        **orders.pop("options", {}),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(peer("sglang"))],
        input=json.dumps({"interface_v1": 1, **orders, "options": options, "do": do}),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env={**os.environ, **(faults or {})},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert (done.returncode, len(lines)) == (0, 1), done.stderr[-4000:]
    found: list[Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def test_sglangs_factory_loads_it_and_pages_come_back(tmp_path: Path) -> None:
    zero_copy, several = run(tmp_path, "zero_copy", "several_pools")
    assert zero_copy == {
        "stored": [True] * PAGES,
        "prefix": PAGES,
        "loaded": [True] * PAGES,
        "right": True,
        "absent": [False],
    }
    assert several == {
        "before": [0, {"kv": 4}, []],
        "after": [3, {"kv": 4, "mamba": 3}, [3]],
        "stored": {"mamba": [True]},
        "loaded": {"mamba": [True]},
        "right": True,
    }
    (flat,) = run(tmp_path, "flat", interface_v1=0)
    assert flat == {
        "stored": True,
        "prefix": 3,
        "right": [True] * 3,
        "absent": True,
        "one": [True, True],
    }


def test_after_a_restart_pages_come_from_disk_and_corrupt_ones_do_not(tmp_path: Path) -> None:
    run(tmp_path, "zero_copy")
    (again,) = run(tmp_path, "load")
    assert (again["loaded"], again["right"]) == ([True] * PAGES, True)
    for number, path in enumerate(sorted((tmp_path / "kv").rglob("*.kvs"))):
        data = bytearray(path.read_bytes())
        data[PAYLOAD_START + 100 * number] ^= 1
        path.write_bytes(data[:4096] if number % 3 == 0 else data)
    (spoilt, stored) = run(tmp_path, "load", "zero_copy")
    assert (spoilt["loaded"], spoilt["right"]) == ([False] * PAGES, True)
    assert (stored["loaded"], stored["right"]) == ([True] * PAGES, True)
    (cleared,) = run(tmp_path, "clear")
    assert cleared == {"prefix": 0}


@pytest.mark.parametrize(
    ("what", "interface_v1"),
    [("under_faults", 1), ("v2_under_faults", 1), ("flat_under_faults", 0)],
)
def test_sglangs_injected_failures_and_delays_lose_no_byte(
    tmp_path: Path, what: str, interface_v1: int
) -> None:
    faults = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02",
    }
    (found,) = run(tmp_path, what, faults=faults, interface_v1=interface_v1)
    assert found["injector"] == "HiCacheStorageFailureInjector"
    assert found["wrong"] == 0
    # Each call fails at three in ten: some of everything came through, and not all.
    most = {
        "under_faults": {"stored": 640, "prefix": 640, "loaded": 640},
        "v2_under_faults": {"stored": 1280, "prefix": 40, "loaded": 1280},
        "flat_under_faults": {"stored": 40, "prefix": 640, "loaded": 640},
    }[what]
    for name, count in most.items():
        assert 0 < found[name] < count, found
