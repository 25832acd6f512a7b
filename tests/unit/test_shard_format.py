"""The shard format: geometry, sealing, verification and identity."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import xxhash

from kvtier.constants import (
    HEADER_BYTES_MAX,
    MIB,
    SECTIONS_MAX,
    SHARD_BYTES_MAX,
)
from kvtier.errors import ChecksumError, FormatError, IdentityError, LayoutError
from kvtier.layout import DIM_MAX, INDEX_MAX
from kvtier.shard_format import (
    CODEC_PARAM_TEXT_BYTES_MAX,
    CODEC_PARAMS_BYTES_MAX,
    POSITION_MAX,
    ShardDescription,
    ShardHeader,
    check_identity,
    checksum,
    header_length,
    parse_header,
    seal,
    shard_geometry,
    verify_section,
)
from kvtier.types import ChunkKey, ShardId, ShardLayout

LAYOUT = ShardLayout(layers=5, kv_heads=2, k_dim=8, v_dim=8, dtype="float32", tokens=4)
SECTION_BYTES = (4096, 1000)
CHUNK = ChunkKey(b"c" * 32)
DESCRIPTION = ShardDescription(
    chunk=CHUNK,
    shard=ShardId(0, 1, 2),
    parent=ChunkKey(b"p" * 32),
    position=7,
    namespace=b"n" * 32,
    codec="raw",
    codec_params={"bits": 4, "theta": 1e4, "centred": True, "calibration": "x"},
    layout=LAYOUT,
    token_count=4,
    has_sinks=False,
    section_bytes=SECTION_BYTES,
)


def packed(description: ShardDescription = DESCRIPTION) -> bytearray:
    """A slot with patterned sections, and other bytes wherever nothing has been packed."""
    geometry = shard_geometry(description.section_bytes)
    slot = bytearray(b"\xee" * geometry.shard_bytes)
    for start, nbytes in zip(geometry.section_offsets, geometry.section_bytes, strict=True):
        slot[start : start + nbytes] = bytes((start + i) % 251 for i in range(nbytes))
    return slot


def test_geometry_is_aligned_and_keeps_unpadded_sizes() -> None:
    geometry = shard_geometry((1, 4096, 4097))
    assert geometry.header_bytes == 4096
    assert geometry.section_offsets == (4096, 8192, 12288)
    assert geometry.section_bytes == (1, 4096, 4097)
    assert geometry.shard_bytes == 20480


def test_header_length_follows_from_the_number_of_sections_alone() -> None:
    for count in range(1, SECTIONS_MAX + 1):
        lengths = {shard_geometry((nbytes,) * count).header_bytes for nbytes in (1, 5_000_000)}
        assert len(lengths) == 1
        length = lengths.pop()
        assert length == -(-(2048 + 32 * count) // 4096) * 4096
        assert length <= HEADER_BYTES_MAX


@pytest.mark.parametrize(
    ("section_bytes", "message"),
    [
        ((), "number of sections is 0"),
        ((1,) * (SECTIONS_MAX + 1), "number of sections is 513"),
        ((4096, 0), r"section_bytes\[1\] is 0"),
        ((SHARD_BYTES_MAX,), r"section_bytes\[0\] is 4294967296"),
        ((SHARD_BYTES_MAX - 8192, 4097), r"section_bytes\[1\] is 4097"),
        ((SHARD_BYTES_MAX - 4096, 1), r"section_bytes\[1\] is 1"),
    ],
)
def test_a_shard_beyond_the_bounds_is_refused(section_bytes: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        shard_geometry(section_bytes)


def test_the_largest_shard_is_accepted() -> None:
    assert shard_geometry((SHARD_BYTES_MAX - 4096,)).shard_bytes == SHARD_BYTES_MAX
    assert shard_geometry((SHARD_BYTES_MAX - 8192, 4096)).shard_bytes == SHARD_BYTES_MAX


def test_checksum_is_xxh3_128() -> None:
    assert checksum(memoryview(b"kvtier")) == xxhash.xxh3_128(b"kvtier").digest()
    # https://github.com/Cyan4973/xxHash: XXH3_128bits of nothing.
    assert checksum(memoryview(b"")).hex() == "99aa06d3014798d86001c324468d497f"


def test_checksum_lets_other_threads_run() -> None:
    data = memoryview(bytes(16 * MIB))
    start, ran = threading.Event(), threading.Event()

    def run() -> None:
        start.wait()
        ran.set()

    thread = threading.Thread(target=run)
    thread.start()
    interval = sys.getswitchinterval()
    # From here on a thread waits until the GIL is released, instead of asking for it.
    sys.setswitchinterval(1000.0)
    try:
        start.set()
        for _ in range(200):
            if ran.is_set():
                break
            checksum(data)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_sealed_then_parsed_is_the_same() -> None:
    slot = packed()
    sections = bytes(slot)
    header = seal(memoryview(slot), DESCRIPTION)
    assert parse_header(memoryview(slot)) == header
    assert parse_header(memoryview(slot)[:4096]) == header
    assert header_length(memoryview(slot)[:16]) == 4096
    assert header.section_offsets == (4096, 8192)
    assert header.codec_params == DESCRIPTION.codec_params
    for section, nbytes in enumerate(SECTION_BYTES):
        start = header.section_offsets[section]
        assert slot[start : start + nbytes] == sections[start : start + nbytes]
        verify_section(memoryview(slot), header, section)
    assert slot[9192:] == bytes(4096 - 1000)


def test_sealing_is_repeatable_and_ignores_the_order_of_parameters() -> None:
    first, second = packed(), packed()
    seal(memoryview(first), DESCRIPTION)
    seal(memoryview(first), DESCRIPTION)
    params = dict(reversed(DESCRIPTION.codec_params.items()))
    seal(memoryview(second), replace(DESCRIPTION, codec_params=params))
    assert first == second


def test_the_longest_header_fits() -> None:
    layers = SECTIONS_MAX * 127
    description = ShardDescription(
        chunk=CHUNK,
        shard=ShardId(INDEX_MAX, INDEX_MAX, INDEX_MAX),
        parent=ChunkKey(b"p" * 32),
        position=POSITION_MAX,
        namespace=b"n" * 32,
        codec="c" * 64,
        codec_params={"p" * 64: "t" * 250, "q": "t" * 250, "r": "t" * 250, "s": "t" * 193},
        layout=ShardLayout(layers, INDEX_MAX, DIM_MAX, DIM_MAX, "float8_e4m3fn", 65536, 127),
        token_count=65536,
        has_sinks=False,
        section_bytes=(70_000,) * SECTIONS_MAX,
    )
    slot = bytearray(shard_geometry(description.section_bytes).shard_bytes)
    header = seal(memoryview(slot), description)
    assert parse_header(memoryview(slot)) == header
    with pytest.raises(FormatError, match="4096 bytes of 20480"):
        parse_header(memoryview(slot)[:4096])
    params = {**description.codec_params, "s": "t" * 194}
    with pytest.raises(FormatError, match="take 1025 bytes; allowed are 1024"):
        seal(memoryview(slot), replace(description, codec_params=params))
    assert CODEC_PARAMS_BYTES_MAX == 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": b"short"}, "chunk is not 32 bytes"),
        ({"chunk": "c" * 32}, "chunk is not 32 bytes"),
        ({"parent": None}, "parent is not 32 bytes"),
        ({"position": 0}, "position is 0, but there is a parent"),
        ({"position": POSITION_MAX + 1}, "position is 4294967296"),
        ({"position": -1}, "position is -1"),
        ({"shard": ShardId(0, 65536, 0)}, "stage is 65536"),
        ({"namespace": bytes(31)}, "namespace is not 32 bytes"),
        ({"codec": ""}, "codec is ''"),
        ({"codec": "Raw"}, "codec is 'Raw'"),
        ({"codec": "raw\n"}, "codec is 'raw"),
        ({"codec": "c" * 65}, "not the name of a codec"),
        ({"codec_params": {"A": 1}}, "holds 'A'"),
        ({"codec_params": {"a": None}}, r"codec_params\['a'\] is None"),
        ({"codec_params": {"a": [1]}}, "codec_params"),
        ({"codec_params": {"a": 2**63}}, "64-bit"),
        ({"codec_params": {"a": float("nan")}}, "finite"),
        ({"codec_params": {"a": float("inf")}}, "finite"),
        ({"codec_params": {"a": "t" * (CODEC_PARAM_TEXT_BYTES_MAX + 1)}}, "text up to 256"),
        ({"codec_params": {"a": "\ud800"}}, "text up to 256"),
        ({"codec_params": []}, "codec_params is not a map"),
        ({"layout": replace(LAYOUT, kv_heads=0)}, "kv_heads is 0"),
        ({"token_count": 0}, "token_count is 0"),
        ({"token_count": 5}, "token_count is 5"),
        ({"has_sinks": 1}, "has_sinks is 1"),
        ({"has_sinks": True}, "sinks lie at position 0 only"),
        ({"section_bytes": (4096,)}, "number of sections is 1"),
        ({"section_bytes": (4096, 1, 1)}, "number of sections is 3"),
        ({"section_bytes": (4096, 0)}, r"section_bytes\[1\] is 0"),
    ],
)
def test_what_no_header_can_hold_is_not_sealed(change: dict[str, object], message: str) -> None:
    slot = packed()
    before = bytes(slot)
    with pytest.raises(FormatError, match=message):
        seal(memoryview(slot), replace(DESCRIPTION, **change))  # type: ignore[arg-type]
    assert slot == before


def test_the_first_chunk_has_no_parent_and_may_hold_sinks() -> None:
    first = replace(DESCRIPTION, position=0, parent=None, has_sinks=True)
    slot = packed()
    assert seal(memoryview(slot), first) == parse_header(memoryview(slot))


@pytest.mark.parametrize("nbytes", [0, 12287, 12289, 16384])
def test_a_slot_of_another_size_is_not_sealed(nbytes: int) -> None:
    with pytest.raises(FormatError, match=f"slot has {nbytes} bytes; the shard has 12288"):
        seal(memoryview(bytearray(nbytes)), DESCRIPTION)


def with_word(offset: int, value: int) -> Callable[[bytearray], None]:
    def change(slot: bytearray) -> None:
        struct.pack_into("<I", slot, offset, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_word(0, 0), "magic"),
        (with_word(4, 0), "format version is 0; this build reads 1"),
        (with_word(4, 2), "format version is 2; this build reads 1"),
        (with_word(8, 0), "header_bytes is 0"),
        (with_word(8, 4097), "header_bytes is 4097"),
        (with_word(8, HEADER_BYTES_MAX + 4096), "header_bytes is 69632"),
        (with_word(8, 0xFFFFF000), "header_bytes is 4294963200"),
        (with_word(8, HEADER_BYTES_MAX), "12288 bytes of 65536"),
        (with_word(8, 8192), "checksum differs"),
        (with_word(12, 4096 - 23), "body_bytes is 4073"),
        (with_word(12, 4096 - 24), "checksum differs"),
        (with_word(4084, 1), "checksum differs"),
    ],
)
def test_b108_a_bad_prefix_is_a_format_error(
    change: Callable[[bytearray], None], message: str
) -> None:
    slot = packed()
    seal(memoryview(slot), DESCRIPTION)
    change(slot)
    with pytest.raises(FormatError, match=message):
        parse_header(memoryview(slot))


def test_b78_every_bit_flip_of_a_header_is_found() -> None:
    slot = packed()
    header = seal(memoryview(slot), DESCRIPTION)
    page = bytearray(slot[:4096])
    for index in range(4096):
        for bit in range(8):
            page[index] ^= 1 << bit
            with pytest.raises(FormatError):
                parse_header(memoryview(page))
            page[index] ^= 1 << bit
    assert parse_header(memoryview(page)) == header


def test_b78_every_bit_flip_of_a_payload_is_found() -> None:
    slot = packed()
    header = seal(memoryview(slot), DESCRIPTION)
    view = memoryview(slot)
    for section, (start, nbytes) in enumerate(
        zip(header.section_offsets, header.section_bytes, strict=True)
    ):
        for index in range(start, start + nbytes):
            slot[index] ^= 1 << index % 8
            with pytest.raises(ChecksumError, match=f"section {section} "):
                verify_section(view, header, section)
            slot[index] ^= 1 << index % 8
        verify_section(view, header, section)


def test_b78_swapped_sections_are_found() -> None:
    equal = replace(DESCRIPTION, section_bytes=(4096, 4096))
    slot = packed(equal)
    slot[8192:] = bytes(4096)
    header = seal(memoryview(slot), equal)
    slot[4096:8192], slot[8192:] = slot[8192:], slot[4096:8192]
    for section in (0, 1):
        with pytest.raises(ChecksumError):
            verify_section(memoryview(slot), header, section)


@pytest.mark.parametrize("nbytes", [4096, 8191, 8192, 9191])
def test_a_slot_cut_short_is_not_verified(nbytes: int) -> None:
    slot = packed()
    header = seal(memoryview(slot), DESCRIPTION)
    with pytest.raises(ChecksumError, match=f"section 1 has {max(0, nbytes - 8192)} of 1000 bytes"):
        verify_section(memoryview(slot)[:nbytes], header, 1)


def expected_of(header: ShardHeader) -> dict[str, object]:
    names = ("chunk", "shard", "namespace", "layout", "codec")
    return {name: getattr(header, name) for name in names}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("chunk", b"d" * 32),
        ("shard", ShardId(1, 1, 2)),
        ("shard", ShardId(0, 0, 2)),
        ("shard", ShardId(0, 1, 3)),
        ("namespace", b"m" * 32),
        ("layout", replace(LAYOUT, dtype="uint8")),
        ("layout", replace(LAYOUT, tokens=8)),
        ("codec", "int8"),
    ],
)
def test_b32_b35_b78_another_sound_shard_is_not_the_one_asked_for(name: str, other: object) -> None:
    header = seal(memoryview(packed()), DESCRIPTION)
    expected = expected_of(header)
    check_identity(header, **expected)  # type: ignore[arg-type]
    with pytest.raises(IdentityError, match=f"^{name} is .*, not "):
        check_identity(header, **{**expected, name: other})  # type: ignore[arg-type]


def test_keys_and_format_load_no_torch() -> None:
    code = (
        "import sys, kvtier.keys, kvtier.layout, kvtier.shard_format, kvtier.cache.sequence\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
