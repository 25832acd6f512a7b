"""A server is killed in the middle of its writes, again and again, on one directory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from http.client import HTTPException
from pathlib import Path

from tests.lib.disk_folder import bytes_below, incoming_files, shard_files
from tests.lib.prompts import family
from tests.lib.reference import Tally
from tests.lib.server import Answer, Served, idle, series, serving
from tests.lib.soak_report import report

CHUNK = 32
NEW_TOKENS = 8
CLIENTS = 2
DISK_BYTES = 48 << 20
#: The lock and the epochs, which are no shards.
OTHER_BYTES = 64 << 10

Prompt = tuple[int, ...]


def started(disk: Path) -> AbstractContextManager[Served]:
    options = [f"--chunk-tokens={CHUNK}", "--kv-bytes=48MiB", "--dram=64MiB", f"--disk={disk}"]
    # ``each`` keeps a file longer where it is written, so that the kill finds one there.
    return serving(*options, f"--disk-bytes={DISK_BYTES}", "--durability=each")


def check_books(served: Served, disk: Path) -> None:
    """Every file is indexed, nothing else lies there, and the bound holds."""
    metrics = served.wait_until(idle)
    files = shard_files(disk)
    assert incoming_files(disk) == []
    assert metrics[series("tier_chunks", tier="disk")] == len(files)
    assert metrics[series("tier_used_bytes", tier="disk")] == sum(f.stat().st_size for f in files)
    assert metrics[series("tier_corrupt_shards_total", tier="disk")] == 0
    assert bytes_below(disk) <= DISK_BYTES + OTHER_BYTES


def stopped_in_a_write(
    served: Served, disk: Path, number: int, running: Callable[[], bool]
) -> bool:
    """Hold the server while it writes a file, not before the one of that number.

    False when nothing runs any more.
    """
    seen: set[str] = set()
    while running():
        writing = {path.name for path in incoming_files(disk)}
        seen |= writing
        if writing and len(seen) >= number:
            served.pause()
            if incoming_files(disk):
                return True
            served.resume()
    return False


def serve_and_kill(
    disk: Path, old: Sequence[Prompt], new: Sequence[Prompt], number: int
) -> tuple[list[Answer], bool]:
    """Ask, the old ones first, and kill in a write. Return the answers, and whether there was one.

    What earlier rounds have left is read; for the new prompts, chunks are written.
    """

    def ask(served: Served, mine: Sequence[Prompt]) -> None:
        with suppress(OSError, HTTPException):
            got.extend(served.ask(prompt, NEW_TOKENS) for prompt in mine)

    with started(disk) as served, ThreadPoolExecutor(CLIENTS) as clients:
        served.wait_for_disk("ok")
        check_books(served, disk)
        got = [served.ask(prompt, NEW_TOKENS) for prompt in old]
        asking = [clients.submit(ask, served, new[i::CLIENTS]) for i in range(CLIENTS)]
        hit = stopped_in_a_write(
            served, disk, number, lambda: not all(each.done() for each in asking)
        )
        served.end()
        assert bool(incoming_files(disk)) == hit
        for each in asking:
            each.result()
    return got, hit


def test_b66_killed_while_writing(tmp_path: Path, rng: random.Random, scale: int) -> None:
    disk = tmp_path / "kv"
    prompts: list[Prompt] = []
    answers: list[Answer] = []
    hits = 0
    kills = 3 * scale
    for _ in range(kills):
        new = family(rng, roots=2, branches=2, leaves=2)
        old = rng.sample(prompts[-len(new) :], min(3, len(prompts)))
        # Seldom at the first write, so that each round leaves something behind.
        got, hit = serve_and_kill(disk, old, new, number=rng.randint(1, 16))
        prompts += new
        answers += got
        hits += hit
    with started(disk) as served:
        served.wait_for_disk("ok")
        check_books(served, disk)
        answers += [served.ask(prompt, NEW_TOKENS) for prompt in prompts[-8:]]
        check_books(served, disk)
        assert served.stop() == 0
    found = sum(answer.cached.get("disk", 0) for answer in answers)
    tally = Tally()
    for answer in answers:
        tally.check(answer.prompt, answer.tokens)
    tally.assert_few_ties()
    report(
        "killed while writing",
        scale,
        kills=kills,
        in_a_write=hits,
        answers=len(answers),
        disk=found,
    )
    assert hits > kills / 2
    assert found
