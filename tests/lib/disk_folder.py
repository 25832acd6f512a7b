"""What lies in the directory of a disk tier, as the operating system tells it."""

from __future__ import annotations

from pathlib import Path


def shard_files(disk: Path) -> list[Path]:
    """Every whole shard, by name."""
    return sorted((disk / "shards").glob("*/*.kvs"))


def quarantined_files(disk: Path) -> list[Path]:
    """Everything that failed verification and was kept."""
    return sorted((disk / "quarantine").glob("*"))


def incoming_files(disk: Path) -> list[Path]:
    """Everything that is being written, or was when its writer died."""
    return sorted((disk / "incoming").glob("*"))


def bytes_below(folder: Path) -> int:
    """Bytes of all files, the lock and the epochs included."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
