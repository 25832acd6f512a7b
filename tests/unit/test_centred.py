"""Which codec stands for a name, and what learns a calibration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtier.codecs.calibration import Calibration
from kvtier.codecs.calibrator import Calibrator
from kvtier.codecs.centred import (
    CENTRED,
    Fallback,
    Uncentred,
    calibrator_for,
    codec_for,
    stored_name,
)
from kvtier.codecs.rope import parse_rope
from kvtier.errors import RegistryError
from kvtier.registry import codecs
from kvtier.types import GroupKind, KVGroup, KVLayout, Namespace

ROPE = "kind=default;layout=half;dim=8;theta=10000.0"
GROUP = KVGroup(GroupKind.FULL, (0, 1), kv_heads=1, k_dim=8, v_dim=8, dtype="float32")
MODEL = Namespace("weights", KVLayout((GROUP,)), rope=ROPE)


def calibration() -> Calibration:
    mean = np.ones((2, 1, 8), np.float32)
    return Calibration(MODEL.layout, (mean,), (parse_rope(ROPE).rotary_embedding(),))


@pytest.mark.parametrize("name", CENTRED)
def test_a_centred_codec_gives_way_until_there_is_a_calibration(name: str) -> None:
    assert codec_for(name).name == "int5k4v"
    made = codec_for(name, calibration())
    assert made.traits.sink_tokens == 4
    assert stored_name(made.name) == (name, calibration().digest[:16])


def test_other_codecs_are_themselves() -> None:
    assert set(CENTRED) < set(codecs.names())
    for name in set(codecs.names()) - set(CENTRED):
        assert codec_for(name).name == name == stored_name(name)[0]
        assert codec_for(name, calibration()).name == name
    with pytest.raises(RegistryError, match="int4"):
        codec_for("int44")


def test_a_namespace_says_how_its_k_turns() -> None:
    learner = calibrator_for(MODEL)
    assert isinstance(learner, Calibrator)
    assert learner.result() is None


@pytest.mark.parametrize(
    "namespace",
    [
        replace(MODEL, rope="kind=dynamic;layout=half;dim=8;theta=10000.0"),
        replace(MODEL, rope=""),
        replace(MODEL, layout=KVLayout((replace(GROUP, k_dim=16),))),
    ],
    ids=["dynamic", "unsaid", "dim"],
)
def test_k_that_cannot_be_turned_back_has_a_reason(
    namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    found = calibrator_for(namespace)
    (line,) = caplog.messages
    assert "int5k4v stands in" in line
    assert isinstance(found, Fallback)
    assert found.reason is Uncentred.ROPE
    assert "rope" in found.detail or "16 values" in found.detail
