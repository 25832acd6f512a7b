"""Model architectures by the name that stands in ``config.json``."""

from __future__ import annotations

from kvtier.errors import ConfigError, nearest
from kvtier_engine.models.config import ModelConfig
from kvtier_engine.models.llama import LlamaModel, TakeTensor

ARCHITECTURES: dict[str, type[LlamaModel]] = {"LlamaForCausalLM": LlamaModel}


def build_model(config: ModelConfig, take: TakeTensor) -> LlamaModel:
    """Build the model that ``config.architecture`` names; ``ConfigError`` for an unknown one."""
    try:
        architecture = ARCHITECTURES[config.architecture]
    except KeyError:
        raise ConfigError(
            f"unknown architecture {config.architecture!r}"
            f"{nearest(config.architecture, ARCHITECTURES)}; allowed: {', '.join(ARCHITECTURES)}"
        ) from None
    return architecture(config, take)
