"""The codecs of one process, by the names that stand in orders, indexes and headers.

A name says all: ``int8``, or ``int4.0123456789abcdef`` for a codec with the calibration of that
id. What is asked for as ``int4`` packs as ``int5k4v`` until the model has a calibration, and as
``int6`` where that says that layers of the model lose more than they should.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from kvtier.codecs.assay import ASSAY_TOKENS, Assay
from kvtier.codecs.calibration import Calibration
from kvtier.codecs.calibrator import Calibrator
from kvtier.codecs.centred import (
    CENTRED,
    UNCALIBRATED,
    WEAK,
    Uncentred,
    blank_calibration,
    calibrator_for,
    codec_for,
    stored_name,
)
from kvtier.codecs.opaque import opaque_codec
from kvtier.constants import CLOSE_DEADLINE_S_DEFAULT
from kvtier.errors import ConfigError, KVTierError
from kvtier.interfaces import BlockCodec, PagedPool
from kvtier.types import Fidelity, KVLayout, Move, Namespace

_log = logging.getLogger("kvtier.calibration")


#: Of the tokens that a calibration is learned from, one in so many is then looked at.
_ASSAYED_SHARE: Final = 8


class Calibrations(Protocol):
    """Where calibrations are kept. Every call blocks for some small files."""

    def load(self, namespace: Namespace, codec: str) -> Calibration | None:
        """Return the calibration of a model and codec; None while there is none."""
        ...

    def find(self, calibration_id: str, layout: KVLayout) -> Calibration | None:
        """Return the calibration whose digest begins so; None where there is none."""
        ...

    def every(self, layout: KVLayout) -> list[Calibration]:
        """Return all calibrations of a layout."""
        ...

    def offer(self, namespace: Namespace, codec: str, calibration: Calibration) -> Calibration:
        """Keep a calibration unless there is one; return the one that is kept."""
        ...


class _Learning:
    """What is being learned for which model, and the codecs that wait for it."""

    def __init__(
        self, calibrator: Calibrator, namespace: Namespace, names: tuple[str, ...]
    ) -> None:
        self.namespace = namespace
        self.names = names
        self._calibrator = calibrator
        self._lock = threading.Lock()
        self._assay: Assay | None = None

    def observe(self, pool: PagedPool, move: Move) -> Calibration | None:
        """Learn from a move; return the calibration once it has been looked at, too."""
        self._calibrator.observe(pool, move)
        calibration = self._calibrator.result()
        if calibration is None:
            return None
        with self._lock:
            if self._assay is None:
                tokens = min(ASSAY_TOKENS, -(-self._calibrator.tokens // _ASSAYED_SHARE))
                self._assay = Assay(calibration, tokens=tokens)
        self._assay.observe(pool, move)
        weak_layers = self._assay.weak_layers
        return None if weak_layers is None else replace(calibration, weak_layers=weak_layers)


class KnownCodecs:
    """Makes each codec once. Safe from any thread; ``find``, ``prepare``, ``observe`` and ``close``
    block, and ``get`` does for a calibration that was not known before.

    ``store`` keeps calibrations for later runs and other engines; without one they last as long
    as this object.
    """

    def __init__(self, store: Calibrations | None = None) -> None:
        self._store = store
        self._known: dict[str, BlockCodec | None] = {}
        self._packing: dict[tuple[str, Namespace], str] = {}
        self._reasons: dict[tuple[str, Namespace], Uncentred] = {}
        self._layouts: set[KVLayout] = set()
        self._learning: _Learning | None = None
        self._offering: threading.Thread | None = None
        self._lock = threading.Lock()
        self._fallbacks: Counter[tuple[str, str]] = Counter()

    def get(self, name: str) -> BlockCodec:
        """Return a codec. Raises ``RegistryError`` and ``ConfigError`` where it cannot be made.

        A calibration that came after ``find`` is looked for in the store, for that model's layout.
        """
        codec = self._known.get(name) or opaque_codec(name)  # Of those there are any number.
        if codec is None:
            codec = self._known[name] = self._make(name)
        return codec

    def readable(self, name: str, fidelity: Fidelity) -> bool:
        """Tell whether what a codec packed may be used in a namespace of that fidelity.

        A codec that this process cannot make is a miss, and nothing lossy is ever exact.
        """
        if opaque_codec(name) is not None:
            return True
        if name not in self._known:
            if stored_name(name)[1]:  # One that is not known now may be later.
                return False
            try:
                self._known[name] = codec_for(name)
            except KVTierError:
                self._known[name] = None
        codec = self._known[name]
        return codec is not None and (codec.traits.exact or fidelity is Fidelity.LOSSY)

    def packing(self, name: str, namespace: Namespace) -> str:
        """Return the name of what packs now where ``name`` is configured."""
        if name not in CENTRED:
            return name
        return self._packing.get((name, _model(namespace)), UNCALIBRATED)

    def note_packed(self, name: str, namespace: Namespace, chunks: int) -> None:
        """Count chunks that are packed where ``name`` is configured, if another codec stands in."""
        if name in CENTRED and self.packing(name, namespace) in {UNCALIBRATED, WEAK}:
            reason = self._reasons.get((name, _model(namespace)), Uncentred.ABSENT)
            with self._lock:
                self._fallbacks[name, reason.value] += chunks

    @property
    def fallbacks(self) -> dict[tuple[str, str], int]:
        """Chunks that another codec packed, by the configured one and the reason."""
        with self._lock:
            return dict(self._fallbacks)

    def find(self, namespace: Namespace, names: Sequence[str]) -> list[str]:
        """Find the model's calibration; return those of ``names`` that need one and have none.

        Whatever was packed with any calibration of this layout can be read from now on. Reads some
        small files.
        """
        if self._store is not None and namespace.layout not in self._layouts:
            self._layouts.add(namespace.layout)
            for calibration in self._store.every(namespace.layout):
                for name in CENTRED:
                    codec = codec_for(name, calibration)
                    self._known[codec.name] = codec
        missing: list[str] = []
        for name in names:
            if name in CENTRED and (name, _model(namespace)) not in self._packing:
                calibration_found = self._store.load(namespace, name) if self._store else None
                if calibration_found is None:
                    missing.append(name)
                else:
                    self._take(name, namespace, calibration_found)
        return missing

    def prepare(self, namespace: Namespace, names: Sequence[str]) -> None:
        """Find the model's calibration for those of ``names`` that need one, or begin to learn it.

        Once for each model, before its first request; from here on all that is stored teaches.
        """
        missing = self.find(namespace, names)
        for name in set(names) & set(CENTRED) - set(missing):
            if self._store is not None and (found := self._store.load(namespace, name)):
                self._offer(name, namespace, found)  # A directory may be new.
        calibrator = calibrator_for(namespace) if missing else None
        learns = isinstance(calibrator, Calibrator)
        for name in missing:
            reason = Uncentred.LEARNING if learns else Uncentred.ROPE
            self._reasons[name, _model(namespace)] = reason
        if isinstance(calibrator, Calibrator):
            self._learning = _Learning(calibrator, namespace, tuple(missing))

    def foreseen(self, namespace: Namespace, names: Sequence[str]) -> list[str]:
        """Return the names of all codecs that may pack where these are configured.

        Once a calibration is learned another one packs: its kernels are better compiled before. It
        is known by a blank calibration here, which nothing is packed with. After ``find``.
        """
        foreseen: list[str] = []
        for name in names:
            now = self.packing(name, namespace)
            foreseen.append(now)
            if now == UNCALIBRATED != name:
                foreseen.append(WEAK)
                with contextlib.suppress(ConfigError):  # Nothing can be learned.
                    blank = codec_for(name, blank_calibration(namespace))
                    self._known[blank.name] = blank
                    foreseen.append(blank.name)
        return list(dict.fromkeys(foreseen))

    def observe(self, pool: PagedPool, move: Move) -> None:
        """Learn from KV that is being stored, while a calibration is missing.

        What was learned is written by a thread of its own, and packs once that is done.
        """
        learning = self._learning
        calibration = learning.observe(pool, move) if learning is not None else None
        if learning is None or calibration is None:
            return
        with self._lock:
            if self._learning is not learning:
                return
            self._learning = None
            thread = threading.Thread(
                target=self._settle,
                args=(learning, calibration),
                name="kvtier-calibration",
                daemon=True,
            )
            self._offering = thread
        thread.start()

    def close(self, timeout_s: float = CLOSE_DEADLINE_S_DEFAULT) -> None:
        """Learn no more, and wait until what was learned is written, as long as allowed."""
        with self._lock:
            self._learning = None
            offering = self._offering
        if offering is not None:
            offering.join(timeout_s)

    def _settle(self, learning: _Learning, calibration: Calibration) -> None:
        for name in learning.names:
            kept = self._offer(name, learning.namespace, calibration)
            self._take(name, learning.namespace, kept)

    def _offer(self, name: str, namespace: Namespace, calibration: Calibration) -> Calibration:
        """Return the calibration that all engines use: perhaps another was there first."""
        if self._store is None:
            return calibration
        try:
            return self._store.offer(namespace, name, calibration)
        except KVTierError as error:
            _log.warning("the calibration lasts for this process only: %s", error)
            return calibration

    def _take(self, name: str, namespace: Namespace, calibration: Calibration) -> None:
        codec = codec_for(name, calibration)
        self._known[codec.name] = codec
        place = name, _model(namespace)
        if calibration.weak_layers:
            self._reasons[place] = Uncentred.WEAK
            self._packing[place] = WEAK
            layers = ", ".join(map(str, calibration.weak_layers))
            _log.warning("%s would lose too much in layers %s: %s packs", name, layers, WEAK)
        else:
            self._packing[place] = codec.name
            _log.info("%s packs with calibration %s", name, calibration.digest[:16])

    def _make(self, name: str) -> BlockCodec:
        base, calibration_id = stored_name(name)
        if not calibration_id:
            return codec_for(name)
        store = self._store
        for layout in tuple(self._layouts):
            if store is not None and (found := store.find(calibration_id, layout)) is not None:
                return codec_for(base, found)
        raise ConfigError(f"codec {base!r}: calibration {calibration_id} is not known here")


def _model(namespace: Namespace) -> Namespace:
    """Return what a calibration is of: the model, whoever uses it and however exactly."""
    return replace(namespace, adapter_id="", tenant_salt="", fidelity=Fidelity.LOSSY)
