"""An encoded shard on its way into memory: verified as it was stored, then decoded."""

from __future__ import annotations

from kvtier.errors import FormatError
from kvtier.interfaces import ByteCodec
from kvtier.registry import byte_codecs
from kvtier.stored_shard import StoredHeader, decode_section, parse_stored
from kvtier.tiers.arrival import Expected, check_expected


class ByteCodecs:
    """The byte codecs of this process by name, each made once. Safe from any thread."""

    def __init__(self) -> None:
        self._made: dict[str, ByteCodec] = {}

    def get(self, name: str) -> ByteCodec:
        """Return a codec. Raises ``RegistryError`` or ``MissingExtraError`` where there is none."""
        codec = self._made.get(name)
        if codec is None:
            codec = self._made[name] = byte_codecs.load(name)()
        return codec


class DecodedArrival:
    """Decodes one encoded shard as it comes; one thread at a time.

    ``data`` has the shard's stored length, and ``slot`` that of the sealed one. Both are the
    caller's; nobody else writes to them until all was taken.
    """

    def __init__(
        self, data: memoryview, slot: memoryview, expected: Expected, codecs: ByteCodecs
    ) -> None:
        self._data = data
        self._slot = slot
        self._expected = expected
        self._codecs = codecs
        self._stored: StoredHeader | None = None
        self._codec: ByteCodec | None = None
        self._done = 0

    def take(self, nbytes: int) -> int:
        """Decode the sections that the first ``nbytes`` hold; return how many are decoded.

        The first call has the header with it, ``stored_header_bytes`` of the sections expected.
        What is in the slot afterwards is the sealed shard, byte for byte, as far as it goes.
        Blocks, the GIL released for most of it. Raises ``ShardError`` when the bytes are not the
        expected shard, and ``RegistryError`` or ``MissingExtraError`` where what encoded it is not
        installed.
        """
        stored, codec = self._begin()
        count = len(stored.encoding.section_bytes)
        while self._done < count and stored.span(self._done).stop <= nbytes:
            decode_section(self._data, stored, self._done, codec, self._slot)
            self._done += 1
        return self._done

    def _begin(self) -> tuple[StoredHeader, ByteCodec]:
        if self._stored is None or self._codec is None:
            stored = parse_stored(self._data)
            check_expected(stored.header, self._expected)
            if stored.stored_bytes != len(self._data):
                raise FormatError(f"{len(self._data)} bytes, not {stored.stored_bytes}")
            self._codec = self._codecs.get(stored.encoding.byte_codec)
            self._slot[: len(stored.page)] = stored.page
            self._stored = stored
        return self._stored, self._codec
