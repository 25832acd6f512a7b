"""Making a chunk in DRAM ready to leave it: sealed, and encoded where that saves enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.cache.planner import ChunkShape
from kvtier.interfaces import ByteCodec
from kvtier.registry import byte_codecs
from kvtier.shard_format import ShardDescription, seal
from kvtier.stored_shard import (
    Encoding,
    encode_sections,
    stored_bytes_max,
    stored_sizes,
    write_header,
)
from kvtier.tiers.scratch import Scratch
from kvtier.types import Entry, ShardId


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's shards as they are stored: in ``buffers``, or in their slots as they were sealed.

    Whoever has it gives it back to its encoder, once nobody reads it any more.
    """

    shards: Mapping[ShardId, memoryview]
    buffers: tuple[memoryview, ...]

    @property
    def sizes(self) -> dict[ShardId, int]:
        """The bytes that each shard takes below DRAM."""
        return {shard: len(data) for shard, data in self.shards.items()}


class ChunkEncoder:
    """Encodes chunks with one byte codec into memory of its own. Safe from any thread."""

    def __init__(self, codec: ByteCodec) -> None:
        self._codec = codec
        self._scratch = Scratch()

    @property
    def name(self) -> str:
        """The byte codec's."""
        return self._codec.name

    def encode(
        self, slots: Mapping[ShardId, memoryview], descriptions: Mapping[ShardId, ShardDescription]
    ) -> EncodedChunk:
        """Seal a chunk's slots and encode them, where that saves enough.

        The caller keeps the slots pinned until the chunk is given back. Blocks for as long as
        the codec takes, the GIL released for most of it. Raises ``FormatError`` as ``seal``.
        """
        headers = {shard: seal(slots[shard], text) for shard, text in descriptions.items()}
        buffers: dict[ShardId, memoryview] = {}
        encodings: dict[ShardId, Encoding] = {}
        for shard, header in headers.items():
            buffers[shard] = self._scratch.take(stored_bytes_max(header, self._codec))
            encodings[shard] = encode_sections(slots[shard], header, self._codec, buffers[shard])
        sizes = stored_sizes([(len(slots[s]), each.end) for s, each in encodings.items()])
        if sizes is None:
            found = EncodedChunk(dict(slots), ())
            self.give_back(EncodedChunk({}, tuple(buffers.values())))
            return found
        shards = {
            shard: slots[shard]
            if nbytes == len(slots[shard])
            else write_header(slots[shard], encodings[shard], buffers[shard], nbytes)
            for shard, nbytes in zip(encodings, sizes, strict=True)
        }
        return EncodedChunk(shards, tuple(buffers.values()))

    def give_back(self, chunk: EncodedChunk) -> None:
        """Use the buffers of a chunk again."""
        for buffer in chunk.buffers:
            self._scratch.give(buffer)


class Shrinkage:
    """How much smaller chunks have become so far, all together. Under its owner's lock."""

    def __init__(self) -> None:
        self._sealed_bytes = self._stored_bytes = 0

    def note(self, sealed_bytes: int, stored_bytes: int) -> None:
        """Take in what became of a chunk."""
        self._sealed_bytes += sealed_bytes
        self._stored_bytes += stored_bytes

    def expected_bytes(self, nbytes: int) -> int:
        """Return about how many bytes a chunk of so many takes below DRAM."""
        return nbytes * self._stored_bytes // self._sealed_bytes if self._sealed_bytes else nbytes


def named_encoder(name: str | None) -> ChunkEncoder | None:
    """Return the encoder of the byte codec of that name; None: nothing is encoded.

    Raises ``RegistryError`` for a name that is not known, and as ``chunk_encoder``.
    """
    return chunk_encoder(byte_codecs.load(name)()) if name else None


def chunk_encoder(codec: ByteCodec) -> ChunkEncoder:
    """Return the encoder of a codec that works here.

    Raises ``MissingExtraError`` where what the codec needs is not installed.
    """
    codec.encode(memoryview(b""), 1, memoryview(bytearray(codec.encoded_bytes_max(0))))
    return ChunkEncoder(codec)


def describe(entry: Entry, namespace: bytes, shape: ChunkShape, shard: ShardId) -> ShardDescription:
    """Return what the header of a chunk's shard says."""
    layout = shape.layouts[shard]
    return ShardDescription(
        chunk=entry.key,
        shard=shard,
        parent=entry.parent,
        position=entry.position,
        namespace=namespace,
        codec=shape.codec,
        codec_params={},
        layout=layout,
        token_count=layout.tokens,
        has_sinks=layout.sink_tokens > 0,
        section_bytes=shape.geometries[shard].section_bytes,
    )
