"""The file system that loses power keeps what was synced and nothing it did not promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.testing.power_cut import PowerCutFiles
from tests.lib.disk_lab import aligned

SEEDS = range(24)


class Room:
    """A root with one safe directory, its shadow, and the files between them."""

    def __init__(self, tmp_path: Path, seed: int) -> None:
        self.root = tmp_path / f"root{seed}"
        shadow = tmp_path / f"shadow{seed}"
        for directory in (self.root / "in", self.root / "out", shadow):
            directory.mkdir(parents=True)
        (self.root / "in" / "old").write_bytes(b"o" * 4096)
        self.files = PowerCutFiles(self.root, shadow, seed=seed)

    def path(self, name: str) -> str:
        return str(self.root / name)

    def create(self, name: str, *, sync: bool = False) -> None:
        data = aligned(8192)
        data[:] = b"x" * 8192
        self.files.create(self.path(name), data)
        if sync:
            self.files.sync_file(self.path(name))

    def state(self, name: str) -> str:
        path = self.root / name
        if not path.exists():
            return "gone"
        return "whole" if path.read_bytes() in (b"x" * 8192, b"o" * 4096) else "torn"


def states(tmp_path: Path, name: str, *steps: str) -> set[str]:
    """Return what may have become of a file after these steps and a cut."""
    found: set[str] = set()
    for seed in SEEDS:
        room = Room(tmp_path, seed)
        for step in steps:
            verb, _, what = step.partition(" ")
            if verb == "create":
                room.create(what)
            elif verb == "sync":
                room.files.sync_file(room.path(what))
            elif verb == "sync_directory":
                room.files.sync_directory(room.path(what).rstrip("/"))
            elif verb == "append":
                room.files.append(room.path(what), memoryview(b"y" * 700))
            elif verb == "remove":
                room.files.remove(room.path(what))
            else:
                source, target = what.split()
                room.files.replace(room.path(source), room.path(target))
        room.files.cut()
        found.add(room.state(name))
    return found


def test_of_what_was_appended_any_part_may_be_lost_and_nothing_before_a_sync(
    tmp_path: Path,
) -> None:
    seen: set[str] = set()
    for seed in SEEDS:
        room = Room(tmp_path, seed)
        path = room.root / "in" / "old"
        for data in (b"safe", b"1", b"2"):
            room.files.append(str(path), memoryview(data))
            if data == b"safe":
                room.files.sync_file(str(path))
        room.files.cut()
        found = path.read_bytes()
        assert found.startswith(b"o" * 4096 + b"safe")
        tail = found[4100:]
        cut = len(tail) < len(b"12")
        seen.add("lost" if not tail else "cut" if cut else "torn" if 0 in tail else "kept")
        room.files.append(str(path), memoryview(b"later"))
        room.files.sync_file(str(path))
        room.files.cut()
        assert path.read_bytes() == found + b"later"
    assert seen == {"lost", "cut", "torn", "kept"}


NEW = ("create in/new", "sync in/new")


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        ("in/old", (), {"whole"}),
        ("in/new", ("create in/new",), {"gone", "whole", "torn"}),
        ("in/new", NEW, {"gone", "whole"}),
        ("in/new", ("create in/new", "sync_directory in"), {"whole", "torn"}),
        ("in/new", (*NEW, "sync_directory in"), {"whole"}),
        ("in/new", ("append in/new",), {"gone", "torn"}),
        ("in/new", ("append in/new", "remove in/new", "sync_directory in"), {"gone"}),
        ("out/new", (*NEW, "rename in/new out/new"), {"gone", "whole"}),
        ("out/new", (*NEW, "rename in/new out/new", "sync_directory in"), {"gone", "whole"}),
        ("out/new", (*NEW, "rename in/new out/new", "sync_directory out"), {"whole"}),
        ("in/old", ("remove in/old",), {"whole", "gone"}),
        ("in/old", ("remove in/old", "sync_directory in"), {"gone"}),
        ("in/old", ("rename in/old out/new", "sync_directory out"), {"gone"}),
        (
            "deep/new",
            ("create deep/new", "sync deep/new", "sync_directory deep"),
            {"gone", "whole"},
        ),
        (
            "deep/new",
            ("create deep/new", "sync deep/new", "sync_directory deep", "sync_directory ."),
            {"whole"},
        ),
        (
            "deep/er/new",
            (
                "create deep/er/new",
                "sync deep/er/new",
                "sync_directory deep/er",
                "sync_directory deep",
            ),
            {"gone", "whole"},
        ),
    ],
)
def test_what_may_become_of_a_file(
    tmp_path: Path, name: str, steps: tuple[str, ...], expected: set[str]
) -> None:
    steps = tuple(step.replace("sync_directory .", "sync_directory ") for step in steps)
    assert states(tmp_path, name, *steps) == expected


@pytest.mark.parametrize("name", ["in/new", "deep/er/new"])
def test_what_survived_one_cut_survives_the_next(tmp_path: Path, name: str) -> None:
    for seed in SEEDS:
        room = Room(tmp_path, seed)
        room.create(name)
        room.files.cut()
        before = room.state(name)
        room.files.cut()
        assert room.state(name) == before


def test_a_rename_is_never_seen_half(tmp_path: Path) -> None:
    for seed in SEEDS:
        room = Room(tmp_path, seed)
        room.files.replace(room.path("in/old"), room.path("out/new"))
        room.files.cut()
        assert {room.state("in/old"), room.state("out/new")} == {"whole", "gone"}
