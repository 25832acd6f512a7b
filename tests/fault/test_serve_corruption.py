"""Files of the disk tier go bad, one at a time; the served model's answer never does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kvtier.constants import QUARANTINE_FILES_MAX
from kvtier.shard_format import header_length, parse_header
from tests.lib.assembly import Assembled, assembled
from tests.lib.disk_folder import quarantined_files, shard_files
from tests.lib.prompts import tale
from tests.lib.reference import Tally
from tests.lib.server import LOAD_ALWAYS, idle, series
from tests.lib.soak_report import report

CHUNK = 32
CHUNKS = 6
NEW_TOKENS = 4
CORRUPT = series("tier_corrupt_shards_total", tier="disk")


def flip_a_byte(path: Path, other: Path, rng: random.Random) -> None:
    place = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ rng.randint(1, 255)]))


def truncate(path: Path, other: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(rng.randrange(path.stat().st_size))


def replace_by_another(path: Path, other: Path, rng: random.Random) -> None:
    path.write_bytes(other.read_bytes())


def swap_payloads(path: Path, other: Path, rng: random.Random) -> None:
    """Keep the header, and take all that it describes from another shard."""
    data = path.read_bytes()
    start = header_length(memoryview(data))
    path.write_bytes(data[:start] + other.read_bytes()[start:])


DAMAGES: list[Callable[[Path, Path, random.Random], None]] = [
    flip_a_byte,
    truncate,
    replace_by_another,
    swap_payloads,
]


def position(path: Path) -> int:
    """The chunk's place in its sequence, from the header of a file that is still well."""
    data = memoryview(path.read_bytes())
    return parse_header(data[: header_length(data)]).position


async def check_wells(served: Assembled, prompt: tuple[int, ...], tally: Tally) -> None:
    """Everything comes from disk, and nothing is found to be bad."""
    await served.wait_for_disk("ok")
    answer = await served.ask(prompt, NEW_TOKENS)
    assert answer.cached["disk"] == CHUNK * CHUNKS
    tally.check(prompt, answer.tokens)
    metrics = await served.wait_until(idle)
    assert metrics[CORRUPT] == 0


async def test_b78_a_bad_file_is_a_miss_counted_and_quarantined(
    tmp_path: Path, rng: random.Random, scale: int
) -> None:
    disk = tmp_path / "kv"
    options = [f"--chunk-tokens={CHUNK}", "--kv-bytes=24MiB", "--dram=64MiB", f"--disk={disk}"]
    options.append(LOAD_ALWAYS)
    prompt = tale(rng, CHUNK * CHUNKS + 8)
    tally = Tally()
    rounds: Counter[str] = Counter()
    async with assembled(*options) as served:
        await served.wait_for_disk("ok")
        tally.check(prompt, (await served.ask(prompt, NEW_TOKENS)).tokens)
        await served.wait_until(idle)
    for number in range(2 * len(DAMAGES) * scale):
        files = shard_files(disk)
        # Whatever was damaged in the round before has been computed and written again.
        assert len(files) == CHUNKS
        victim, other = rng.sample(files, 2)
        place, damage = position(victim), DAMAGES[number % len(DAMAGES)]
        is_late = number // len(DAMAGES) % 2 == 1
        if not is_late:
            damage(victim, other, rng)
        async with assembled(*options) as served:
            await served.wait_for_disk("ok")
            if is_late:
                damage(victim, other, rng)
            answer = await served.ask(prompt, NEW_TOKENS)
            tally.check(prompt, answer.tokens)
            assert answer.cached["disk"] == CHUNK * place, (damage, is_late)
            metrics = await served.wait_until(idle)
            assert metrics[CORRUPT] == 1
            assert metrics[series("tier_chunks", tier="disk")] == CHUNKS
            assert not victim.exists()
            expected = min(number + 1, QUARANTINE_FILES_MAX)
            assert len(quarantined_files(disk)) == expected
            assert metrics[series("tier_quarantined_files", tier="disk")] == expected
        rounds[damage.__name__] += 1
    async with assembled(*options) as served:
        await check_wells(served, prompt, tally)
    tally.assert_few_ties()
    report("corruption", scale, **rounds)
