"""``kvtier verify``: every kind of damage is found by a full read, and mended on request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtier import Cache, CacheConfig, DiskConfig, GroupKind, KVGroup, KVLayout, Namespace
from kvtier.cli.main import app
from kvtier.codecs.calibration import Calibration, Rotary
from kvtier.codecs.calibration_store import FOLDER, CalibrationStore
from kvtier.constants import MIB
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.verify import Problem, Verdict, Verifier
from kvtier.types import ChunkKey

CHUNKS = 4
GROUP = KVGroup(GroupKind.FULL, (0, 1, 2), kv_heads=2, k_dim=8, v_dim=8, dtype="float32")
NAMESPACE = Namespace("weights", KVLayout((GROUP,), chunk_tokens=16, section_layers=1))


def opened(root: Path, *more: Path) -> Cache:
    disk = DiskConfig(str(root), 8 * MIB, more_paths=tuple(map(str, more)))
    return Cache(CacheConfig(dram_bytes=MIB, slab_bytes=MIB, disk=disk))


def run_once(root: Path) -> Cache:
    """Store one sequence of chunks and return the cache, which has written all of it."""
    cache = opened(root)
    engine = EngineDouble(cache, NAMESPACE, block_tokens=4)
    prompt = engine.sequence(range(16 * CHUNKS))
    engine.match(prompt)
    engine.store(prompt)
    engine.close()
    return cache


def spread(one: Path, other: Path) -> list[ChunkKey]:
    """Store a sequence that goes on until both directories have some of it; return its keys.

    A directory takes none before it was swept, and of those that were the one with most room does.
    """
    cache = opened(one, other)
    engine = EngineDouble(cache, NAMESPACE, block_tokens=4)
    prompt = engine.sequence(range(16))
    engine.match(prompt)
    while True:
        chunks = len(prompt.chunk_keys)
        assert engine.store(prompt, range(chunks - 1, chunks))
        wait_until(lambda: not cache.stats().writes_queued, "a chunk is not written")
        if shards(one) and shards(other):
            break
        prompt.append(list(range(16)))
    engine.close()
    cache.close()
    return list(prompt.chunk_keys)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run_once(tmp_path / "tier").close()
    return tmp_path / "tier"


def shards(root: Path) -> list[Path]:
    """Files from the first chunk of the sequence to the last."""
    return sorted((root / "shards").rglob("*.kvs"), key=lambda path: path.name.split("-")[1])


def inspect(*roots: Path) -> Verdict:
    verifier = Verifier([str(root) for root in roots], LocalFiles())
    steps = list(verifier.run())
    assert not steps or steps[-1][0] == steps[-1][1]
    return verifier.verdict


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def problems(verdict: Verdict) -> dict[str, Problem]:
    return {Path(finding.path).name: finding.problem for finding in verdict.findings}


def test_a_sound_tier_is_read_whole(root: Path) -> None:
    verdict = inspect(root)
    assert (verdict.sound_shards, verdict.findings) == (CHUNKS, ())
    assert verdict.nbytes == sum(path.stat().st_size for path in shards(root))


@pytest.mark.parametrize("section", range(3))
def test_b78_a_flipped_bit_of_any_section_is_found(root: Path, section: int) -> None:
    last = shards(root)[-1]
    flip(last, 4096 * (1 + section) + 100)
    assert problems(inspect(root)) == {last.name: Problem.CORRUPT}


def test_b66_torn_and_swapped_and_foreign_files_are_found(root: Path) -> None:
    first, second, third, last = shards(root)
    last.write_bytes(last.read_bytes()[:-4096])
    assert problems(inspect(root)) == {last.name: Problem.CORRUPT}
    shutil.copy(first, last)
    assert problems(inspect(root)) == {last.name: Problem.CORRUPT}
    (last.parent / "nonsense").write_bytes(b"")
    assert problems(inspect(root))["nonsense"] is Problem.CORRUPT
    assert inspect(root).sound_shards == len([first, second, third])


def test_what_no_lookup_can_reach_is_an_orphan(root: Path) -> None:
    first, second, third, last = shards(root)
    second.unlink()
    assert problems(inspect(root)) == {third.name: Problem.ORPHAN, last.name: Problem.ORPHAN}
    assert inspect(root).sound_shards == len([first])


def test_leftovers_and_twins_are_useless(root: Path) -> None:
    first = shards(root)[0]
    key, generation = first.stem.split("-")
    older = first.with_name(f"{key}-{int(generation, 16) - 1:016x}.kvs")
    shutil.copy(first, older)
    (root / "incoming" / "half").write_bytes(b"half")
    assert problems(inspect(root)) == {older.name: Problem.TWIN, "half": Problem.LEFTOVER}
    assert inspect(root).sound_shards == CHUNKS


def test_the_command_tells_mends_and_then_finds_nothing(root: Path) -> None:
    first, second, third, last = shards(root)
    flip(second, 5000)
    (root / "incoming" / "half").write_bytes(b"half")
    runner = CliRunner()
    told = runner.invoke(app, ["verify", str(root)])
    assert told.exit_code == 1
    assert "corrupt" in told.stdout
    assert "leftover" in told.stdout
    mended = runner.invoke(app, ["verify", str(root), "--repair", "--json"])
    assert mended.exit_code == 0
    assert len(json.loads(mended.stdout)["findings"]) == len(["corrupt", "half", "two orphans"]) + 1
    clean = runner.invoke(app, ["verify", str(root), "--json"])
    report = json.loads(clean.stdout)
    assert clean.exit_code == 0
    kept = {finding["problem"] for finding in report["findings"]}
    assert (kept, report["sound_shards"], report["quarantined_files"]) == ({"orphan"}, 1, 1)
    assert shards(root) == [first, third, last], "of use again when the second is stored again"
    assert (root / "quarantine" / second.name).exists()
    cache = run_once(root)  # What was mended is written anew.
    cache.close()
    assert inspect(root).sound_shards == CHUNKS


def test_a_directory_in_use_is_read_but_not_repaired(tmp_path: Path) -> None:
    cache = run_once(tmp_path / "tier")
    try:
        inspect(tmp_path / "tier")
        result = CliRunner().invoke(app, ["verify", str(tmp_path / "tier"), "--repair"])
        assert isinstance(result.exception, TierUnavailableError)
        assert "in use by process" in str(result.exception)
    finally:
        cache.close()


def test_what_is_no_tier_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "no folder 'shards'" in str(result.exception)


def test_the_directories_of_a_tier_are_read_together(tmp_path: Path) -> None:
    one, other = roots = (tmp_path / "one", tmp_path / "other")
    keys = spread(*roots)
    verdict = inspect(*roots)
    assert (verdict.sound_shards, verdict.findings) == (len(keys), ())
    alone = problems(inspect(one)) | problems(inspect(other))
    assert Problem.ORPHAN in alone.values()  # Without what lies above.
    every = shards(one) + shards(other)
    (last,) = (path for path in every if path.name.startswith(keys[-1].hex()))
    flip(last, 5000)
    command = ["verify", str(one), str(other)]
    assert CliRunner().invoke(app, command).exit_code == 1
    assert CliRunner().invoke(app, [*command, "--repair"]).exit_code == 0
    assert (last.parents[2] / "quarantine" / last.name).exists()
    verdict = inspect(*roots)
    assert (verdict.sound_shards, verdict.findings) == (len(keys) - 1, ())


def test_of_several_directories_in_use_none_is_repaired(tmp_path: Path) -> None:
    idle, busy = tmp_path / "idle", tmp_path / "busy"
    run_once(idle).close()
    cache = run_once(busy)
    try:
        result = CliRunner().invoke(app, ["verify", str(idle), str(busy), "--repair"])
        assert isinstance(result.exception, TierUnavailableError)
    finally:
        cache.close()
    run_once(idle).close()  # It was let go again.


def test_what_a_killed_writer_leaves_is_told_and_is_no_fault(root: Path) -> None:
    (root / "incoming" / "half").write_bytes(b"half")
    told = CliRunner().invoke(app, ["verify", str(root)])
    assert told.exit_code == 0
    assert "leftover" in told.stdout
    run_once(root).close()  # Goes with the next open.
    assert inspect(root).findings == ()


def test_an_older_file_in_another_directory_is_a_twin(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    run_once(one).close()
    run_once(other).close()
    verdict = inspect(one, other)
    assert verdict.sound_shards == CHUNKS
    assert set(problems(verdict)) == {path.name for path in shards(one)}
    assert set(problems(verdict).values()) == {Problem.TWIN}


def calibrated(root: Path) -> tuple[Path, Path]:
    """Keep a calibration in a tier; return the files of its bytes and of the pointer to them."""
    mean = np.ones((3, 2, 8), np.float32)
    calibration = Calibration(NAMESPACE.layout, (mean,), (Rotary((1.0, 0.5)),))
    CalibrationStore(root / FOLDER).offer(NAMESPACE, "int4", calibration)
    (pointer,) = (root / FOLDER).glob("of-*")
    return root / FOLDER / calibration.digest, pointer


@pytest.mark.parametrize("damage", ["object", "pointer", "lost"])
def test_damaged_calibrations_are_told_and_set_aside(root: Path, damage: str) -> None:
    content, pointer = calibrated(root)
    command = ["verify", str(root), "--json"]
    assert CliRunner().invoke(app, command).exit_code == 0
    if damage == "lost":
        content.unlink()
    else:
        flip(content if damage == "object" else pointer, 3)
    told = CliRunner().invoke(app, command)
    findings = json.loads(told.stdout)["findings"]
    assert told.exit_code == 1
    assert {each["problem"] for each in findings} == {"calibration"}
    names = {Path(each["path"]).name for each in findings}
    assert names == ({content.name, pointer.name} if damage == "object" else {pointer.name})
    index = sorted((root / "index").iterdir())
    assert CliRunner().invoke(app, [*command, "--repair"]).exit_code == 0
    assert not pointer.exists()
    assert sorted((root / "index").iterdir()) == index, "it tells of shards alone"
    assert CliRunner().invoke(app, command).exit_code == 0
    calibrated(root)
    assert CliRunner().invoke(app, command).exit_code == 0, "a new one takes its place"
