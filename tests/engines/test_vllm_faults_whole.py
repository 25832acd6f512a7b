"""The bench that puts the same faults under KVTier and under vLLM's own tiers."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.lib.vllm_runs import ROOT, RUN_S

pytestmark = pytest.mark.timeout(3000)


def test_noise_in_files_changes_answers_of_vllms_own_tiers_and_none_of_ours() -> None:
    command = [sys.executable, "bench/engines/faults.py", "--smoke"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3 * RUN_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ours, theirs = done.stdout.splitlines()[-1].split(" | ")[1:]
    assert re.fullmatch(r"same tokens; \d+ hits", ours)
    assert re.match(r"\*\*\d+ of 10 answers wrong", theirs)
