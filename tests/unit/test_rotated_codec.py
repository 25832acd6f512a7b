"""The rotated codecs: sizes, sink tokens, calibrations, and their place in the registry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtier.codecs import rotated
from kvtier.codecs.calibration import Calibration, Rotary
from kvtier.errors import CodecError, ConfigError, LayoutError
from kvtier.registry import codecs
from kvtier.testing.codec_contract import Shape
from kvtier.testing.pools import Arrangement, TorchPool
from kvtier.types import GroupKind, KVGroup, KVLayout, Move, Part, ShardLayout

LLAMA = ShardLayout(32, 8, 128, 128, "bfloat16", 256)
SHARD = ShardLayout(3, 2, 64, 64, "bfloat16", 16, section_layers=2)
FREQUENCIES = tuple(10000.0 ** (-i / 32) for i in range(32))


def calibration() -> Calibration:
    """Large means for the layers and heads of ``SHARD``."""
    group = KVGroup(GroupKind.FULL, (0, 1, 2), kv_heads=2, k_dim=64, v_dim=64, dtype="bfloat16")
    mean = 6 * np.random.default_rng(2).normal(size=(3, 2, 64)).astype(np.float32)
    return Calibration(KVLayout((group,)), (mean,), (Rotary(FREQUENCIES),))


def calibrated() -> dict[str, rotated.RotatedCodec]:
    known = calibration()
    return {"int4": rotated.int4(known), "int5k4v-c": rotated.int5k4v_centred(known)}


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (rotated.int8(), 8.125),
        (rotated.int6(), 6.125),
        (rotated.int5k4v(), 4.625),
        (rotated.int4(calibration()), 4.125),
        (rotated.int5k4v_centred(calibration()), 4.625),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_b121_bits_per_value_are_those_of_the_table(
    codec: rotated.RotatedCodec, bits: float
) -> None:
    values = 4 * 8 * 256 * 2 * 128
    assert codec.section_bytes(LLAMA, 0) * 8 == bits * values
    with_sinks = codec.section_bytes(replace(LLAMA, sink_tokens=4), 7)
    assert with_sinks - codec.section_bytes(LLAMA, 7) == 4 * 8 * 2 * 4 * 128 * 2


def test_the_registry_knows_all_five() -> None:
    for name in ("int8", "int6", "int5k4v"):
        assert codecs.load(name)().name == name
    for name, codec in calibrated().items():
        stored = f"{name}.{calibration().digest[:16]}"
        assert codecs.load(name)(calibration()).name == codec.name == stored
        assert codec.sink_tokens == 4
        assert codec.calibration_id == calibration().digest


@pytest.mark.parametrize("name", ["int4", "int5k4v-c"])
def test_without_a_calibration_the_centred_codecs_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*calibration.*int5k4v"):
        codecs.load(name)()


def test_other_codecs_keep_no_sinks_and_need_no_calibration() -> None:
    assert rotated.int5k4v().sink_tokens == 0
    assert rotated.int5k4v().calibration_id == ""


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint8"])
def test_what_is_one_byte_already_is_never_quantised(dtype: str) -> None:
    with pytest.raises(CodecError, match="int8 takes float32"):
        rotated.int8().section_bytes(replace(LLAMA, dtype=dtype), 0)


def test_a_dim_beyond_512_is_refused() -> None:
    rotated.int8().section_bytes(replace(LLAMA, k_dim=576, v_dim=0, kv_heads=1), 0)
    with pytest.raises(CodecError, match="up to 512"):
        rotated.int8().section_bytes(replace(LLAMA, k_dim=576), 0)


def test_nan_is_a_codec_error() -> None:
    shape = Shape(SHARD)
    pool = shape.pool()
    pool.fill_values(1)
    pool.layer_view(0, 2, Part.V)[shape.move().block_ids[1], 0, 1, 5] = float("nan")
    payload = memoryview(bytearray(1 << 20))
    with pytest.raises(CodecError, match="NaN"):
        rotated.int8().pack(pool, shape.move(), payload)
    rotated.int8().pack(pool, replace(shape.move(), section_count=1), payload)


def turned_pool(position_start: int) -> tuple[TorchPool, Move]:
    """A pool whose K is the calibration's mean, turned by RoPE, and a little noise."""
    shape = Shape(replace(SHARD, sink_tokens=0 if position_start else 4))
    pool = shape.pool(Arrangement.TOKEN_MAJOR)
    pool.fill_values(1)
    move = replace(shape.move(), position_start=position_start)
    for layer, head in np.ndindex(3, 2):
        mean = calibration().means[0][layer, head]
        view = pool.layer_view(0, layer, Part.K)
        for token in range(16):
            angles = (position_start + token) * np.array(FREQUENCIES)
            pairs = (mean[:32] + 1j * mean[32:]) * np.exp(1j * angles)
            row = torch.from_numpy(np.concatenate([pairs.real, pairs.imag]))
            view[move.block_ids[token // 4], token % 4, head] += row.to(torch.bfloat16)
    return pool, move


def restored_error(codec: rotated.RotatedCodec, pool: TorchPool, move: Move) -> torch.Tensor:
    """The error of K per token, over all layers and heads."""
    payload = memoryview(bytearray(1 << 20))
    codec.pack(pool, move, payload)
    target = Shape(move.layout).pool()
    codec.unpack(payload, target, move)
    squares = torch.zeros(16)
    for layer in range(3):
        stored, restored = (p.rows(0, layer, Part.K, move.block_ids) for p in (pool, target))
        squares += (stored.float() - restored.float()).square().sum((1, 2))
    return squares.sqrt()


@pytest.mark.parametrize("name", ["int4", "int5k4v-c"])
@pytest.mark.parametrize("position_start", [16, 4096])
def test_centring_takes_the_mean_where_it_stands(name: str, position_start: int) -> None:
    """12 dB for a mean of six times the noise; a chunk taken for another one has none of it."""
    pool, move = turned_pool(position_start)
    codec = calibrated()[name]
    plain = replace(codec, calibration=None)
    centred = restored_error(codec, pool, move).norm()
    assert centred < restored_error(plain, pool, move).norm() / 4
    elsewhere = replace(move, position_start=position_start + 5)
    assert restored_error(codec, pool, elsewhere).norm() > 3 * centred


@pytest.mark.parametrize("name", ["int4", "int5k4v-c"])
def test_sink_tokens_come_back_exactly(name: str) -> None:
    """Whole or in part moves, and no other token does."""
    pool, move = turned_pool(0)
    codec = calibrated()[name]
    error = restored_error(codec, pool, move)
    assert not error[:4].any()
    assert bool((error[4:] > 0).all())
    payload = memoryview(bytearray(1 << 20))
    shape = Shape(move.layout)
    for start, count in ((2, 5), (0, 2), (7, 9)):
        codec.pack(pool, shape.rows(move, start, count), payload)
    target = shape.pool()
    codec.unpack(payload, target, shape.rows(move, 3, 3))
    blocks = move.block_ids
    for layer in range(3):
        for part in Part:
            stored, found = (p.rows(0, layer, part, blocks) for p in (pool, target))
            assert torch.equal(stored[3], found[3])
            assert not torch.equal(stored[4], found[4])


@pytest.mark.parametrize(
    "layout",
    [replace(SHARD, layers=4), replace(SHARD, kv_heads=1), replace(SHARD, k_dim=80)],
    ids=["layers", "heads", "dim"],
)
def test_a_shard_that_the_calibration_does_not_fit_is_refused(layout: ShardLayout) -> None:
    shape = Shape(layout)
    pool = shape.pool()
    pool.fill_values(1)
    with pytest.raises(LayoutError, match="calibration"):
        rotated.int4(calibration()).pack(pool, shape.move(), memoryview(bytearray(1 << 20)))


def test_a_group_that_the_calibration_lacks_is_refused() -> None:
    shape = Shape(SHARD)
    move = replace(shape.move(), shard=shape.move().shard._replace(group=1))
    with pytest.raises(LayoutError, match="no KV group 1"):
        rotated.int4(calibration()).centre(move)
