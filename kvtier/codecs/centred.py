"""Which codec stands for a name, given what is known of a model: a calibration, or why none."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from kvtier.codecs.calibration import Calibration, Rotary
from kvtier.codecs.calibrator import Calibrator
from kvtier.codecs.rope import parse_rope
from kvtier.errors import ConfigError
from kvtier.interfaces import BlockCodec
from kvtier.registry import codecs
from kvtier.types import Namespace

_log = logging.getLogger("kvtier.calibration")

#: The codecs that need a calibration, the one that stores until there is one, and the one that
#: stores where a calibration says that they would lose too much.
CENTRED: Final = ("int4", "int5k4v-c")
UNCALIBRATED: Final = "int5k4v"
WEAK: Final = "int6"


class Uncentred(StrEnum):
    """Why another codec stands in for one that needs a calibration: values of a metric's label.

    ``learning``: it is being learned. ``absent``: there is none, and nobody here learns one.
    ``rope``: K cannot be turned back. ``weak``: layers of the model miss what is expected.
    """

    LEARNING = "learning"
    ABSENT = "absent"
    ROPE = "rope"
    WEAK = "weak"


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why ``UNCALIBRATED`` stands in; ``detail`` is for a person."""

    reason: Uncentred
    detail: str


def codec_for(name: str, calibration: Calibration | None = None) -> BlockCodec:
    """Make the codec of that name; for a centred one without a calibration, ``UNCALIBRATED``.

    Raises ``RegistryError`` for an unknown name.
    """
    if name not in CENTRED:
        codec: BlockCodec = codecs.load(name)()
    elif calibration is None:
        codec = codecs.load(UNCALIBRATED)()
    else:
        codec = codecs.load(name)(calibration)
    return codec


def stored_name(text: str) -> tuple[str, str]:
    """Split what stands in a header into a codec's name and its calibration's id, or nothing.

    >>> stored_name("int4.0123456789abcdef"), stored_name("int8")
    (('int4', '0123456789abcdef'), ('int8', ''))
    """
    name, _, calibration_id = text.partition(".")
    return (name, calibration_id) if name in CENTRED else (text, "")


def calibrator_for(namespace: Namespace) -> Calibrator | Fallback:
    """Return what learns a namespace's calibration, or why its K cannot be turned back.

    Asked once per namespace: a reason is logged.
    """
    try:
        return Calibrator(namespace.layout, _rotaries(namespace))
    except ConfigError as error:
        _log.warning("no centred codec for this model, %s stands in: %s", UNCALIBRATED, error)
        return Fallback(Uncentred.ROPE, str(error))


def blank_calibration(namespace: Namespace) -> Calibration:
    """Return a calibration that takes nothing from K, for kernels to be tried with.

    Raises ``ConfigError`` where no calibration can be learned.
    """
    layout = namespace.layout
    shapes = [(len(group.layers), group.kv_heads, group.k_dim) for group in layout.groups]
    means = tuple(np.zeros(shape, np.float32) for shape in shapes)
    return Calibration(layout, means, _rotaries(namespace))


def _rotaries(namespace: Namespace) -> tuple[Rotary, ...]:
    """All groups of the layout are taken to turn as ``namespace.rope`` says."""
    rope = parse_rope(namespace.rope)
    for group in namespace.layout.groups:
        if group.k_dim != rope.dim:
            raise ConfigError(f"K has {group.k_dim} values, its rotary embedding {rope.dim}")
    return (rope.rotary_embedding(),) * len(namespace.layout.groups)
