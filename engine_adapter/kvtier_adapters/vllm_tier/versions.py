"""Which versions of vLLM have secondary tiers as this one is written for.

vLLM 0.26 has them too, but not so that KV is safe in one that outlives it:

- What it tells a tier of itself does not say the layout of a chunk's bytes, nor whether they are
  canonical or replicated. Chunks of another layout would be taken for the same.
- Jobs are ``JobMetadata`` with ``block_ids`` (0.32: ``TransferJob`` with ``chunk_ids``), and their
  results say no more than that all succeeded: one chunk that is lost fails all of a job.
- A tier has no medium, no source of hits and no back-pressure, and is not told the size of a chunk.
"""

from __future__ import annotations

from typing import Final

from kvtier_adapters.tested_versions import TestedVersions

#: Minor versions that the tier is tested against.
TESTED: Final = ((0, 32),)


def check_version(version: str, *, forced: bool) -> None:
    """Raise ``ConfigError`` for a version of vLLM that is not tested, unless it is forced."""
    tested = TestedVersions("vLLM", "the secondary tier", TESTED, "its table of secondary_tiers")
    tested.check(version, forced=forced)
