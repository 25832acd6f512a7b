"""``kvtier calibrate`` end to end: a tiny model whose K is known, and the bundled one."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kvtier.cli.main import app, run
from kvtier.codecs.assay import CODES_DB
from kvtier.codecs.calibration import parse_calibration
from kvtier.codecs.calibration_store import FOLDER, CalibrationStore
from kvtier.types import Namespace
from kvtier_engine.calibration import report
from kvtier_engine.calibration.learn import Lesson
from kvtier_engine.calibration.report import Layer, Report, as_json, summary
from kvtier_engine.options import BUNDLED_MODEL
from kvtier_engine.quality.text import read_text
from kvtier_engine.weights.load import LoadedModel, kv_layout, load_model
from tests.lib.tiny_llama import Tensors, tiny_config, tiny_tensors, write_folder
from tests.lib.without_torch import without_torch

TOKENS = 400


class Tiny:
    """A tiny model on disk whose tokens are bytes."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = tiny_config(num_hidden_layers=2)
        self.tensors: Tensors = tiny_tensors(self.config)
        self.folder = write_folder(folder, self.config, self.tensors)
        self.loaded: LoadedModel = load_model(str(self.folder))

    @property
    def namespace(self) -> Namespace:
        layout = kv_layout(self.loaded.config, "bfloat16")
        return Namespace(self.loaded.weights_id, layout, rope=self.loaded.rope_text)

    def first_layer_k(self, ids: list[int]) -> torch.Tensor:
        """K before RoPE of the first layer, ``[tokens, heads, dim]``: it depends on ids alone."""
        rows = self.tensors["model.embed_tokens.weight"][ids].double()
        rows /= (rows.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        rows *= self.tensors["model.layers.0.input_layernorm.weight"].double()
        k = rows @ self.tensors["model.layers.0.self_attn.k_proj.weight"].double().T
        return k.view(len(ids), self.config["num_key_value_heads"], self.config["head_dim"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "own.txt"
    path.write_text(read_text(None)[1][:2000], encoding="ascii", errors="replace")
    return path


def calibrate(tiny: Tiny, text: Path, *more: object) -> Any:
    arguments = ["--model", tiny.folder, "--text", text, "--tokens", TOKENS, *more]
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def test_the_means_are_those_of_k_before_rope(tiny: Tiny, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.kvc"
    done = calibrate(tiny, text, "--output", output, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    data = output.read_bytes()
    assert found["digest"] == hashlib.sha256(data).hexdigest()
    learned = parse_calibration(data, tiny.namespace.layout)
    assert list(learned.weak_layers) == found["weak_layers"]
    # One window of 512 tokens, sinks left out.
    ids = tiny.loaded.tokenizer.encode(text.read_text(), add_special_tokens=False)
    expected = tiny.first_layer_k(ids[:512])[4:].mean(0)
    np.testing.assert_allclose(learned.means[0][0], expected.float().numpy(), atol=1e-5)
    held_out = tiny.first_layer_k(ids[512:1024])[4:]
    share = 1 - (held_out - expected).square().sum() / held_out.square().sum()
    assert found["layers"][0]["mean_share"] == pytest.approx(float(share), rel=1e-3)


def test_a_calibration_keeps_the_list_of_weak_layers(
    tiny: Tiny, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = json.loads(calibrate(tiny, text, "--json").stdout)
    assert plain["weak_layers"] == []
    monkeypatch.setattr(report, "MISSED_DB_MAX", -20.0)
    output = tmp_path / "model.kvc"
    found = json.loads(calibrate(tiny, text, "--output", output, "--json").stdout)
    assert parse_calibration(output.read_bytes(), tiny.namespace.layout).weak_layers == (0, 1)
    assert found["digest"] == hashlib.sha256(output.read_bytes()).hexdigest() != plain["digest"]


def test_engines_over_a_disk_tier_find_it_and_the_first_one_stays(
    tiny: Tiny, text: Path, tmp_path: Path
) -> None:
    first = json.loads(calibrate(tiny, text, "--disk", tmp_path, "--json").stdout)
    store = CalibrationStore(tmp_path / FOLDER)
    for codec in ("int4", "int5k4v-c"):
        found = store.load(tiny.namespace, codec)
        assert found is not None
        assert found.digest == first["digest"]
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    again = calibrate(tiny, other, "--disk", tmp_path)
    assert again.exit_code == 0
    assert f"int4: {first['digest']}, which was there before" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "255"], "allowed: 256 to"),
        (["--tokens", "9000"], "2000 tokens; 9728 are needed"),
        (["--output", "/nowhere/file"], "/nowhere/file: No such file"),
        (["--text", "/nowhere/file"], "/nowhere/file: No such file"),
    ],
    ids=["few", "many", "output", "text"],
)
def test_what_cannot_be_is_one_line(
    tiny: Tiny,
    text: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--model", str(tiny.folder)]
    for flag, value in (("--text", str(text)), ("--tokens", str(TOKENS))):
        given += [] if flag in arguments else [flag, value]
    with pytest.raises(SystemExit):
        run(["calibrate", *given, *arguments])
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error:" in each]
    assert message in line


def test_without_torch_the_command_is_listed_and_says_what_it_needs() -> None:
    listed, asked = (without_torch(argument) for argument in ("--help", "calibrate"))
    assert re.search("calibrate +Learn the mean of K", listed.stdout)
    assert asked.returncode == 1
    assert asked.stderr == 'error: kvtier calibrate needs torch: pip install "kvtier[torch]"\n'


def layer(index: int, k_db: float, v_db: float = CODES_DB) -> Layer:
    return Layer(index, mean_share=0.75, k_expected_db=26.2, k_db=k_db, v_db=v_db)


def test_layers_that_miss_what_is_expected_are_named() -> None:
    layers = (layer(0, 26.0), layer(1, 25.0), layer(2, 27.0, v_db=19.0))
    found = Report("model", "text", 8192, "d" * 64, layers)
    assert found.weak_layers == (1, 2)
    assert "Layers 1, 2 lose" in summary(found)
    assert "int6" in summary(found)
    assert as_json(found)["weak_layers"] == [1, 2]
    assert "75 %" in summary(Report("model", "text", 8192, "d" * 64, layers[:1]))


def test_most_of_the_bundled_models_k_is_its_mean() -> None:
    """Learned from one page of a book and looked at on the next."""
    loaded = load_model(BUNDLED_MODEL, dtype="float32")
    lesson = Lesson(loaded, read_text(None)[1], tokens=500)
    fed: list[int] = []
    learned = lesson.learn(fed.append)
    layers = lesson.assess(learned, fed.append)
    assert sum(fed) == lesson.work_tokens == 1024
    assert 0.70 < fmean(each.mean_share for each in layers) < 0.82
    for each in layers:
        assert not each.weak, each
        assert each.k_db > CODES_DB + 2
