"""A model of full attention and sliding windows for vLLM, small enough to write in a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

#: Blocks of 32 tokens and chunks of 64: a window ends within a block.
WINDOW_TOKENS: Final = 60
#: What vLLM is told beside the folder: the weights follow from a seed.
ENGINE: Final = {"load_format": "dummy", "max_num_batched_tokens": 96}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def write_hybrid(folder: Path, **changes: Any) -> Path:
    """Write the config of a Gemma 3 of six layers, and return the folder.

    Its norms behind attention make whatever comes from KV matter, however small weights are.
    """
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 6,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
        "sliding_window": WINDOW_TOKENS,
        "query_pre_attn_scalar": 32,
        "vocab_size": 49_152,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder
