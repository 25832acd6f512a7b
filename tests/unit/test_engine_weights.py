"""Model files: folders, shards, identity, and a cache that is never torn."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtier.errors import ConfigError
from kvtier.model_files.cache import (
    STAGING_S_MAX,
    cache_folder,
    cached_folder,
    file_identity,
)
from kvtier.model_files.folder import INDEX_NAME
from kvtier.types import GroupKind
from kvtier_engine.weights.load import kv_layout, load_model
from kvtier_engine.weights.safetensors_folder import SafetensorsFolder
from tests.lib.tiny_llama import (
    VOCAB_SIZE,
    Tensors,
    assert_computes,
    tiny_config,
    tiny_tensors,
    write_folder,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvtier"


def shard(folder: Path, tensors: Tensors) -> None:
    """Replace the one file of a folder by two and an index."""
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number in range(2):
        part = {name: tensors[name] for name in names[number::2]}
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_folder_loads_whole_or_in_shards(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    folder = write_folder(tmp_path / "model", config, tensors)
    whole = load_model(str(folder))
    shard(folder, tensors)
    sharded = load_model(str(folder))
    for loaded in (whole, sharded):
        assert_computes(loaded, config, tensors)
        assert (loaded.name, loaded.dtype) == ("model", "float32")
        assert loaded.tokenizer.eos_ids == (256,)
    assert whole.weights_id == sharded.weights_id


def test_weights_id_sees_every_byte_name_and_dtype(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    seen = set()
    for number, change in enumerate(("none", "bit", "name", "dtype")):
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        if change == "bit":
            changed["model.norm.weight"].view(torch.int32)[-1] ^= 1
        if change == "name":
            changed["extra.weight"] = changed.pop("model.norm.weight")
        if change == "dtype":
            changed["model.norm.weight"] = changed["model.norm.weight"].view(torch.int32)
        folder = write_folder(tmp_path / f"model{number}", config, changed)
        seen.add(SafetensorsFolder(folder).weights_id())
    assert len(seen) == 4


def test_weights_id_follows_a_file_that_changes(tmp_path: Path, own_cache: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    folder = write_folder(tmp_path / "model", config, tensors)
    first = SafetensorsFolder(folder).weights_id()
    assert SafetensorsFolder(folder).weights_id() == first
    assert len(list((own_cache / "weights_ids").iterdir())) == 1
    tensors["model.norm.weight"] += 1
    write_folder(folder, config, tensors)
    # Same size; the clock of a file system may not have ticked either.
    state = (folder / "model.safetensors").stat()
    os.utime(folder / "model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns + 1_000_000))
    assert SafetensorsFolder(folder).weights_id() != first


def test_weights_id_can_be_declared(tmp_path: Path, own_cache: Path) -> None:
    config = tiny_config()
    folder = write_folder(tmp_path / "model", config, tiny_tensors(config))
    assert load_model(str(folder), weights_id="mine").weights_id == "mine"
    assert not own_cache.exists()


def test_a_loaded_model_does_not_change_with_its_file(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    folder = write_folder(tmp_path / "model", config, tensors)
    loaded = load_model(str(folder))
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"\xff" * (file.stat().st_size - 4096))
    assert_computes(loaded, config, tensors)


def test_bfloat16_weights_compute_in_float32_on_a_cpu(tmp_path: Path) -> None:
    config = tiny_config(torch_dtype="bfloat16")
    tensors = {name: tensor.bfloat16() for name, tensor in tiny_tensors(config).items()}
    folder = write_folder(tmp_path / "model", config, tensors)
    loaded = load_model(str(folder))
    assert loaded.dtype == "float32"
    assert_computes(loaded, config, tensors)
    half = load_model(str(folder), dtype="bfloat16")
    assert half.dtype == "bfloat16"
    assert half.weights_id == loaded.weights_id
    with pytest.raises(ConfigError, match="dtype = 'int8'; allowed: float32"):
        load_model(str(folder), dtype="int8")


def test_layout_of_a_model(tmp_path: Path) -> None:
    config = tiny_config()
    loaded = load_model(str(write_folder(tmp_path / "model", config, tiny_tensors(config))))
    layout = kv_layout(loaded.config, loaded.dtype, chunk_tokens=64)
    (group,) = layout.groups
    assert layout.chunk_tokens == 64
    assert (group.kind, group.layers, group.kv_heads) == (GroupKind.FULL, (0, 1, 2), 2)
    assert (group.k_dim, group.v_dim, group.dtype) == (8, 8, "float32")
    assert loaded.rope_text == loaded.config.rope_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = tiny_config()
    return write_folder(tmp_path / "model", config, tiny_tensors(config))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_missing_and_misshapen_tensors_are_named(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, **{name: None})
    with pytest.raises(ConfigError, match=f"tensor '{name}' is missing"):
        load_model(str(folder))
    rewrite(folder, **{name: torch.zeros(48, 64)})
    with pytest.raises(ConfigError, match=r"\(48, 64\); config.json says \(64, 48\)"):
        load_model(str(folder))


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model 'nowhere'; allowed: 'smollm2-135m'"):
        load_model("nowhere")
    with pytest.raises(ConfigError, match=r"x\.gguf: no such file"):
        load_model(str(tmp_path / "x.gguf"))
    (folder / "config.json").rename(folder / "kept")
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_model(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_model(str(folder))
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        load_model(str(folder))


def test_a_torn_weight_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        load_model(str(folder))
    file.unlink()
    with pytest.raises(ConfigError, match="exactly one"):
        load_model(str(folder))


def test_an_index_is_held_to_its_word(folder: Path) -> None:
    shard(folder, load_file(folder / "model.safetensors"))
    index = json.loads((folder / INDEX_NAME).read_text())
    good = dict(index["weight_map"])
    for weight_map, message in (
        ({}, "weight_map"),
        (good | {"more.weight": "model-00001-of-00002.safetensors"}, "'more.weight' is not in"),
        (good | {"more.weight": "../model/other.safetensors"}, "not the name of a file"),
        (good | {"more.weight": "other.safetensors"}, r"other\.safetensors: no such file"),
    ):
        (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ConfigError, match=message):
            load_model(str(folder))


def test_more_tokens_than_the_model_knows_are_refused(folder: Path) -> None:
    config = tiny_config(vocab_size=VOCAB_SIZE - 1)
    write_folder(folder, config, tiny_tensors(config))
    with pytest.raises(ConfigError, match=f"{VOCAB_SIZE} tokens, the model {VOCAB_SIZE - 1}"):
        load_model(str(folder))


def writing(text: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        (folder / "data").write_text(text)

    return build


class BuildInterruptedError(Exception):
    """Stands for a process that dies while it builds."""


def test_an_interrupted_build_leaves_nothing_to_be_used(own_cache: Path) -> None:
    def torn(folder: Path) -> None:
        (folder / "data").write_text("half")
        raise BuildInterruptedError

    with pytest.raises(BuildInterruptedError):
        cached_folder("models", "x", torn, kept_max=1)
    assert not (own_cache / "models" / "x").exists()
    assert not list((own_cache / "models").iterdir())
    folder = cached_folder("models", "x", writing("whole"), kept_max=1)
    assert (folder / "data").read_text() == "whole"


def test_of_two_builders_the_first_wins(own_cache: Path) -> None:
    def slow(folder: Path) -> None:
        (folder / "data").write_text("second")
        cached_folder("models", "x", writing("first"), kept_max=1)

    made = cached_folder("models", "x", slow, kept_max=1)
    assert (made / "data").read_text() == "first"
    assert [path.name for path in (own_cache / "models").iterdir()] == ["x"]


def test_of_a_kind_those_are_kept_that_were_asked_for_last(own_cache: Path) -> None:
    beside = own_cache / "disk"
    beside.mkdir(parents=True)
    for name in ("a", "b"):
        folder = cached_folder("models", name, writing(name), kept_max=2)
        os.utime(folder, (0.0, {"a": 1000.0, "b": 2000.0}[name]))
    assert cached_folder("models", "a", writing("never"), kept_max=2).stat().st_mtime > 2000.0
    cached_folder("models", "c", writing("c"), kept_max=2)
    cached_folder("others", "d", writing("d"), kept_max=2)
    assert {path.name for path in (own_cache / "models").iterdir()} == {"a", "c"}
    assert (own_cache / "others" / "d").is_dir()
    assert beside.is_dir(), "what is not a result stays"


def test_what_a_dead_builder_left_goes_after_a_day(own_cache: Path) -> None:
    dead, alive = own_cache / "models" / ".x-dead", own_cache / "models" / ".x-alive"
    for folder in (dead, alive):
        folder.mkdir(parents=True)
        (folder / "data").write_text("half")
    os.utime(dead, (0.0, alive.stat().st_mtime - STAGING_S_MAX - 60.0))
    cached_folder("models", "x", writing("whole"), kept_max=1)
    assert {path.name for path in (own_cache / "models").iterdir()} == {".x-alive", "x"}


def test_identity_sees_path_size_time_and_purpose(tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    file.write_text("1")
    other.write_text("1")
    names = {file_identity([file], "p"), file_identity([other], "p"), file_identity([file], "q")}
    file.write_text("12")
    names.add(file_identity([file], "p"))
    state = file.stat()
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1_000_000))
    names.add(file_identity([file], "p"))
    assert len(names) == 5


def test_the_cache_lies_where_the_environment_says(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_folder() == own_cache
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "kvtier"
