"""Quality measurements end to end: whole-sequence oracles, a real model, the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvtier.cli.main import app, run
from kvtier.codecs.raw import RawCodec
from kvtier.errors import CodecError, ConfigError
from kvtier.layout import shard_layout
from kvtier.testing.calibrations import made_up_calibration
from kvtier.types import ShardId
from kvtier_engine.attention.paged import plan_attention
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.options import BUNDLED_MODEL, DeviceChoice
from kvtier_engine.quality.measure import BLOCK_TOKENS, PASSES, Bench
from kvtier_engine.quality.metrics import compare, summarise
from kvtier_engine.quality.results import Figures, Mode
from kvtier_engine.quality.study import Study
from kvtier_engine.quality.text import read_text
from kvtier_engine.types import RowStep
from kvtier_engine.weights.load import kv_layout
from tests.lib.quality_setup import (
    CONTINUATION_TOKENS,
    PREFIX_TOKENS,
    BendingCodec,
    ForgetfulCodec,
    NarrowCodec,
    NoisyCodec,
    OtherTextCodec,
    RecordingCodec,
    Tiny,
    measured,
    random_ids,
    windows_of,
)
from tests.lib.tiny_llama import reference_logits, tiny_config, tiny_tensors, write_folder
from tests.lib.without_torch import without_torch

FED_TOKENS = PREFIX_TOKENS + CONTINUATION_TOKENS
MODES = pytest.mark.parametrize("mode", list(Mode))
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"), seed=7)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two windows for the tiny model, whose tokens are bytes."""
    path = tmp_path_factory.mktemp("text") / "own.txt"
    path.write_text(read_text(None)[1][:1024], encoding="utf-8")
    return path


def pool_of(tiny: Tiny, ids: tuple[int, ...]) -> KVPool:
    """A pool with the KV of a text from block 0 on."""
    layout = kv_layout(tiny.loaded.config, tiny.loaded.dtype)
    pool = KVPool(layout, block_tokens=BLOCK_TOKENS, capacity_bytes=1 << 20)
    blocks = (tuple(range(pool.block_count)),)
    plan = plan_attention([RowStep(0, ids, 0, blocks, sample=False)], pool)
    with torch.inference_mode():
        tiny.loaded.model.forward(torch.tensor(ids), torch.arange(len(ids)), plan, pool)
    return pool


def assert_same(found: Figures, expected: Figures) -> None:
    assert found.kl_mean == pytest.approx(expected.kl_mean, rel=1e-3)
    assert found.kl_p99 == pytest.approx(expected.kl_p99, rel=1e-3)
    assert found.top1_percent == pytest.approx(expected.top1_percent, abs=1.6)
    assert found.reference_ppl == pytest.approx(expected.reference_ppl, rel=1e-3)
    assert found.ppl == pytest.approx(expected.ppl, rel=1e-3)


def expected_figures(tiny: Tiny, ids: tuple[int, ...], changed: torch.Tensor) -> Figures:
    logits = reference_logits(tiny.config, tiny.tensors, list(ids[:FED_TOKENS]))
    targets = torch.tensor(ids[PREFIX_TOKENS + 1 :])
    return summarise(compare(logits[PREFIX_TOKENS:], changed, targets))


def test_storage_is_what_whole_sequences_say(tiny: Tiny) -> None:
    own, other = random_ids(FED_TOKENS + 1, 1), random_ids(PREFIX_TOKENS, 2)
    codec = OtherTextCodec(pool_of(tiny, other))
    figures = measured(tiny, windows_of(own), Mode.STORAGE, codec)[0].figures
    swapped = list(other + own[PREFIX_TOKENS:FED_TOKENS])
    changed = reference_logits(tiny.config, tiny.tensors, swapped)[PREFIX_TOKENS:]
    assert_same(figures, expected_figures(tiny, own, changed))
    assert figures.kl_mean > 0.1


def test_in_place_is_what_whole_sequences_say(tiny: Tiny) -> None:
    own = random_ids(FED_TOKENS + 1, 3)
    layers = tiny.loaded.config.layer_count
    result = measured(tiny, windows_of(own), Mode.IN_PLACE, BendingCodec(), passes=layers)[0]
    ids = list(own[:FED_TOKENS])
    changed = reference_logits(tiny.config, tiny.tensors, ids, BendingCodec.bend)
    assert_same(result.figures, expected_figures(tiny, own, changed[PREFIX_TOKENS:]))
    assert result.figures.kl_mean > 0.01


def test_in_place_comes_to_rest_after_a_pass_per_layer(tiny: Tiny) -> None:
    windows = windows_of(random_ids(FED_TOKENS + 1, 4))
    layers = tiny.loaded.config.layer_count
    by_passes = {
        passes: measured(tiny, windows, Mode.IN_PLACE, BendingCodec(), passes=passes)[0]
        for passes in (1, PASSES, layers, layers + 2)
    }
    at_rest = by_passes[layers].figures
    assert by_passes[layers + 2].figures == at_rest
    assert by_passes[1].figures != at_rest
    assert by_passes[PASSES].figures.kl_mean == pytest.approx(at_rest.kl_mean, rel=0.1)


@MODES
def test_raw_loses_exactly_nothing(tiny: Tiny, mode: Mode) -> None:
    windows = windows_of(random_ids(FED_TOKENS + 1, 5), random_ids(FED_TOKENS + 1, 6))
    result = measured(tiny, windows, mode, RawCodec())[0]
    figures = result.figures
    assert (figures.kl_mean, figures.kl_max, figures.top1_percent) == (0.0, 0.0, 100.0)
    assert figures.ppl_change_percent == 0.0
    assert figures.positions == 2 * CONTINUATION_TOKENS
    assert set(result.noise.k + result.noise.v) == {None}
    assert result.bits_per_value == 16.0


@MODES
def test_more_noise_is_worse(tiny: Tiny, mode: Mode) -> None:
    shares = (0.001, 0.01, 0.1, 1.0)
    windows = windows_of(random_ids(FED_TOKENS + 1, 8))
    results = measured(tiny, windows, mode, *(NoisyCodec(share) for share in shares))
    kls = [each.figures.kl_mean for each in results]
    assert kls == sorted(kls)
    assert 0.0 < kls[0] < 1e-3 < kls[3]
    agreements = [each.figures.top1_percent for each in results]
    assert agreements == sorted(agreements, reverse=True)
    for each, expected in zip(results, (60.0, 40.0, 20.0, 0.0), strict=True):
        for db in each.noise.k + each.noise.v:
            assert db == pytest.approx(expected, abs=1.0)


def test_in_place_packs_what_the_pass_before_wrote(tiny: Tiny) -> None:
    codec = RecordingCodec()
    windows = windows_of(random_ids(FED_TOKENS + 1, 9))
    measured(tiny, windows, Mode.IN_PLACE, codec, passes=3)
    exact, packed, fresh = (chunk_blocks(start) for start in (0, 32, 64))
    assert codec.packed == exact + fresh + fresh
    assert codec.unpacked == 3 * packed


def chunk_blocks(first: int) -> list[tuple[int, ...]]:
    """Blocks of the two chunks of a window that starts at a block."""
    return [tuple(range(start, start + 16)) for start in (first, first + 16)]


@MODES
def test_what_a_codec_does_not_write_is_noticed(tiny: Tiny, mode: Mode) -> None:
    bench = Bench(tiny.loaded, windows_of(random_ids(FED_TOKENS + 1, 10)), mode)
    ready = [bench.prepare(codec) for codec in (RawCodec(), ForgetfulCodec())]
    results, skipped = bench.measure(ready, lambda _: None)
    assert [each.codec for each in results] == ["raw"]
    assert "unwritten" in skipped[0].reason


def test_a_codec_that_cannot_carry_the_model_is_told(tiny: Tiny) -> None:
    bench = Bench(tiny.loaded, windows_of(random_ids(FED_TOKENS + 1, 11)), Mode.STORAGE)
    with pytest.raises(CodecError, match="takes dims of 4096 only"):
        bench.prepare(NarrowCodec())


@MODES
def test_progress_sums_up_to_the_work(tiny: Tiny, text: Path, mode: Mode) -> None:
    study = Study(
        model=str(tiny.folder),
        device=DeviceChoice.CPU,
        codec="raw,int8",
        text=text.read_text(encoding="utf-8"),
        mode=mode,
        tokens=1024,
    )
    fed: list[int] = []
    study.run("text", fed.append)
    assert sum(fed) == study.work_tokens > 0


def test_on_a_real_model_codecs_keep_their_bars() -> None:
    study = Study(
        model=BUNDLED_MODEL,
        device=DeviceChoice.CPU,
        codec="raw,int8,int6,fp8,int4-g128",
        text=read_text(None)[1],
        mode=Mode.STORAGE,
        tokens=320,
    )
    report = study.run("opticks", lambda _: None)
    kls = {each.codec: each.figures.kl_mean for each in report.results}
    assert kls["raw"] == 0.0
    assert 0.0 < kls["int8"] <= 1e-3
    assert kls["int8"] < kls["int6"] < kls["int4-g128"]
    assert kls["int6"] < kls["fp8"] < kls["int4-g128"]
    assert 5.0 < report.results[0].figures.reference_ppl < 100.0


def quality(tiny: Tiny, text: Path, *more: object) -> Any:
    arguments = ["--model", tiny.folder, "--text", text, "--device", "cpu", *more]
    return CliRunner().invoke(app, ["quality", *map(str, arguments)])


def test_a_calibrated_codec_has_the_name_that_was_asked_for(
    tiny: Tiny, text: Path, tmp_path: Path
) -> None:
    layout = shard_layout(kv_layout(tiny.loaded.config, "float32"), ShardId(0, 0, 0))
    path = tmp_path / "calibration"
    path.write_bytes(made_up_calibration(layout).to_bytes())
    asked = ("--codec", "int4,int8", "--calibration", path, "--json")
    result = quality(tiny, text, *asked)
    assert result.exit_code == 0, result.output
    assert [each["codec"] for each in json.loads(result.stdout)["results"]] == ["int8", "int4"]


@MODES
def test_json_is_the_whole_of_stdout_and_the_same_twice(tiny: Tiny, text: Path, mode: Mode) -> None:
    first = quality(tiny, text, "--codec", "all", "--mode", mode, "--json")
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert found["mode"] == mode
    assert found["text"] == "own.txt"
    bits = [each["bits_per_value"] for each in found["results"]]
    assert bits == sorted(bits, reverse=True)
    by_codec = {each["codec"]: each for each in found["results"]}
    assert {"raw", "fp8", "int8", "int6", "int5k4v"} <= by_codec.keys()
    assert by_codec["raw"]["kl_mean"] == 0.0
    assert by_codec["int8"]["positions"] == found["windows"] * found["continuation_tokens"]
    assert quality(tiny, text, "--codec", "all", "--mode", mode, "--json").stdout == first.stdout


def test_table_and_picture(tiny: Tiny, text: Path, tmp_path: Path) -> None:
    plot = tmp_path / "snr.png"
    result = quality(tiny, text, "--codec", "raw,int8", "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "raw: exact" in result.stdout
    assert "measure storage" in result.stderr
    assert "measure storage" not in result.stdout
    assert plot.read_bytes().startswith(PNG)


def test_bad_input_is_one_line_on_stderr(
    tiny: Tiny, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"\xff" * 500)
    model, own = ["--model", str(tiny.folder)], ["--text", str(text)]
    for arguments, message in (
        ([*model, "--text", "missing.txt"], "error: --text missing.txt: No such file"),
        ([*model, "--text", str(short)], "error: the text has 10 tokens; at least 321 are needed"),
        ([*model, "--text", str(latin)], "not UTF-8 at byte 0"),
        ([*model, *own, "--codec", "int9"], "no codec 'int9' (did you mean 'int8'?)"),
        ([*model, *own, "--codec", "int4"], "codec 'int4' needs a calibration"),
        ([*model, *own, "--tokens", "10"], "error: --tokens 10; allowed: 320 to"),
        ([*own, "--model", "nowhere"], "error: no model 'nowhere'"),
    ):
        with pytest.raises(SystemExit) as caught:
            run(["quality", "--device", "cpu", *arguments])
        output = capsys.readouterr()
        assert (caught.value.code, output.out) == (1, "")
        assert message in output.err.replace("\n", " ")


def study_of(folder: Path, codec: str) -> Study:
    return Study(
        model=str(folder),
        device=DeviceChoice.CPU,
        codec=codec,
        text=read_text(None)[1][:400],
        mode=Mode.STORAGE,
        tokens=320,
    )


def test_a_model_that_computes_nothing_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    tensors["model.layers.1.self_attn.v_proj.weight"] *= float("nan")
    folder = write_folder(tmp_path / "nan", config, tensors)
    with pytest.raises(ConfigError, match="the model's own logits"):
        study_of(folder, "raw").run("text", lambda _: None)


def test_values_that_every_codec_refuses_are_an_error(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    # Beyond the scales of fp16, and still finite for the model.
    tensors["model.layers.0.self_attn.v_proj.weight"] *= 1e8
    folder = write_folder(tmp_path / "huge", config, tensors)
    with pytest.raises(CodecError, match="no codec can be measured: int8: "):
        study_of(folder, "int8").run("text", lambda _: None)
    report = study_of(folder, "all").run("text", lambda _: None)
    assert "int8" in {each.codec for each in report.skipped}
    assert "raw" in {each.codec for each in report.results}


def test_without_torch_the_command_is_listed_and_says_what_it_needs() -> None:
    listed, asked = (without_torch(argument) for argument in ("--help", "quality"))
    assert listed.returncode == 0, listed.stderr
    assert re.search("quality +Measure what KV codecs cost", listed.stdout)
    assert asked.returncode == 1
    assert asked.stderr == ('error: kvtier quality needs torch: pip install "kvtier[torch]"\n'), (
        asked.stderr
    )
