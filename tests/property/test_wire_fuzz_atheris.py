"""The wire under a search that is guided by coverage, where ``kvtier[fuzz]`` is installed."""

from __future__ import annotations

import importlib.util
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.soak_report import report
from tests.tidy.sources import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="needs atheris (kvtier[fuzz])"
)

SOAK_S_MAX = 120
#: A stream that takes longer hangs.
ONE_S_MAX = 10
MEMORY_MIB_MAX = 1024


def inherited_mib() -> int:
    """The peak that a child begins with: Linux hands the parent's on."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@pytest.mark.timeout(SOAK_S_MAX + 120)
def test_what_coverage_leads_to_breaks_nothing(
    tmp_path: Path, seed: int, scale: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = 2 if scale == 1 else min(SOAK_S_MAX, 6 * scale)
    options = (
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-timeout={ONE_S_MAX}",
        f"-rss_limit_mb={inherited_mib() + MEMORY_MIB_MAX}",
        "-max_len=70000",
        "-print_final_stats=1",
        f"-artifact_prefix={tmp_path}/found ",
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.lib.wire_atheris", tmp_path / "streams", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {each.name: each.read_bytes()[:1000].hex() for each in tmp_path.glob("found *")}
    assert done.returncode == 0, f"{found}\n{done.stderr[-4000:]}"
    assert not found
    match = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert match, done.stderr[-2000:]
    streams = int(match[1])
    with capsys.disabled():
        sys.stdout.write(f"\natheris: {streams} streams in {seconds} s\n")
    report("streams that coverage leads to", scale, seconds=seconds, streams=streams)
    assert streams > 0
