"""Where a shard's sections lie behind its header: one after the other, each aligned to 4096."""

from __future__ import annotations

from kvtier.constants import ALIGN_BYTES
from kvtier.interfaces import BlockCodec
from kvtier.types import ShardLayout


def aligned_bytes(nbytes: int) -> int:
    """Round up to the alignment of sections and slots."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def zero_gaps(codec: BlockCodec, layout: ShardLayout, sections: range, payload: memoryview) -> None:
    """Set what lies behind some sections, before the next ones, to zero.

    A slot may have held another namespace's chunk, of which nothing may remain in this one's.
    """
    start = section_offset(codec, layout, sections.start)
    for section in sections:
        nbytes = codec.section_bytes(layout, section)
        end = min(start + aligned_bytes(nbytes), len(payload))
        payload[start + nbytes : end] = bytes(end - start - nbytes)
        start = end


def section_offset(codec: BlockCodec, layout: ShardLayout, section: int) -> int:
    """Bytes from the start of section 0 to the start of ``section``.

    ``section == layout.sections`` gives the size of the whole payload.
    """
    return sum(aligned_bytes(codec.section_bytes(layout, index)) for index in range(section))
