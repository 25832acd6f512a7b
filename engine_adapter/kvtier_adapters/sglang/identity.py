"""What a page's bytes depend on and SGLang's page hash does not say. Pure.

SGLang's key of a page is a hash of tokens. Model, ranks, dtype and layout have to be told apart
beside it, or two servers read each other's pages.
"""

from __future__ import annotations

from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier_adapters.payloads.options import PlugOptions

SYSTEM: Final = "sglang hicache"

#: Pools whose pages differ from rank to rank even where the model's KV does not.
_SHARDED: Final = frozenset({"mamba"})
#: What host pools of one kind or another say of the form of their pages.
_FORM: Final = (
    "layout",
    "dtype",
    "store_dtype",
    "page_size",
    "logical_page_size",
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "num_mamba_layers",
    "temporal_dtype",
    "conv_dtype",
    "conv_state_shapes",
    "temporal_state_shape",
)


def rank_text(config: Any, pool: str = "kv") -> str:
    """Return which share of a model this rank has: what other ranks' pages differ by.

    ``config`` is a ``HiCacheStorageConfig``. Latent KV (MLA) is the same on all tensor ranks, so
    they share it; what replicas of the data rank hold is the same in any case.
    """
    shared = config.is_mla_model and pool not in _SHARDED
    parts = [f"tp={'all' if shared else config.tp_rank}/{config.tp_size}"]
    for name in ("pp", "attn_cp", "dcp"):
        size = getattr(config, f"{name}_size", 1)
        if size > 1:
            parts.append(f"{name}={getattr(config, f'{name}_rank')}/{size}")
    return ",".join(parts)


def folder_name(config: Any) -> str:
    """Return a name that no other process of the server has, for its folder.

    Replicas without data-parallel attention are all told that they are the first.
    """
    ranks = [("tp", config.tp_rank), ("pp", config.pp_rank), ("cp", config.attn_cp_rank)]
    ranks += [("dp", getattr(config, "dp_rank", 0))]
    return "-".join(f"{name}{rank}" for name, rank in ranks)


def page_scheme(config: Any, pool: str, host_pool: Any, page_bytes: tuple[int, ...]) -> str:
    """Return the scheme of a pool's pages: model, ranks and form.

    ``page_bytes`` are the sizes of a page's pieces, in order.
    """
    form = [
        f"{name}={getattr(host_pool, name)}"
        for name in _FORM
        if getattr(host_pool, name, None) is not None
    ]
    parts = [
        f"pages 1: {pool}",
        f"model={config.model_name}",
        rank_text(config, pool),
        type(host_pool).__name__,
        *form,
        "pieces=" + ",".join(map(str, page_bytes)),
    ]
    return "; ".join(parts)


def check_ranks(config: Any, options: PlugOptions) -> None:
    """Refuse a set-up in which no rank could find what another one has written."""
    if config.is_mla_model and config.tp_size > 1 and not options.remote:
        raise ConfigError(
            f"kvtier.remote is missing: of the {config.tp_size} ranks of a model with latent KV "
            "(MLA) one writes for all, so they need a store in common, as a KVTier daemon: "
            '"remote": "kvtier+unix:///run/kvtier/kvtier.sock"'
        )
