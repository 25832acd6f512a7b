"""In how many parts KV heads are stored, so that engines of several degrees share them."""

from __future__ import annotations

from kvtier.errors import ConfigError
from kvtier_adapters.vllm.geometry import Geometry


def stored_head_groups(geometry: Geometry, asked: int, *, stores: bool) -> int:
    """Return the degree of the stored form; ``asked`` is the option, 0 where nothing was said.

    Engines share if they name the same one. Raises ``ConfigError`` for one that cuts a head, that
    no rank of an engine which ``stores`` holds a whole part of, or for blocks of which only the
    bytes are known.
    """
    degree, heads = geometry.tp_size, geometry.kv_heads
    if asked in (0, degree):
        return degree
    where = f"kv_connector_extra_config.head_groups = {asked}"
    if geometry.opaque:
        raise ConfigError(
            f"{where}: where the heads lie in a block is not known here; allowed is {degree}, the "
            "tensor-parallel degree"
        )
    if asked < 0 or (heads % asked and asked % heads):
        raise ConfigError(
            f"{where}: allowed is what divides the {heads} KV heads, or a multiple of them"
        )
    # Beyond a part for each head parts are replicas, and so are ranks.
    if stores and min(asked, heads) % min(degree, heads):
        raise ConfigError(
            f"{where}: no rank holds a whole part to store; allowed is a multiple of the "
            f'tensor-parallel degree, {degree}, or kv_role "kv_consumer"'
        )
    return asked
