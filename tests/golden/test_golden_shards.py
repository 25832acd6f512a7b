"""Shard files of every released format version stay readable, byte for byte."""

from __future__ import annotations

import struct
from dataclasses import asdict, fields
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import pytest
import xxhash

from kvtier.codecs.zstd import ZstdCodec
from kvtier.shard_format import (
    ShardDescription,
    parse_header,
    shard_geometry,
    verify_section,
)
from kvtier.stored_shard import decode_section, parse_stored
from tests.golden.make_golden import floats, payload, shards

FOLDER = Path(__file__).parent
VERSION_1 = ("v1-params.kvs", "v1-raw.kvs")
VERSION_2 = ("v2-zstd.kvs",)


def test_every_golden_file_is_listed() -> None:
    assert tuple(sorted(path.name for path in FOLDER.glob("*.kvs"))) == VERSION_1 + VERSION_2


@pytest.mark.parametrize("name", VERSION_1)
def test_a_version_1_file_is_read_and_verified(name: str) -> None:
    shard = memoryview((FOLDER / name).read_bytes())
    header = parse_header(shard)
    expected = shards()[name]
    for field in fields(ShardDescription):
        assert getattr(header, field.name) == getattr(expected, field.name), field.name
    for section, (start, nbytes) in enumerate(
        zip(header.section_offsets, header.section_bytes, strict=True)
    ):
        verify_section(shard, header, section)
        assert shard[start : start + nbytes] == payload(name, section, nbytes)


@pytest.mark.parametrize("name", VERSION_1)
def test_a_version_1_file_is_what_the_reference_says(name: str) -> None:
    """Read the file by the documented layout alone, without the module that wrote it."""
    shard = (FOLDER / name).read_bytes()
    magic, version, header_bytes, body_bytes = struct.unpack_from("<4sIII", shard)
    assert (magic, version, header_bytes) == (b"KVTS", 1, 4096)
    assert shard[header_bytes - 8 : header_bytes] == struct.pack(
        "<Q", xxhash.xxh3_64_intdigest(shard[: header_bytes - 8])
    )
    assert not any(shard[16 + body_bytes : header_bytes - 8])
    body = msgpack.unpackb(shard[16 : 16 + body_bytes])
    expected = shards()[name]
    assert body["chunk"] == expected.chunk
    assert body["shard"] == list(expected.shard)
    layout = asdict(expected.layout)
    assert layout.pop("sink_tokens") == 0
    assert body["layout"] == layout
    assert body["codec_params"] == expected.codec_params

    offset = header_bytes
    for section, nbytes in enumerate(body["section_bytes"]):
        assert body["section_offsets"][section] == offset
        data = shard[offset : offset + nbytes]
        assert xxhash.xxh3_128_digest(data) == body["section_checksums"][section]
        end = offset + nbytes
        offset = -(-end // 4096) * 4096
        assert not any(shard[end:offset])
    assert offset == len(shard)


@pytest.mark.parametrize("name", VERSION_2)
def test_a_version_2_file_is_decoded_and_verified(name: str) -> None:
    data = memoryview((FOLDER / name).read_bytes())
    stored = parse_stored(data)
    geometry = shard_geometry(stored.header.section_bytes)
    shard = memoryview(bytearray(geometry.shard_bytes))
    shard[: geometry.header_bytes] = stored.page
    assert stored.header.chunk == shards()["v1-raw.kvs"].chunk
    for section, nbytes in enumerate(geometry.section_bytes):
        decode_section(data, stored, section, ZstdCodec(), shard)
        start = geometry.section_offsets[section]
        assert shard[start : start + nbytes] == floats("v1-raw.kvs", section, nbytes)
    assert parse_header(shard) == stored.header


@pytest.mark.parametrize("name", VERSION_2)
def test_a_version_2_file_is_what_the_reference_says(name: str) -> None:
    """Read its frame by the documented layout alone, without the module that wrote it."""
    data = (FOLDER / name).read_bytes()
    magic, version, header_bytes, body_bytes = struct.unpack_from("<4sIII", data)
    assert (magic, version, header_bytes) == (b"KVTS", 2, 4096)
    assert data[header_bytes - 8 : header_bytes] == struct.pack(
        "<Q", xxhash.xxh3_64_intdigest(data[: header_bytes - 8])
    )
    body = msgpack.unpackb(data[16 : 16 + body_bytes])
    assert body["byte_codec"] == "zstd"
    assert body["stored_bytes"] == len(data)
    assert msgpack.unpackb(body["shard"])["chunk"] == shards()["v1-raw.kvs"].chunk
    offset = header_bytes
    for nbytes, digest in zip(body["section_bytes"], body["section_checksums"], strict=True):
        assert xxhash.xxh3_128_digest(data[offset : offset + nbytes]) == digest
        offset += nbytes
    assert not any(data[offset:])
