"""What differs between the versions of vLLM that the connector is written for.

vLLM calls its connectors' interface experimental and changes it with most minor versions, so a
version that was never tried is refused: a connector that half works is worth less than none.

What both of these versions do, and the connector leans on:

- The end of a load is told by the worker, as the request's id, and blocks that did not come as
  block ids in the same step. Such a request is computed from its first bad block on. That is no way
  for windows: what its blocks before that attend to may not be there. 0.32 can be told instead that
  all of a load has failed.
- ``get_kv_connector_stats`` of the scheduler's connector is called at the end of every step.
- ``handle_preemptions`` is called in every step before its forward, with the step's orders.
- Each layer's cache is a view ``[blocks, kv_heads, tokens, content]`` of any strides.

What differs: 0.26 asks for loads before a step's forward and 0.32 behind it, so orders are taken
before that; 0.32 alone can be told of a load that failed as a whole, so it alone serves windows.
0.26 has a medium of KV events for each kind of storage, 0.32 one for all, with the tier beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvtier.types import Tier
from kvtier_adapters.tested_versions import TestedVersions, minor_of

#: Minor versions that the connector is tested against.
TESTED: Final = ((0, 26), (0, 32))

#: The first one that can be told that a load has failed as a whole.
_FAILS_LOADS: Final = (0, 32)

#: Words for the tiers in KV events, by minor version.
_MEDIA: Final = {
    (0, 26): {Tier.DRAM: "CPU", Tier.DISK: "FS", Tier.REMOTE: "OBJ"},
    (0, 32): {Tier.DRAM: "CPU", Tier.DISK: "STORAGE", Tier.REMOTE: "STORAGE"},
}


def check_version(version: str, *, forced: bool) -> None:
    """Raise ``ConfigError`` for a version of vLLM that is not tested, unless it is forced."""
    tested = TestedVersions("vLLM", "the connector", TESTED, "kv_connector_extra_config")
    tested.check(version, forced=forced)


def media(version: str) -> Mapping[Tier, str]:
    """Return a version's words for the tiers in KV events; the newest ones if it is not known."""
    known = minor_of(version) or TESTED[-1]
    return _MEDIA.get(known, _MEDIA[TESTED[-1]])


def fails_loads(version: str) -> bool:
    """Tell whether a version can be told that a load has failed as a whole."""
    return (minor_of(version) or TESTED[-1]) >= _FAILS_LOADS
