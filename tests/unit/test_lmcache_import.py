"""What LMCache kept in a folder is taken over whole, or left out for a reason that is told."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.cli.main import app
from kvtier.errors import ConfigError, DeadlineError
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier_adapters.lmcache import migration
from kvtier_adapters.lmcache.files import FileKey
from kvtier_adapters.lmcache.limits import IMPORT_BATCH_BYTES, IMPORT_FILES_MAX, IMPORT_WAIT_S
from kvtier_adapters.lmcache.migration import ImportReport, import_folder
from kvtier_adapters.lmcache.naming import L2_SCHEME, SEAL_BYTES, object_name, seal
from kvtier_adapters.payloads.options import PlugOptions
from kvtier_adapters.payloads.store import PlugStore
from tests.lib.keyed_setup import payload
from tests.lib.plug_setup import PlugSetup, plug_setup

LAYOUT = "bfloat16[2,4,16,32]"
NBYTES = 2 * 2 * 4 * 16 * 32


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[PlugSetup]:
    with plug_setup(tmp_path) as setup:
        yield setup


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "lmcache"
    folder.mkdir()
    return folder


def file_name(number: int, salt: str = "") -> str:
    end = f"@{salt}" if salt else ""
    return f"org-SEP-model@0x01000100@0@{number:064x}{end}.data"


def key_of(number: int, salt: str = "") -> FileKey:
    return FileKey(number.to_bytes(32, "big"), "org/model", 0x01000100, 0, salt)


def keep(folder: Path, *numbers: int, salt: str = "") -> None:
    for number in numbers:
        path = folder / file_name(number, salt)
        path.write_bytes(payload(b"%d" % number, NBYTES))
        os.utime(path, ns=(number * 10**9, number * 10**9))


def imported(
    setup: PlugSetup, folder: Path, **options: int
) -> tuple[ImportReport, list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []
    store = setup.store("lmcache", **options)
    try:
        return import_folder(folder, store, LAYOUT, lambda *at: told.append(at)), told
    finally:
        store.close()


def loaded(setup: PlugSetup, *keys: FileKey) -> list[bool]:
    """Load as the L2 adapter does, in a process of later."""
    store = setup.store("lmcache")
    into = [(bytearray(NBYTES), bytearray(SEAL_BYTES)) for _ in keys]
    names = [object_name(key) for key in keys]
    filled = store.run(store.face(L2_SCHEME).get(names, into))
    store.close()
    for key, (data, mark), there in zip(keys, into, filled, strict=True):
        if there:
            assert data == payload(b"%d" % int.from_bytes(key.chunk_hash, "big"), NBYTES)
            assert mark == seal(NBYTES, LAYOUT)
    return filled


def test_every_object_of_the_layout_is_found_afterwards(setup: PlugSetup, folder: Path) -> None:
    keep(folder, *range(1, 6))
    keep(folder, 3, salt="acme")
    report, told = imported(setup, folder)
    assert report == ImportReport(found=6, stored=6, held=6, bytes=6 * NBYTES)
    assert told == [(6, 6)]
    assert loaded(setup, *map(key_of, range(1, 7)), key_of(3, "acme")) == [
        *[True] * 5,
        False,
        True,
    ]
    again, _ = imported(setup, folder)
    assert again == report


def test_b66_what_is_torn_odd_or_foreign_is_left_out_and_counted(
    setup: PlugSetup, folder: Path, tmp_path: Path
) -> None:
    keep(folder, 1)
    (folder / file_name(2)).write_bytes(b"x" * (NBYTES - 1))
    (folder / file_name(3)).write_bytes(b"x" * (NBYTES + 1))
    (folder / file_name(4)).write_bytes(bytes(NBYTES))
    (folder / file_name(5)).mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(payload(b"6", NBYTES))
    (folder / file_name(6)).symlink_to(outside)
    (folder / "notes.data").write_bytes(b"x" * NBYTES)
    (folder / file_name(7).replace(".data", ".tmp")).write_bytes(b"x" * NBYTES)
    report, _ = imported(setup, folder)
    assert (report.found, report.stored) == (6, 1)
    assert report.left_out == {"another size": 2, "all zeros": 1, "no regular file": 2}
    assert loaded(setup, *map(key_of, range(1, 8))) == [True] + [False] * 6


def test_a_file_that_changes_while_it_is_read_is_left_out(
    setup: PlugSetup, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(folder, 1, 2)
    fstat = os.fstat

    def later(descriptor: int) -> os.stat_result:
        os.utime(descriptor)
        return fstat(descriptor)

    monkeypatch.setattr("os.fstat", later)
    report, _ = imported(setup, folder)
    assert (report.stored, report.left_out) == (0, {"changed meanwhile": 2})


def test_where_not_all_have_room_the_newest_stay(
    setup: PlugSetup, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "IMPORT_BATCH_BYTES", 4 * NBYTES)
    assert IMPORT_BATCH_BYTES >= 4 * NBYTES
    keep(folder, *range(1, 41))
    room = {"disk_bytes": 24 * (NBYTES + 8192), "dram_bytes": 16 * (NBYTES + 8192)}
    report, told = imported(setup, folder, **room)
    assert (report.found, report.stored) == (40, 40)
    assert 8 <= report.held < 40
    assert told[-1] == (40, 40)
    assert len(told) == 10
    there = loaded(setup, *map(key_of, range(1, 41)))
    assert there[-8:] == [True] * 8
    assert not any(there[:8])


def test_more_files_than_an_import_takes_on_are_refused(
    setup: PlugSetup, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "IMPORT_FILES_MAX", 2)
    assert IMPORT_FILES_MAX > 2
    keep(folder, 1, 2, 3)
    with pytest.raises(ConfigError, match="more than 2 objects"):
        imported(setup, folder)


def test_a_disk_that_does_not_write_ends_the_import(
    setup: PlugSetup, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "IMPORT_WAIT_S", 0.05)
    assert IMPORT_WAIT_S > 1
    keep(folder, 1)
    store = setup.store("lmcache")
    gate = FileGate(operations=(FileOperation.CREATE,), path=".kvs")
    setup.files.inject(gate)
    with pytest.raises(DeadlineError, match="not written within"):
        import_folder(folder, store, LAYOUT, lambda *_: None)
    gate.open()
    store.close()


def test_what_cannot_work_is_said_at_once(setup: PlugSetup, folder: Path) -> None:
    store = PlugStore(PlugOptions(dram_bytes=2**20), "lmcache")
    with pytest.raises(ConfigError, match="needs a disk or a remote"):
        import_folder(folder, store, LAYOUT, lambda *_: None)
    store.close()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        imported(setup, folder / "nowhere")


def test_the_command_tells_what_it_did(setup: PlugSetup, folder: Path) -> None:
    keep(folder, 1, 2)
    (folder / file_name(3)).write_bytes(b"x")
    command = ["import-lmcache", str(folder), "--layout", LAYOUT, "--weights-id", "weights 1"]
    command += ["--disk", str(setup.folder / "disk"), "--dram", "64MiB"]
    runner = CliRunner()
    done = runner.invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "found": 3,
        "stored": 2,
        "held": 2,
        "bytes": 2 * NBYTES,
        "left_out": {"another size": 1},
    }
    done = runner.invoke(app, command)
    assert "3 objects found, 2 stored (16 KiB), 2 held" in done.stdout
    assert "1 left out: another size" in done.stdout
    assert loaded(setup, key_of(1), key_of(2)) == [True, True]
