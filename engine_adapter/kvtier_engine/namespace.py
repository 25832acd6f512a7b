"""Whose KV this engine's is: what has to be equal for another engine to read it."""

from __future__ import annotations

from kvtier.codecs.known import KnownCodecs
from kvtier.config import CacheConfig
from kvtier.types import Fidelity, KVLayout, Namespace
from kvtier_engine.weights.load import LoadedModel


def namespace_of(loaded: LoadedModel, layout: KVLayout, config: CacheConfig | None) -> Namespace:
    """Return the namespace of a model's KV, without a request's salt.

    What a lossy codec packs, in any tier, is kept apart from what is exact.
    """
    known = KnownCodecs()
    exact = config is None or all(known.get(name).traits.exact for name in config.codecs)
    return Namespace(
        weights_id=loaded.weights_id,
        layout=layout,
        rope=loaded.rope_text,
        fidelity=Fidelity.EXACT if exact else Fidelity.LOSSY,
    )
