"""One file per shard against append-only segments with an index: what either costs, bare.

Nothing here is the tier's own code but the index rows. Per shard size and round, one after the
other on the same disk: the tier's way (create in one directory with O_DIRECT, rename into another,
unlink), and segments of 1 GiB written at an offset: into space that was only allocated (``new``),
into punched holes (``holes``), over old bytes (``over``). Each write also appends one row to an
index log, each removal too. One thread writes and removes, as in the tier; four read. What
compaction would copy instead of punching holes is counted by simulation, without a disk. A start
is listing files, or reading the first page of each, against reading an index of as many rows.
The gate is that every byte comes back from both.

    python bench/tiers/layout.py [--smoke] [--path DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from bench.tiers.limits import huge_buffer, timed
from kvtier.constants import ALIGN_BYTES, GIB, IO_THREADS_DEFAULT, KIB, MIB
from kvtier.tiers.disk.rows import ROW_BYTES

#: Shard size and how many of them a round moves.
SIZES = ((64 * KIB, 1024), (512 * KIB, 256), (2 * MIB, 96), (6 * MIB, 32), (32 * MIB, 8))
SMOKE_SIZES = ((64 * KIB, 8),)
STARTS = (10_000, 100_000)
UTILISATIONS = (0.8, 0.9, 0.95)
FOLDERS = 256
_PUNCH_AND_KEEP_SIZE = 0x02 | 0x01
_libc = ctypes.CDLL(None, use_errno=True)


def punch(descriptor: int, offset: int, nbytes: int) -> None:
    """Give a range of a file back to the file system."""
    length = ctypes.c_long(nbytes)
    if _libc.fallocate(descriptor, _PUNCH_AND_KEEP_SIZE, ctypes.c_long(offset), length):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class IndexLog:
    """One row per change, through the page cache, opened each time as the tier does it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, bytes(ROW_BYTES))
        os.close(descriptor)


class Shards:
    """The bytes of a round: every shard differs, and what is read goes to a second buffer."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes, self.count = nbytes, count
        self._written, self._read = (huge_buffer(nbytes * count) for _ in range(2))

    def source(self, number: int) -> memoryview:
        return self._written[number * self.nbytes : (number + 1) * self.nbytes]

    def target(self, number: int) -> memoryview:
        return self._read[number * self.nbytes : (number + 1) * self.nbytes]

    def gate(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self.source(number) != self.target(number):
                raise SystemExit(f"gate: shard {number} came back different")
            self.target(number)[:8] = b"poisoned"

    def each(self, work: Callable[[int], None], numbers: Sequence[int], threads: int = 1) -> float:
        """Seconds per shard."""
        if threads == 1:
            start = time.perf_counter()
            for number in numbers:
                work(number)
            return (time.perf_counter() - start) / len(numbers)
        with ThreadPoolExecutor(threads) as pool:
            return timed(lambda: list(pool.map(work, numbers))) / len(numbers)


class OneFileEach:
    """Create, rename, open and read, unlink."""

    def __init__(self, shards: Shards, root: Path) -> None:
        self._shards, self._root = shards, root
        self._log = IndexLog(root / "log")
        for number in range(FOLDERS):
            (root / "shards" / f"{number:02x}").mkdir(parents=True, exist_ok=True)
        (root / "incoming").mkdir()

    def write(self, number: int) -> None:
        new = self._root / "incoming" / f"{number:076x}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        descriptor = os.open(new, flags, 0o600)
        os.pwrite(descriptor, self._shards.source(number), 0)
        os.close(descriptor)
        new.replace(self._path(number))
        self._log.note()

    def read(self, number: int) -> None:
        descriptor = os.open(self._path(number), os.O_RDONLY | os.O_DIRECT)
        os.preadv(descriptor, [self._shards.target(number)], 0)
        os.close(descriptor)

    def remove(self, number: int) -> None:
        self._path(number).unlink()
        self._log.note()

    def _path(self, number: int) -> Path:
        return self._root / "shards" / f"{number * 37 % FOLDERS:02x}" / f"{number:076x}"


class Segment:
    """One open file of 1 GiB; a shard is an offset in it."""

    def __init__(self, shards: Shards, path: Path) -> None:
        self._shards, self._path = shards, path
        self._log = IndexLog(path.with_suffix(".log"))
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._descriptor, 0, max(GIB, shards.nbytes * shards.count))

    def write(self, number: int) -> None:
        offset = number * self._shards.nbytes
        os.pwrite(self._descriptor, self._shards.source(number), offset)
        self._log.note()

    def read(self, number: int) -> None:
        offset = number * self._shards.nbytes
        os.preadv(self._descriptor, [self._shards.target(number)], offset)

    def remove(self, number: int) -> None:
        punch(self._descriptor, number * self._shards.nbytes, self._shards.nbytes)
        self._log.note()

    def discard(self) -> None:
        os.close(self._descriptor)
        self._path.unlink()


def io_round(shards: Shards, root: Path, over: Segment, seed: int) -> dict[str, float]:
    """Seconds per shard of every step of both layouts, each beside its counterpart."""
    root.mkdir()
    files, segment = OneFileEach(shards, root), Segment(shards, root / "segment")
    every = list(range(shards.count))
    mixed = random.Random(seed).sample(every, len(every))
    half = mixed[: len(mixed) // 2]
    threads = min(IO_THREADS_DEFAULT, len(every))
    found: dict[str, float] = {}
    found["write file"] = shards.each(files.write, every)
    found["write segment new"] = shards.each(segment.write, every)
    found["write segment over"] = shards.each(over.write, every)
    for name, layout in (("file", files), ("segment", segment)):
        found[f"read {name}"] = shards.each(layout.read, mixed, threads)
        shards.gate(every)
        found[f"remove {name}"] = shards.each(layout.remove, half)
    found["write segment holes"] = shards.each(segment.write, half)
    shards.each(segment.read, every)
    shards.gate(every)
    segment.discard()
    for number in mixed[len(half) :]:
        files.remove(number)
    return found


PAIRS = (
    ("write file", "write segment new"),
    ("write file", "write segment holes"),
    ("write file", "write segment over"),
    ("read file", "read segment"),
    ("remove file", "remove segment"),
)


def measure_io(nbytes: int, count: int, folder: Path, rounds: int, smoke: bool) -> None:
    shards = Shards(nbytes, count)
    over = Segment(shards, folder / f"over-{nbytes}")
    shards.each(over.write, range(count))
    # The first round warms up.
    found = [
        io_round(shards, folder / f"{nbytes}-{number}", over, number)
        for number in range(rounds + (not smoke))
    ][-rounds:]
    over.discard()
    figures: dict[str, object] = {}
    print(f"\n{nbytes >> 10} KiB x {count}, load {os.getloadavg()[0]:.1f}; files / segments")
    for one, other in PAIRS:
        ratio = spread([seconds[one] / seconds[other] for seconds in found])
        ours, theirs = (spread([s[name] * 1e6 for s in found]) for name in (one, other))
        figures[f"{one} / {other}"] = {"ratio": ratio, "us": ours, "other_us": theirs}
        print(
            f"  {one:<12} {ours['p50']:9.0f} us, {other:<20} {theirs['p50']:9.0f} us: ratio "
            f"p20 {ratio['p20']:.2f}  p50 {ratio['p50']:.2f}  p80 {ratio['p80']:.2f}"
        )
    if not smoke:
        write_row("layout", {"what": "io", "shard_bytes": nbytes, "shards": count, **figures})


class Compaction:
    """Segments that are only appended to; what lives in one is moved on to free it.

    Greedy, after Rosenblum and Ousterhout (1992): the segment with the least that lives is copied
    to the end whenever fewer than ``SPARE`` are free.
    """

    SPARE = 2

    def __init__(self, slots: int, segments: int) -> None:
        self._slots = slots
        self._live: list[set[int]] = [set() for _ in range(segments)]
        self._free = set(range(1, segments))
        self._head, self._filled = 0, 0
        self.where: OrderedDict[int, int] = OrderedDict()  # shard to segment, oldest first
        self.written_count = 0

    def store(self, shard: int) -> None:
        while len(self._free) < self.SPARE:
            self._compact()
        self._append(shard)

    def remove(self, shard: int) -> None:
        self._live[self.where.pop(shard)].discard(shard)

    def _append(self, shard: int) -> None:
        if self._filled == self._slots:
            self._head, self._filled = self._free.pop(), 0
        self._live[self._head].add(shard)
        self.where[shard] = self._head  # What is moved keeps its place in the order.
        self._filled += 1
        self.written_count += 1

    def _compact(self) -> None:
        full = set(range(len(self._live))) - self._free - {self._head}
        victim = min(full, key=lambda segment: len(self._live[segment]))
        moving, self._live[victim] = self._live[victim], set()
        self._free.add(victim)
        for shard in moving:
            self._append(shard)


def write_amplification(utilisation: float, order: str, slots: int, segments: int) -> float:
    """Return shards written per shard stored, once steady.

    ``random``: any shard leaves; ``lru``: what was not asked for longest, under requests of a Zipf
    distribution of exponent 0.8 over four times as many shards as fit.
    """
    log = Compaction(slots, segments)
    held_max = int(utilisation * slots * segments)
    arrivals = (random_arrivals if order == "random" else lru_arrivals)(log, held_max)
    warm, total = 3 * slots * segments, 6 * slots * segments
    before = 0
    for number, shard in enumerate(itertools.islice(arrivals, total)):
        if number == warm:
            before = log.written_count
        log.store(shard)
    return (log.written_count - before) / (total - warm)


def random_arrivals(log: Compaction, held_max: int) -> Iterator[int]:
    """Yield new shards, each once there is room for it."""
    draws = random.Random(7)
    held: list[int] = []
    for shard in itertools.count():
        if len(held) == held_max:
            place = draws.randrange(held_max)
            held[place], held[-1] = held[-1], held[place]
            log.remove(held.pop())
        held.append(shard)
        yield shard


def lru_arrivals(log: Compaction, held_max: int) -> Iterator[int]:
    """Yield what was asked for and is not held, once there is room for it."""
    draws = random.Random(7)
    universe = range(4 * held_max)
    weights = list(itertools.accumulate((rank + 1) ** -0.8 for rank in universe))
    while True:
        for shard in draws.choices(universe, cum_weights=weights, k=4096):
            if shard in log.where:
                log.where.move_to_end(shard)
                continue
            if len(log.where) == held_max:
                log.remove(next(iter(log.where)))
            yield shard


def measure_reclaim(smoke: bool) -> None:
    slots, segments = (8, 32) if smoke else (64, 128)
    print("\nshards written per shard stored; punched holes and unlinked files: 1")
    for order in ("random", "lru"):
        for utilisation in (0.8,) if smoke else UTILISATIONS:
            value = write_amplification(utilisation, order, slots, segments)
            print(f"  compaction at {utilisation:.0%}, {order:<6} {value:6.2f}")
            if not smoke:
                row = {"what": "reclaim", "order": order, "utilisation": utilisation}
                write_row("layout", {**row, "slots": slots, "write_amplification": value})


def start_round(root: Path, index: Path) -> dict[str, float]:
    """Seconds to learn of files by listing, by their first pages, and from an index."""
    paths: list[str] = []

    def list_files() -> None:
        for folder in os.scandir(root):
            with os.scandir(folder.path) as entries:
                paths.extend(entry.path for entry in entries if entry.stat().st_size)

    page = huge_buffer(ALIGN_BYTES)

    def read_pages() -> None:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(descriptor, [page], 0)
            os.close(descriptor)

    def read_index() -> None:
        with index.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.read()

    listed = timed(list_files)
    return {
        "list": listed,
        "list and pages": listed + timed(read_pages),
        "index": timed(read_index),
    }


def measure_start(count: int, folder: Path, rounds: int, smoke: bool) -> None:
    root, index = folder / "start", folder / "start-index"
    for number in range(count):
        parent = root / f"{number * 37 % FOLDERS:02x}"
        if number < FOLDERS:
            parent.mkdir(parents=True)
        (parent / f"{number:076x}").write_bytes(bytes(ALIGN_BYTES))
    with index.open("wb") as file:
        file.write(os.urandom(count * ROW_BYTES))
        os.fsync(file.fileno())
    os.sync()
    found = [start_round(root, index) for _ in range(rounds)]
    seconds = {name: spread([each[name] for each in found]) for name in found[0]}
    ratios = {
        name: spread([each[name] / each["index"] for each in found])
        for name in ("list", "list and pages")
    }
    shutil.rmtree(root)
    print(f"\na start over {count} files (names cached), load {os.getloadavg()[0]:.1f}")
    for name, ratio in ratios.items():
        print(
            f"  {name:<15} {seconds[name]['p50']:.3f} s, index {seconds['index']['p50']:.4f} s: "
            f"ratio p20 {ratio['p20']:.0f}  p50 {ratio['p50']:.0f}  p80 {ratio['p80']:.0f}"
        )
    if not smoke:
        write_row("layout", {"what": "start", "files": count, "seconds": seconds, "ratios": ratios})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--path", default=None, help="directory on the disk to measure (/tmp)")
    parser.add_argument("--rounds", type=int, default=9, help="of each size (9)")
    options = parser.parse_args()
    rounds = 1 if options.smoke else options.rounds
    measure_reclaim(options.smoke)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        for nbytes, count in SMOKE_SIZES if options.smoke else SIZES:
            measure_io(nbytes, count, Path(folder), rounds, options.smoke)
        for count in (100,) if options.smoke else STARTS:
            measure_start(count, Path(folder), rounds, options.smoke)


if __name__ == "__main__":
    main()
