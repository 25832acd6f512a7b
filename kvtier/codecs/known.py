"""The codecs of one process, by the names that stand in orders, indexes and headers.

A name says all: ``int8``, or ``int4.0123456789abcdef`` for a codec with the calibration of that
id. What is asked for as ``int4`` packs as ``int5k4v`` until the model has a calibration.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.codecs.calibration import Calibration
from kvtier.codecs.calibration_store import CalibrationStore
from kvtier.codecs.calibrator import Calibrator
from kvtier.codecs.centred import CENTRED, UNCALIBRATED, calibrator_for, codec_for, stored_name
from kvtier.codecs.opaque import opaque_codec
from kvtier.errors import ConfigError, KVTierError
from kvtier.interfaces import BlockCodec, PagedPool
from kvtier.types import Fidelity, Move, Namespace

_log = logging.getLogger("kvtier.calibration")


@dataclass(frozen=True, slots=True)
class _Learning:
    """What is being learned for which model, and the codecs that wait for it."""

    calibrator: Calibrator
    namespace: Namespace
    names: tuple[str, ...]


class KnownCodecs:
    """Makes each codec once. Safe from any thread; only ``find``, ``prepare`` and
    ``observe`` block.

    ``store`` keeps calibrations for later runs and other engines; without one they last as long
    as this object.
    """

    def __init__(self, store: CalibrationStore | None = None) -> None:
        self._store = store
        self._known: dict[str, BlockCodec | None] = {}
        self._calibrated: dict[tuple[str, Namespace], str] = {}
        self._learning: _Learning | None = None
        self._lock = threading.Lock()

    def get(self, name: str) -> BlockCodec:
        """Return a codec. Raises ``RegistryError`` and ``ConfigError`` where it cannot be made."""
        codec = self._known.get(name) or opaque_codec(name)  # Of those there are any number.
        if codec is None:
            codec = self._known[name] = _make(name)
        return codec

    def readable(self, name: str, fidelity: Fidelity) -> bool:
        """Tell whether what a codec packed may be used in a namespace of that fidelity.

        A codec that this process cannot make is a miss, and nothing lossy is ever exact.
        """
        if opaque_codec(name) is not None:
            return True
        if name not in self._known:
            try:
                self._known[name] = _make(name)
            except KVTierError:
                self._known[name] = None
        codec = self._known[name]
        return codec is not None and (codec.traits.exact or fidelity is Fidelity.LOSSY)

    def packing(self, name: str, namespace: Namespace) -> str:
        """Return the name of what packs now where ``name`` is configured."""
        if name not in CENTRED:
            return name
        return self._calibrated.get((name, _model(namespace)), UNCALIBRATED)

    def find(self, namespace: Namespace, names: Sequence[str]) -> list[str]:
        """Find the model's calibration; return those of ``names`` that need one and have none.

        Reads some small files.
        """
        missing: list[str] = []
        for name in names:
            if name in CENTRED and (name, _model(namespace)) not in self._calibrated:
                calibration = self._store.load(namespace, name) if self._store else None
                if calibration is None:
                    missing.append(name)
                else:
                    self._take(name, namespace, calibration)
        return missing

    def prepare(self, namespace: Namespace, names: Sequence[str]) -> None:
        """Find the model's calibration for those of ``names`` that need one, or begin to learn it.

        Once for each model, before its first request; from here on all that is stored teaches.
        """
        missing = self.find(namespace, names)
        calibrator = calibrator_for(namespace) if missing else None
        if isinstance(calibrator, Calibrator):
            self._learning = _Learning(calibrator, namespace, tuple(missing))

    def observe(self, pool: PagedPool, move: Move) -> None:
        """Learn from KV that is being stored, while a calibration is missing."""
        learning = self._learning
        if learning is None:
            return
        learning.calibrator.observe(pool, move)
        calibration = learning.calibrator.result()
        if calibration is None:
            return
        with self._lock:
            if self._learning is not learning:
                return
            self._learning = None
        for name in learning.names:
            self._take(name, learning.namespace, self._offer(name, learning, calibration))

    def _offer(self, name: str, learning: _Learning, calibration: Calibration) -> Calibration:
        """Return the calibration that all engines use: perhaps another was there first."""
        if self._store is None:
            return calibration
        try:
            return self._store.offer(learning.namespace, name, calibration)
        except KVTierError as error:
            _log.warning("the calibration lasts for this process only: %s", error)
            return calibration

    def _take(self, name: str, namespace: Namespace, calibration: Calibration) -> None:
        codec = codec_for(name, calibration)
        self._known[codec.name] = codec
        self._calibrated[name, _model(namespace)] = codec.name
        _log.info("%s packs with calibration %s", name, calibration.digest[:16])


def _model(namespace: Namespace) -> Namespace:
    """Return what a calibration is of: the model, whoever uses it and however exactly."""
    return replace(namespace, adapter_id="", tenant_salt="", fidelity=Fidelity.LOSSY)


def _make(name: str) -> BlockCodec:
    base, calibration_id = stored_name(name)
    if calibration_id:
        raise ConfigError(f"codec {base!r}: calibration {calibration_id} is not known here")
    return codec_for(name)
