"""Shard files of every released format version stay readable, byte for byte."""

from __future__ import annotations

import struct
from dataclasses import asdict, fields
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import pytest
import xxhash

from kvtier.shard_format import ShardDescription, parse_header, verify_section
from tests.golden.make_golden import payload, shards

FOLDER = Path(__file__).parent
VERSION_1 = ("v1-params.kvs", "v1-raw.kvs")


def test_every_golden_file_is_listed() -> None:
    assert tuple(sorted(path.name for path in FOLDER.glob("*.kvs"))) == VERSION_1


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
