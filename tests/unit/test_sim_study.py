"""Studies and the command ``kvtier sim``: capacities, figures, JSON, pictures, advice."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvtier.admission.budget import BURST_S, DAY_S
from kvtier.cli.main import app, run
from kvtier.errors import ConfigError, RegistryError
from kvtier.sim.report import recommendation, result_table
from kvtier.sim.shapes import chunk_bytes, model_shape
from kvtier.sim.study import Plan, parse_capacity, run_study
from kvtier.sim.trace import Request, Trace, make_trace

SHAPE = model_shape("llama-3.1-8b")


def requests(count: int, seed: int = 1) -> list[Request]:
    """Sessions over a common prefix; each request goes on with one of the latest."""
    draw = random.Random(seed)
    latest: list[list[int]] = [[0, 1, 2]]
    number = 3
    made: list[Request] = []
    for turn in range(count):
        path = list(draw.choice(latest[-8:]) if draw.random() < 0.7 else latest[0])
        path += range(number, number + 3)
        number += 3
        latest.append(path)
        made.append(Request(turn * 2.0, path, 512 * len(path)))
    return made


def trace_of(count: int, seed: int = 1) -> Trace:
    return make_trace(requests(count, seed), 512)


def written(path: Path, made: Sequence[Request]) -> Path:
    lines = [
        json.dumps(
            {
                "timestamp": int(each.time_s * 1000),
                "input_length": each.prompt_tokens,
                "hash_ids": list(each.blocks),
            }
        )
        for each in made
    ]
    path.write_text("\n".join(lines))
    return path


def plan(policies: str = "lru,min", capacities: str = "10%", **others: Any) -> Plan:
    given: dict[str, Any] = {"codecs": ("raw",), "shape": SHAPE} | others
    return Plan(tuple(policies.split(",")), tuple(capacities.split(",")), **given)


def test_capacities_are_shares_or_bytes() -> None:
    raw, int4 = (chunk_bytes(SHAPE, codec, 512) for codec in ("raw", "int4"))
    assert raw == 64 * 2**20
    assert int4 == 17 * 2**20
    assert parse_capacity("10%", 1000, raw, raw) == 100
    assert parse_capacity("0.5%", 386_111, raw, raw) == 1930
    assert parse_capacity("10%", 1000, raw, int4) == 376
    assert parse_capacity("1GiB", 1000, raw, raw) == 16
    assert parse_capacity("1GiB", 1000, raw, int4) == 60
    assert parse_capacity("0.001%", 10, raw, raw) == 1
    with pytest.raises(ConfigError, match=r"'1KiB'.* at least one chunk, \d+ bytes"):
        parse_capacity("1KiB", 1000, raw, raw)


@pytest.mark.parametrize("text", ["0%", "101%", "x%", "%", "12", "5", "5 parsecs", "0GiB", "-1%"])
def test_other_capacities_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: .*GiB"):
        plan(capacities=text)


def test_plans_that_cannot_be_are_refused() -> None:
    with pytest.raises(RegistryError, match=r"mean 'gittins'.*lru, min$"):
        plan("gitins")
    with pytest.raises(RegistryError, match="second-touch"):
        plan(admissions=("second",))
    with pytest.raises(ConfigError, match="admission"):
        plan(admissions=())
    with pytest.raises(ConfigError, match="write_bytes_per_day"):
        plan(write_bytes_per_day=-1)
    with pytest.raises(ConfigError, match="at least one chunk of raw, 67108865"):
        run_study(trace_of(3), plan(write_bytes_per_day=1000))
    with pytest.raises(ConfigError, match="int4"):
        plan(codecs=("int5",))
    with pytest.raises(ConfigError, match="0 to 1"):
        plan(hints=1.5)
    with pytest.raises(ConfigError, match="workers"):
        plan(workers=0)
    with pytest.raises(ConfigError, match="policy"):
        Plan((), ("1%",), ("raw",), SHAPE)
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b"):
        model_shape("llama-3.1-9b")


def test_the_first_tenth_warms_up() -> None:
    """A cache that holds everything misses only what is new after the warm-up."""
    trace = trace_of(100)
    (lru, best) = run_study(trace, plan(capacities="100%"))
    seen: set[int] = set()
    hits = total = 0
    for request, path in enumerate(trace.paths()):
        if request >= 10:
            hits += len(seen.intersection(path))
            total += len(path)
        seen.update(path)
    assert lru.prefix_hit_percent == pytest.approx(100 * hits / total)
    assert best.prefix_hit_percent == pytest.approx(100 * hits / total)
    assert lru.optimum_hit_percent == best.prefix_hit_percent
    new = total - hits
    assert lru.bytes_written == new * 64 * 2**20
    assert lru.bytes_written_per_day == pytest.approx(lru.bytes_written * 86_400 / 178, rel=1e-9)


def test_admissions_are_weighed_beside_each_other() -> None:
    """Second touch writes what is used twice, a use late; the optimum decides for itself."""
    trace = trace_of(300)
    admissions = ("everything", "second-touch", "learned")
    found = run_study(trace, plan("lru,min", "100%", admissions=admissions))
    assert [(each.policy, each.admission) for each in found] == [
        *(("lru", admission) for admission in admissions),
        ("min", "min"),
    ]
    everything, second, learned, best = found
    first, uses = 30, [0] * trace.unique_count
    hits = total = written = 0
    for request, path in enumerate(trace.paths()):
        if request >= first:
            hits += sum(uses[block] >= 2 for block in path)
            written += sum(uses[block] == 1 for block in path)
            total += len(path)
        for block in path:
            uses[block] += 1
    assert second.prefix_hit_percent == pytest.approx(100 * hits / total)
    assert second.bytes_written == written * 64 * 2**20
    assert learned.bytes_written <= everything.bytes_written
    assert everything == run_study(trace, plan("lru", "100%"))[0]
    assert best.optimum_hit_percent == second.optimum_hit_percent


def test_a_write_budget_is_kept() -> None:
    trace = trace_of(300)
    unbound = run_study(trace, plan("lru"))[0]
    a_day = unbound.bytes_written * 4
    bound = run_study(trace, plan("lru", write_bytes_per_day=a_day))[0]
    assert bound.prefix_hit_percent < unbound.prefix_hit_percent
    assert 0 < bound.bytes_written < unbound.bytes_written
    span_s = trace.times_s[-1] - trace.times_s[0]
    assert bound.bytes_written <= a_day * (BURST_S + span_s) / DAY_S


@pytest.mark.parametrize("count", [1, 2, 30])
def test_small_traces_have_figures(count: int) -> None:
    """Also those of one instant, which say nothing of a day, and of prompts without blocks."""
    at_once = make_trace([Request(0.0, [1, 2], 1024)] * count, 512)
    for each in run_study(at_once, plan("lru,gittins,min", admissions=("learned",))):
        assert each.bytes_written_per_day == 0
        assert 0.0 <= each.prefix_hit_percent <= 100.0
    empty = make_trace([Request(float(i), [], 1) for i in range(count)], 512)
    results = run_study(empty, plan("lru,min", "5%,1GiB"))
    assert [each.prefix_hit_percent for each in results] == [0.0] * 4
    assert "no cache" in recommendation(results)


def test_the_table_fits_80_columns() -> None:
    admissions = ("everything", "second-touch", "learned")
    results = run_study(
        trace_of(60),
        plan("gittins-cost,min", "0.25%,50GiB", codecs=("raw", "int4"), admissions=admissions),
    )
    out = io.StringIO()
    Console(file=out, width=80).print(result_table("a trace", results))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    whole = [line for line in lines if "gittins-cost second-touch" in line]
    assert len(whole) == 4
    assert all(line.count(".") >= 4 and line.rstrip().endswith("iB") for line in whole)


def test_of_admissions_that_come_close_the_one_that_writes_least_is_advised() -> None:
    few = run_study(trace_of(300), plan("lru", "100%", admissions=("everything", "learned")))
    close = [each for each in few if each.prefix_hit_percent >= 0.95 * few[0].prefix_hit_percent]
    least = min(close, key=lambda each: each.bytes_written)
    assert f"lru with {least.admission} finds" in recommendation(few)


def test_flops_grow_with_context() -> None:
    """A hit saves what its tokens would cost: 2 per parameter, and attention to what is before."""
    assert SHAPE.prefill_flops(0, 1) == pytest.approx(2 * 8.03e9, rel=1e-3)
    attention = SHAPE.prefill_flops(30_600, 1) / SHAPE.prefill_flops(0, 1)
    assert attention == pytest.approx(2.0, rel=0.01)
    whole = SHAPE.prefill_flops(0, 4096)
    parts = sum(SHAPE.prefill_flops(start, 512) for start in range(0, 4096, 512))
    assert whole == pytest.approx(parts)
    results = run_study(trace_of(200), plan())
    assert all(each.flops_saved_percent < each.prefix_hit_percent for each in results)


def test_a_denser_codec_holds_more() -> None:
    results = run_study(trace_of(200), plan("lru", codecs=("raw", "fp8", "int4")))
    chunks = [each.capacity_chunks for each in results]
    assert chunks == [60, 120, 227]
    hits = [each.prefix_hit_percent for each in results]
    assert hits == sorted(hits)
    sizes = [each.capacity_bytes for each in results]
    assert max(sizes) - min(sizes) < 64 * 2**20


def test_processes_find_what_one_finds() -> None:
    """And tell how far they are."""
    trace = trace_of(8000)
    assert 3 * len(trace.blocks) > 300_000, "small enough for one process"
    shares: list[float] = []
    alone = run_study(trace, plan("lru,arc,gittins", workers=1))
    together = run_study(trace, plan("lru,arc,gittins", workers=2), shares.append)
    assert alone == together
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_hints_help_those_who_listen() -> None:
    trace = trace_of(1500)
    plain = run_study(trace, plan("lru,gittins", "0.3%"))
    hinted = run_study(trace, plan("lru,gittins", "0.3%", hints=0.9))
    assert hinted[0] == plain[0]
    assert hinted[1].prefix_hit_percent > plain[1].prefix_hit_percent


def test_advice_takes_the_smallest_that_is_good_enough() -> None:
    results = run_study(trace_of(300), plan("lru,arc", "1%,2%,50%,100%", codecs=("raw", "int4")))
    best = max(each.prefix_hit_percent for each in results)
    good = [each for each in results if each.prefix_hit_percent >= 0.95 * best]
    smallest = min(each.capacity_bytes for each in good)
    advice = recommendation(results)
    assert advice.startswith("With ")
    amount, unit, _, place, _, codec = advice.removeprefix("With ").split()[:6]
    assert float(amount) == pytest.approx(smallest / 2**30, abs=0.5)
    assert (unit, place) == ("GiB", "DRAM")
    assert ("quality" in advice) == codec.startswith("int4")
    assert "policy" in recommendation(run_study(trace_of(30), plan("min")))


def sim(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["sim", *map(str, arguments)])


def test_json_has_a_row_per_result(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", requests(60))
    result = sim(path, "--policy", "lru,gittins,min", "--capacity", "5%,1GiB", "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["results"]
    assert [(row["policy"], row["capacity"]) for row in rows] == [
        (policy, capacity) for capacity in ("5%", "1GiB") for policy in ("lru", "gittins", "min")
    ]
    assert rows[0]["capacity_chunks"] == int(183 * 0.05)
    assert rows[3]["capacity_chunks"] == 16
    needed = {"prefix_hit_percent", "flops_saved_percent", "bytes_written", "trace", "codec"}
    assert all(needed <= row.keys() for row in rows)
    best = {row["capacity"]: row["prefix_hit_percent"] for row in rows if row["policy"] == "min"}
    assert all(row["prefix_hit_percent"] <= best[row["capacity"]] for row in rows)


def test_the_table_goes_to_stdout_and_progress_does_not(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", requests(60))
    result = sim(path, path, "--policy", "lru,arc", "--hints", "0.8")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("60 requests") == 2
    assert "replay" not in result.stdout
    assert "replay trace.jsonl" in result.stderr


def test_what_if_less_was_written(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", requests(60))
    what_if = ["--admission", "everything,learned", "--write-bytes-per-day", "100TiB"]
    result = sim(path, "--policy", "lru,min", *what_if, "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["results"]
    assert [row["admission"] for row in rows[:3]] == ["everything", "learned", "min"]
    table = sim(path, "--policy", "lru,min", *what_if)
    assert "learned" in table.stdout
    assert isinstance(sim(path, "--write-bytes-per-day", "much").exception, ConfigError)


def test_plots_are_drawn(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", requests(60))
    picture = tmp_path / "out.png"
    result = sim(path, "--policy", "lru,arc", "--codec", "raw,int4", "--plot", picture)
    assert result.exit_code == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", requests(30))
    (tmp_path / "folder.png").mkdir()
    for name in ("out.nothing", "out", "missing/out.png", "folder.png"):
        result = sim(path, "--policy", "lru", "--plot", tmp_path / name)
        assert isinstance(result.exception, ConfigError)
        assert name in str(result.exception)
        assert "replay" not in result.stderr, "it is told before the work that would be lost"


def test_bad_input_ends_with_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "trace.jsonl", requests(30))
    path.write_text(path.read_text() + "\n{}\n")
    with pytest.raises(SystemExit) as ended:
        run(["sim", str(path)])
    assert ended.value.code == 1
    caught = capsys.readouterr()
    assert caught.out == ""
    assert f"error: {path}, line 31: no blocks; allowed: " in caught.err
