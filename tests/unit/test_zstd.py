"""The byte codec zstd: bit-exact, bounded, and strict about what it decodes."""

from __future__ import annotations

import random
import struct
import sys
import threading

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvtier.codecs.zstd import ZstdCodec
from kvtier.errors import CodecError, MissingExtraError
from kvtier.interfaces import ByteCodec

HEADER_BYTES = 24


def encode(source: bytes, value_bytes: int) -> bytes:
    codec = ZstdCodec()
    into = bytearray(b"\xee") * codec.encoded_bytes_max(len(source))
    nbytes = codec.encode(memoryview(source), value_bytes, memoryview(into))
    assert into[nbytes:] == b"\xee" * (len(into) - nbytes)
    return bytes(into[:nbytes])


def decode(encoded: bytes, nbytes: int) -> bytes:
    into = bytearray(b"\xee") * nbytes
    ZstdCodec().decode(memoryview(encoded).toreadonly(), memoryview(into))
    return bytes(into)


def kv(count: int, value_bytes: int) -> bytes:
    """Normally distributed values as bfloat16 or float32."""
    values = np.random.default_rng(3).standard_normal(count).astype("<f4")
    bits = values.view("<u4")
    return bits.tobytes() if value_bytes == 4 else (bits >> 16).astype("<u2").tobytes()


def test_is_a_byte_codec() -> None:
    assert isinstance(ZstdCodec(), ByteCodec)
    assert ZstdCodec().name == "zstd"


@given(source=st.binary(max_size=200), repeats=st.integers(1, 50), width=st.sampled_from([1, 2, 4]))
def test_any_bytes_come_back(source: bytes, repeats: int, width: int) -> None:
    source = (source * repeats)[: len(source) * repeats // width * width]
    encoded = encode(source, width)
    assert len(encoded) <= ZstdCodec().encoded_bytes_max(len(source))
    assert decode(encoded, len(source)) == source


@pytest.mark.parametrize("width", [2, 4])
def test_every_bit_pattern_comes_back(width: int) -> None:
    """NaN payloads, denormals, both zeros; more than one block of values."""
    patterns = np.arange(2**16, dtype="<u2").repeat(3)
    source = patterns.tobytes() + bytes(1000)
    assert decode(encode(source, width), len(source)) == source


@pytest.mark.parametrize(("width", "ratio"), [(2, 1.43), (4, 1.18)])
def test_kv_shrinks_to_its_mantissas(width: int, ratio: float) -> None:
    source = kv(200_000, width)
    assert len(source) / len(encode(source, width)) > ratio


def test_noise_is_stored_as_it_is(rng: random.Random) -> None:
    source = rng.randbytes(4096)
    encoded = encode(source, 2)
    assert encoded[HEADER_BYTES:] == source
    assert decode(encoded, len(source)) == source


def test_b139_golden_bytes() -> None:
    """1.0, -1.5 and NaN 0x7FC1 turned left; too few to shrink, so stored; the header's fields."""
    source = struct.pack("<3H", 0x3F80, 0xBFC0, 0x7FC1)
    header = b"KVZB\x01\x02\x01\x00" + struct.pack("<QQ", 6, 0)
    assert encode(source, 2) == header + source
    same = struct.pack("<H", 0xBFC0) * 100
    encoded = encode(same, 2)
    assert encoded[:8] == b"KVZB\x01\x02\x00\x00"
    assert encoded[-100:] == b"\x81" * 100


@pytest.mark.parametrize(("nbytes", "width"), [(3, 2), (6, 4), (8, 8), (8, 0)])
def test_what_is_no_whole_number_of_values_is_refused(nbytes: int, width: int) -> None:
    with pytest.raises(CodecError, match="values of 1, 2 or 4 bytes"):
        encode(bytes(nbytes), width)


def test_a_buffer_too_small_is_refused_before_anything_is_written() -> None:
    into = bytearray(HEADER_BYTES + 7)
    with pytest.raises(CodecError, match="no room"):
        ZstdCodec().encode(memoryview(bytes(8)), 2, memoryview(into))
    assert not any(into)


@pytest.mark.parametrize("nbytes", [0, 399, 401, 800])
def test_another_length_than_was_encoded_is_refused(nbytes: int) -> None:
    with pytest.raises(CodecError, match="400 bytes were encoded"):
        decode(encode(bytes(400), 2), nbytes)


def test_b78_bytes_cut_short_or_added_are_refused() -> None:
    encoded = encode(kv(500, 2), 2)
    for cut in range(len(encoded)):
        with pytest.raises(CodecError):
            decode(encoded[:cut], 1000)
    with pytest.raises(CodecError, match="payload"):
        decode(encoded + b"\0", 1000)


def test_b78_a_frame_that_says_it_is_larger_is_refused_before_it_is_allocated() -> None:
    """A frame of 2**40 bytes, of which the first is there."""
    frame = zstandard.ZstdCompressor(level=1).compressobj(size=2**40)
    huge = frame.compress(b"x") + frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    header = struct.pack("<4sBB?xQQ", b"KVZB", 1, 1, False, 400, len(huge))
    with pytest.raises(CodecError, match="another length"):
        decode(header + huge, 400)


def test_b78_flipped_bits_are_refused_or_change_values_only(rng: random.Random) -> None:
    """A checksum outside finds what this one cannot; nothing but ``CodecError`` is ever raised."""
    encoded = encode(kv(500, 2), 2)
    for bit in rng.sample(range(8 * len(encoded)), 500):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert len(decode(bytes(flipped), 1000)) == 1000
        except CodecError:
            continue


def test_threads_do_not_share_contexts() -> None:
    codec, source = ZstdCodec(), kv(20_000, 2)
    expected, outcomes = encode(source, 2), []

    def work() -> None:
        into = bytearray(codec.encoded_bytes_max(len(source)))
        nbytes = codec.encode(memoryview(source), 2, memoryview(into))
        back = bytearray(len(source))
        codec.decode(memoryview(into)[:nbytes], memoryview(back))
        outcomes.append(into[:nbytes] == expected and back == source)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 8


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"kvtier\[zstd\]"):
        encode(bytes(8), 2)
