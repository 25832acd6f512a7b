"""zstd for tiers below DRAM: exponents are compressed, mantissas are stored as they are."""

from __future__ import annotations

import struct
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtier.errors import CodecError
from kvtier.registry import import_problem

_Bytes = npt.NDArray[np.uint8]

_MAGIC: Final = b"KVZB"
_VERSION: Final = 1
#: magic, version, value bytes, whether stored as is, source bytes, compressed bytes.
_HEADER: Final = struct.Struct("<4sBB?xQQ")
_UNSIGNED: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
#: By value bytes: the planes beside the top one, as bytes a value and how far down they lie.
_PLANES: Final = {1: (), 2: ((1, -1),), 4: ((1, 15), (2, -1))}
#: Level 3 is slower and no smaller on exponents.
_LEVEL: Final = 1
#: Exponents repeat no strings, only their frequencies: those of a plane of 16 KiB differ from the
#: next one's. A block is no larger than the window, and a small table finds nothing sooner.
#: Against level 1 alone: 1.487 instead of 1.453 on bfloat16, at twice the speed.
_EXPONENTS: Final = {"window_log": 14, "hash_log": 6}
_WINDOW_BYTES_MAX: Final = 8 * 2**20
#: How many values are turned at a time: few enough to stay in a CPU's cache.
_BLOCK_VALUES: Final = 2**15


class ZstdCodec:
    """Takes raw shards of floats to about two thirds, bit for bit; measured 1.49 on KV.

    Each value is turned left by one bit, which brings bfloat16's and float32's exponent into the
    top byte. The top bytes become one zstd frame, level 1; the rest (mantissa and sign, noise) is
    stored beside it, in planes: of float32 a byte, then two, of bfloat16 a byte of each value::

        [ header, 24 bytes ][ zstd frame of the top bytes ][ planes of the other bytes ]

    Bytes of any meaning (``value_bytes`` 1) become one frame. What does not shrink is stored as it
    is. Needs the extra ``zstd`` at first use.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def name(self) -> str:
        """``zstd``."""
        return "zstd"

    def encoded_bytes_max(self, nbytes: int) -> int:
        """The header and the bytes as they are."""
        return _HEADER.size + nbytes

    def encode(self, source: memoryview, value_bytes: int, into: memoryview) -> int:
        """Encode; contract of ``ByteCodec.encode``. Raises ``CodecError`` for odd sizes."""
        nbytes = source.nbytes
        if value_bytes not in {1, 2, 4} or nbytes % value_bytes:
            raise CodecError(f"zstd takes values of 1, 2 or 4 bytes, not {nbytes} of {value_bytes}")
        if into.nbytes < self.encoded_bytes_max(nbytes):
            raise CodecError(f"{into.nbytes} bytes have no room for {nbytes} encoded")
        values = np.frombuffer(source, np.uint8)
        top, planes = _split(values, value_bytes)
        frame = np.frombuffer(self._compressor(value_bytes).compress(top.data), np.uint8)
        target = np.frombuffer(into, np.uint8)[_HEADER.size :]
        stored = len(frame) >= len(top)
        parts = [values] if stored else [frame, *planes]
        length = 0
        for part in parts:
            target[length : length + part.nbytes] = part.view(np.uint8)
            length += part.nbytes
        _HEADER.pack_into(
            into, 0, _MAGIC, _VERSION, value_bytes, stored, nbytes, 0 if stored else len(frame)
        )
        return _HEADER.size + length

    def decode(self, source: memoryview, into: memoryview) -> None:
        """Decode; contract of ``ByteCodec.decode``."""
        value_bytes, stored, frame_bytes = _read_header(source, into.nbytes)
        payload = np.frombuffer(source, np.uint8)[_HEADER.size :]
        target = np.frombuffer(into, np.uint8)
        if stored:
            target[:] = payload
            return
        top = self._decompress(payload[:frame_bytes], len(target) // value_bytes)
        _join(top, payload[frame_bytes:], value_bytes, target)

    def _decompress(self, frame: _Bytes, nbytes: int) -> _Bytes:
        """The bytes of a frame, which must say itself that it has ``nbytes``."""
        zstandard = _zstandard()
        try:
            # zstd allocates what the frame says, whatever it is told.
            if zstandard.frame_content_size(frame.data) != nbytes:
                raise CodecError("the zstd frame is of another length")
            content = self._decompressor().decompress(frame.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"the zstd frame is broken: {error}") from error
        return np.frombuffer(content, np.uint8)

    def _compressor(self, value_bytes: int) -> Any:
        """The thread's own: contexts are reused, and never shared."""
        name = "packed" if value_bytes == 1 else "exponents"
        if not hasattr(self._local, name):
            zstandard = _zstandard()
            known = zstandard.ZstdCompressionParameters
            chosen = known.from_level(_LEVEL, **({} if value_bytes == 1 else _EXPONENTS))
            compressor = zstandard.ZstdCompressor(compression_params=chosen)
            setattr(self._local, name, compressor)
        return getattr(self._local, name)

    def _decompressor(self) -> Any:
        if not hasattr(self._local, "decompressor"):
            self._local.decompressor = _zstandard().ZstdDecompressor(
                max_window_size=_WINDOW_BYTES_MAX
            )
        return self._local.decompressor


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise import_problem(error, "codec 'zstd'") from error
    return zstandard


def _read_header(source: memoryview, nbytes: int) -> tuple[int, bool, int]:
    """Value bytes, whether stored as is, frame bytes; all sizes fit each other and ``nbytes``."""
    if source.nbytes < _HEADER.size:
        raise CodecError(f"{source.nbytes} bytes hold no zstd header")
    magic, version, value_bytes, stored, total, frame_bytes = _HEADER.unpack_from(source)
    if (magic, version) != (_MAGIC, _VERSION) or value_bytes not in {1, 2, 4}:
        raise CodecError("no zstd header of this version")
    if total != nbytes or total % value_bytes:
        raise CodecError(f"{total} bytes were encoded, not {nbytes}")
    payload_bytes = total if stored else frame_bytes + total - total // value_bytes
    if source.nbytes != _HEADER.size + payload_bytes:
        raise CodecError(
            f"zstd payload of {source.nbytes - _HEADER.size}, not {payload_bytes} bytes"
        )
    return value_bytes, stored, frame_bytes


def _split(values: _Bytes, width: int) -> tuple[_Bytes, list[npt.NDArray[Any]]]:
    """The top byte of each value turned left by one bit, and planes of its other bytes."""
    if width == 1:
        return values, []
    numbers = values.view(_UNSIGNED[width])
    count = len(numbers)
    top = np.empty(count, np.uint8)
    planes = [np.empty(count, f"<u{nbytes}") for nbytes, _ in _PLANES[width]]
    turned, carried = (np.empty(min(count, _BLOCK_VALUES), numbers.dtype) for _ in range(2))
    for start in range(0, count, _BLOCK_VALUES):
        block = numbers[start : start + _BLOCK_VALUES]
        end = start + len(block)
        work, carry = turned[: len(block)], carried[: len(block)]
        np.right_shift(block, 8 * width - 9, out=work)
        np.copyto(top[start:end], work, casting="unsafe")
        for plane, (_, down) in zip(planes, _PLANES[width], strict=True):
            if down < 0:  # The lowest plane, into which the sign goes.
                np.left_shift(block, 1, out=work)
                np.right_shift(block, 8 * width - 1, out=carry)
                np.bitwise_or(work, carry, out=work)
            else:
                np.right_shift(block, down, out=work)
            np.copyto(plane[start:end], work, casting="unsafe")
    return top, planes


def _join(top: _Bytes, rest: _Bytes, width: int, target: _Bytes) -> None:
    """Undo ``_split``: fill ``target`` with the values."""
    if width == 1:
        target[:] = top
        return
    numbers = target.view(_UNSIGNED[width])
    count = len(numbers)
    planes = []
    for nbytes, down in _PLANES[width]:
        planes.append((np.frombuffer(rest.data, f"<u{nbytes}", count), down))
        rest = rest[nbytes * count :]
    room = np.empty(min(count, _BLOCK_VALUES), numbers.dtype)
    for start in range(0, count, _BLOCK_VALUES):
        block = numbers[start : start + _BLOCK_VALUES]
        end = start + len(block)
        work = room[: len(block)]
        np.copyto(block, top[start:end])
        np.left_shift(block, 8 * width - 9, out=block)
        for plane, down in planes:
            np.copyto(work, plane[start:end])
            if down < 0:
                block |= work >> 1
                np.left_shift(work, 8 * width - 1, out=work)
            else:
                np.left_shift(work, down, out=work)
            np.bitwise_or(block, work, out=block)
