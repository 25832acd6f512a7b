"""The rotated integer codecs: ``int8``, ``int6``, ``int5k4v``, ``int5k4v-c``, ``int4``.

A randomised Hadamard rotation along the head dimension spreads outliers over all values of a row
(QuaRot, arXiv 2404.00456; TurboQuant, arXiv 2504.19874); then each row is quantised with a scale
of its own. Measured at head dimension 64, KL against float32 (fp8 with a scale per row: 0.0009):

========== =========================== ================= =======
name       codes                       bits, ratio d=128 KL
========== =========================== ================= =======
int8       K, V 8 bits                 8.125, 1.97       0.00002
int6       K, V 6 bits                 6.125, 2.61       0.00035
int5k4v    K 5 bits, V 4 bits          4.625, 3.46       0.0020
int5k4v-c  the same, K centred, sinks  4.625, 3.46       0.0007
int4       K, V 4 bits, centred, sinks 4.125, 3.88       0.0020
========== =========================== ================= =======

*Centred*: a calibrated mean is taken from K, turned as RoPE turns K. That pays only if the
sequence's first tokens, whose K is unlike all other, are kept exactly: ``sink_tokens`` of them. A
centred codec without a calibration is refused: until there is one, store with ``int5k4v``, and
the codec in a chunk's header tells the two apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kvtier.codecs.calibration import Calibration, Rotary
from kvtier.codecs.paged import Kernel, PagedCodec
from kvtier.errors import CodecError, ConfigError, LayoutError
from kvtier.interfaces import PagedPool
from kvtier.types import DTYPE_BYTES, CodecTraits, Move, ShardLayout
from kvtier_kernels.rotated_format import INT6, INT8, LM4, LM5, PIECE_DIM_MAX, Code, Format

if TYPE_CHECKING:
    import torch

    from kvtier_kernels.rotated import Centre
    from kvtier_kernels.transfer.stripes import Stripe

#: Hex digits of a calibration's digest in a codec's name.
CALIBRATION_ID_DIGITS: Final = 16

#: Tokens that the centred codecs keep exactly at the start of a sequence.
SINK_TOKENS: Final = 4

_DTYPES: Final = ("float32", "float16", "bfloat16")
#: Tables of cosine and sine that are kept: those of the chunks being moved, a few hundred KiB each.
_TURNS_KEPT: Final = 16
#: The same on a GPU, where making them afresh would cost more than the move: for contexts of 64 Ki
#: tokens in chunks of 256, 64 MiB.
_DEVICE_TURNS_KEPT: Final = 256


@dataclass(frozen=True)
class RotatedCodec:
    """A block codec of codes for K and V. With a calibration, K is centred.

    Stateless; calls on disjoint rows may run at the same time from several threads. Takes pools of
    float32, float16 and bfloat16, heads of any dimension up to 512, and latent rows, which are
    cut into their largest power of two and the rest (512 + 64). Whoever makes a ``ShardLayout`` for
    the chunk at position 0 sets its ``sink_tokens`` to the codec's (or to the tokens it has, where
    they are fewer), and whoever makes a ``Move`` its ``position_start``.
    """

    name: str
    k_code: Code
    v_code: Code
    calibration: Calibration | None = None

    @property
    def traits(self) -> CodecTraits:
        """Lossy; with a calibration the first tokens are kept."""
        return CodecTraits(exact=False, sink_tokens=self.sink_tokens)

    @property
    def sink_tokens(self) -> int:
        """How many of a sequence's first tokens are kept exactly."""
        return SINK_TOKENS if self.calibration is not None else 0

    @property
    def calibration_id(self) -> str:
        """The calibration's digest, to stand in a header; empty without one."""
        return self.calibration.digest if self.calibration is not None else ""

    def section_bytes(self, layout: ShardLayout, section: int) -> int:
        """Size of a section. Raises ``CodecError`` for a dtype or dim that the codec lacks."""
        layers = len(layout.section_layer_range(section))
        form = self.form(layout)
        return form.section(layers, layout.kv_heads, layout.tokens, layout.sink_tokens).nbytes

    def form(self, layout: ShardLayout) -> Format:
        """The packed form of a layout's rows. Raises as ``section_bytes``."""
        if layout.dtype not in _DTYPES:
            raise CodecError(f"{self.name} takes {', '.join(_DTYPES)}, not {layout.dtype}")
        dtype_bytes = DTYPE_BYTES[layout.dtype]
        form = Format(layout.k_dim, layout.v_dim, self.k_code, self.v_code, dtype_bytes)
        if max(piece.dim for piece in form.pieces) > PIECE_DIM_MAX:
            raise CodecError(f"{self.name} takes dims up to {PIECE_DIM_MAX}: {layout}")
        return form

    def pack(self, pool: PagedPool, move: Move, payload: memoryview) -> None:
        """Quantise the move's rows into ``payload``, which starts at section 0 of the slot.

        Returns when the bytes are in place. Raises ``LayoutError`` where pool, move, calibration
        and payload do not fit each other, ``CodecError`` for NaN, infinities and values too large
        (what was written of the move's rows is undefined then), ``MissingExtraError`` without
        torch.
        """
        for one in self._by_section(move):
            _SectionCodec(self, one).pack(pool, one, payload)

    def unpack(self, payload: memoryview, pool: PagedPool, move: Move) -> None:
        """Write the move's rows from ``payload`` into the pool's blocks; else as ``pack``."""
        for one in self._by_section(move):
            _SectionCodec(self, one).unpack(payload, pool, one)

    def centre(self, move: Move) -> Centre | None:
        """What is taken from K of the move's first section; None without a calibration."""
        if self.calibration is None:
            return None
        from torch import from_numpy

        from kvtier_kernels.rotated import Centre

        layout = move.layout
        if not 0 <= move.shard.group < len(self.calibration.rotaries):
            raise LayoutError(f"the calibration has no KV group {move.shard.group}")
        mean = self.calibration.mean(move.shard, layout)
        if mean.shape != (layout.layers, layout.kv_heads, layout.k_dim):
            raise LayoutError(f"the calibration's means are {mean.shape}, the shard is {layout}")
        layers = layout.section_layer_range(move.first_section)
        mean = mean[layers.start : layers.stop]
        rotary = self.calibration.rotaries[move.shard.group]
        cosine, sine = _turns(rotary, move.position_start, layout.tokens, layout.k_dim)
        return Centre(from_numpy(mean.copy()), from_numpy(rotary.partner(mean)), cosine, sine)

    def stripes(self, move: Move, section: int, device: torch.device) -> list[Stripe]:
        """What kernels on ``device`` move of one section of the move."""
        one = replace(move, first_section=section, section_count=1)
        return _SectionCodec(self, one).stripes(one, section, device)

    def turns(self, move: Move, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosines and sines of all of the chunk's rows on ``device``; None without calibration."""
        if self.calibration is None:
            return None
        rotary = self.calibration.rotaries[move.shard.group]
        return _turns_on(rotary, move.position_start, move.layout.tokens, move.layout.k_dim, device)

    def _by_section(self, move: Move) -> Iterator[Move]:
        """The move, one section at a time: each has a mean of its own."""
        stop = move.first_section + move.section_count
        if not (0 <= move.first_section < stop <= move.layout.sections):
            raise LayoutError(f"the shard has {move.layout.sections} sections: {move}")
        for section in range(move.first_section, stop):
            yield replace(move, first_section=section, section_count=1)


class _SectionCodec(PagedCodec):
    """One section of one move: a kernel bound to the section's form, sinks and means."""

    def __init__(self, codec: RotatedCodec, move: Move) -> None:
        self._codec = codec
        self._move = move

    @property
    def name(self) -> str:
        return self._codec.name

    @property
    def traits(self) -> CodecTraits:
        return self._codec.traits

    def section_bytes(self, layout: ShardLayout, section: int) -> int:
        return self._codec.section_bytes(layout, section)

    def _import_kernel(self) -> Kernel:
        from kvtier_kernels.rotated import RotatedKernel

        layout = self._move.layout
        centre = self._codec.centre(self._move)
        return RotatedKernel(self._codec.form(layout), layout.sink_tokens, centre)


def int8() -> RotatedCodec:
    """8 bits."""
    return RotatedCodec("int8", INT8, INT8)


def int6() -> RotatedCodec:
    """6 bits."""
    return RotatedCodec("int6", INT6, INT6)


def int5k4v() -> RotatedCodec:
    """5 bits for K, 4 for V."""
    return RotatedCodec("int5k4v", LM5, LM4)


def int5k4v_centred(calibration: Calibration | None = None) -> RotatedCodec:
    """5 bits for K, centred, 4 for V. Raises ``ConfigError`` without a calibration."""
    known = _required("int5k4v-c", calibration)
    return RotatedCodec(calibrated_name("int5k4v-c", known), LM5, LM4, known)


def int4(calibration: Calibration | None = None) -> RotatedCodec:
    """4 bits, K centred. Raises ``ConfigError`` without a calibration."""
    known = _required("int4", calibration)
    return RotatedCodec(calibrated_name("int4", known), LM4, LM4, known)


def calibrated_name(name: str, calibration: Calibration) -> str:
    """Return what stands in headers: what was packed with another calibration is another codec."""
    return f"{name}.{calibration.digest[:CALIBRATION_ID_DIGITS]}"


def _required(name: str, calibration: Calibration | None) -> Calibration:
    if calibration is None:
        raise ConfigError(
            f"codec {name!r} needs a calibration of the model; int5k4v is the nearest without"
        )
    return calibration


@lru_cache(maxsize=_TURNS_KEPT)
def _turns(
    rotary: Rotary, position_start: int, tokens: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine as tensors. Shared: never written to."""
    from torch import from_numpy

    cosine, sine = rotary.turns(position_start, tokens, dim)
    return from_numpy(cosine).half(), from_numpy(sine).half()


@lru_cache(maxsize=_DEVICE_TURNS_KEPT)
def _turns_on(
    rotary: Rotary, position_start: int, tokens: int, dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_turns`` on a device, there when this returns."""
    import torch

    cosine, sine = _turns(rotary, position_start, tokens, dim)
    # The present stream is the engine's: this would wait for its steps.
    aside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(aside):
        return cosine.to(device), sine.to(device)
