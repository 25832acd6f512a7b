"""One shard as it comes out of a remote: as it was sealed, or encoded and then decoded.

Which of the two, its first bytes say, not any setting: whoever wrote it may have had others. Reads
that were begun before that is known went to the slot; what of them is encoded is moved to scratch
memory, and nothing is decoded to the slot while another of them may still write there.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.constants import REMOTE_STEP_BYTES
from kvtier.errors import FormatError, IdentityError
from kvtier.shard_format import ShardHeader, parse_header
from kvtier.stored_shard import first_bytes, parse_stored, stored_header_bytes
from kvtier.tiers.arrival import Arrival, Expected, Step, check_expected, read_steps
from kvtier.tiers.decoding import ByteCodecs, DecodedArrival
from kvtier.tiers.scratch import Scratch


class OtherCodecError(IdentityError):
    """The chunk that was asked for, packed with another codec."""

    def __init__(self, codec: str) -> None:
        super().__init__(f"codec is {codec!r}")
        self.codec = codec


@dataclass(frozen=True, slots=True)
class Part:
    """A read of a step: ``into`` gets what lies from the step's start on."""

    step: Step
    into: memoryview
    in_slot: bool


class Incoming:
    """Says where a shard's reads go, and verifies them in their order. One thread at a time.

    ``slot`` is the caller's, and so is what ``begin`` gave out until it was read; ``end`` comes
    when all of that has been. Scratch memory is taken for what turns out to be encoded, no more
    than the sealed shard has.
    """

    def __init__(
        self,
        slot: memoryview,
        expected: Expected,
        codecs: ByteCodecs,
        scratch: Scratch,
        *,
        shrinks: bool,
    ) -> None:
        """Expect it to be encoded where it ``shrinks``: reads behind its end would be in vain."""
        self._slot = slot
        self._expected = expected
        self._codecs = codecs
        self._scratch = scratch
        self._shrinks = shrinks
        self._sealed: Arrival | None = None
        self._decoded: DecodedArrival | None = None
        self._buffer: memoryview | None = None
        self._data = slot[:0]
        self._slot_reads = 0
        self._come = 0
        #: How long the object is, where it is encoded.
        self.stored_bytes: int | None = None
        self._sections = 0
        # The first one has any header whole.
        header_bytes = stored_header_bytes(expected.layout.sections)
        self.steps = read_steps(expected.geometry, max(REMOTE_STEP_BYTES, header_bytes))

    @property
    def waits(self) -> bool:
        """True while steps behind the first one are better not begun."""
        return self._shrinks and self._sealed is None and self._decoded is None

    @property
    def whole(self) -> bool:
        """True once every section lies in the slot, verified."""
        return self._sections == self._expected.layout.sections

    def begin(self, step: Step) -> Part | None:
        """Return where a step is to be read to; None: nothing lies there."""
        if self._decoded is None:
            self._slot_reads += 1
            return Part(step, self._slot[step.start : step.end], in_slot=True)
        into = self._data[step.start : step.end]
        return Part(step, into, in_slot=False) if len(into) else None

    def needs(self, part: Part) -> bool:
        """Tell whether any of a part belongs to the object, as far as is known."""
        return self._decoded is None or part.step.start < len(self._data)

    def take(self, part: Part, count: int) -> int:
        """Verify a part of which ``count`` bytes came; return how many sections may be used.

        Blocks, the GIL released for most of it. Raises ``ShardError`` when the bytes are not the
        expected shard, ``OtherCodecError`` where they are in another codec, ``RegistryError`` or
        ``MissingExtraError`` where the byte codec that encoded them is not installed.
        """
        self._slot_reads -= part.in_slot
        if self._sealed is None and self._decoded is None:
            self._open(part.into[:count])
        if self._sealed is not None:
            if count < len(part.into):
                raise FormatError(f"an object ends before byte {part.step.end}")
            self._sealed.take(part.step)
            self._sections = part.step.sections.stop
        elif self._decoded is not None:
            self._move(part, count)
            if not self._slot_reads:
                self._sections = self._decoded.take(self._come)
        return self._sections

    def end(self) -> None:
        """Give back what was taken beside the slot; nothing touches it any more."""
        if self._buffer is not None:
            self._scratch.give(self._buffer)
            self._buffer, self._data = None, self._slot[:0]

    def _open(self, data: memoryview) -> None:
        _, encoded = first_bytes(data)
        if not encoded:
            raise_for_other_codec(parse_header(data), self._expected)
            self._sealed = Arrival(self._slot, self._expected)
            return
        stored = parse_stored(data)
        raise_for_other_codec(stored.header, self._expected)
        # From here on the length is known to be no more than the slot's.
        check_expected(stored.header, self._expected)
        self.stored_bytes = stored.stored_bytes
        self._buffer = self._scratch.take(stored.stored_bytes)
        self._data = self._buffer[: stored.stored_bytes]
        self._decoded = DecodedArrival(self._data, self._slot, self._expected, self._codecs)

    def _move(self, part: Part, count: int) -> None:
        """Have a part of an encoded shard where the others are."""
        start, end = part.step.start, min(part.step.end, len(self._data))
        if start < end:
            if count < end - start:
                raise FormatError(f"an object ends before byte {end}")
            if part.in_slot:
                self._data[start:end] = part.into[: end - start]
        self._come = end


def raise_for_other_codec(header: ShardHeader, expected: Expected) -> None:
    """Tell the right chunk in another codec, which has other sizes, from a wrong one."""
    same = (header.chunk, header.shard, header.namespace) == (
        expected.chunk,
        expected.shard,
        expected.namespace,
    )
    if same and header.codec != expected.codec:
        raise OtherCodecError(header.codec)
