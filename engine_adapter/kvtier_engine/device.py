"""Where a model runs."""

from __future__ import annotations

import torch

from kvtier.errors import ConfigError
from kvtier_engine.options import DeviceChoice


def device_name(choice: DeviceChoice) -> str:
    """Return torch's name of the device; ``ConfigError`` for one that is not there."""
    if choice is DeviceChoice.AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if choice is DeviceChoice.CUDA and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine or this torch has no CUDA device")
    return choice.value
