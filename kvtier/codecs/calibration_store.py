"""Calibrations beside the chunks: one for all engines of a model and codec.

::

    calibrations/
      0f3a…            an object: a calibration's bytes, named by their SHA-256
      of-77b1…         a pointer: which object stands for one model and codec, and a checksum
      damaged-…        what was found damaged, set aside
      new-…            being written

The first engine that has learned a calibration links its pointer; all others find that one. What
is damaged counts as not there. A pointer never changes while it is whole, and an object never
does, so chunks that were packed with it stay readable.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import xxhash

from kvtier.codecs.calibration import CALIBRATION_BYTES_MAX, Calibration, parse_calibration
from kvtier.constants import QUARANTINE_FILES_MAX
from kvtier.errors import ConfigError, FormatError, TierFullError, TierUnavailableError
from kvtier.types import KVLayout, Namespace

_log = logging.getLogger("kvtier.calibration")

#: The folder beside a disk tier's chunks.
FOLDER: Final = "calibrations"
#: Objects in one folder; each model and codec brings one.
CALIBRATIONS_MAX: Final = 1024
#: Digits of an id that are asked for at least.
ID_DIGITS_MIN: Final = 16

_DIGEST_DIGITS: Final = 64
_POINTER: Final = "of-"
_DAMAGED: Final = "damaged-"
_NEW: Final = "new-"
#: A file still being written after so long was left by a process that died.
_STALE_S: Final = 3600.0
#: How often a damaged pointer is set aside and a new one tried, against other processes.
_ATTEMPTS_MAX: Final = 8


class CalibrationStore:
    """The calibrations in ``folder``, which is made when something is offered.

    Safe from any thread and process, without locks: names appear by ``link`` and ``rename``, whole.
    Every call blocks for some small files. What cannot be read is not there; it is logged.
    """

    def __init__(self, folder: Path) -> None:
        """``folder`` is the disk tier's, with ``calibrations`` behind it."""
        self._folder = folder

    def load(self, namespace: Namespace, codec: str) -> Calibration | None:
        """Return the calibration of a model and codec; None while there is none."""
        digest = self._pointed(_pointer_name(namespace, codec))
        return None if digest is None else self.find(digest, namespace.layout)

    def find(self, calibration_id: str, layout: KVLayout) -> Calibration | None:
        """Return the calibration of that digest, or of a digest that begins so; else None.

        ``calibration_id`` has at least ``ID_DIGITS_MIN`` hex digits.
        """
        digest = self._completed(calibration_id)
        if digest is None:
            return None
        try:
            return self._parsed(digest, layout)
        except (ConfigError, FormatError, OSError) as error:
            _log.warning("calibration %s cannot be used: %s", digest[:ID_DIGITS_MIN], error)
        return None

    def every(self, layout: KVLayout) -> list[Calibration]:
        """Return all sound calibrations of models with that layout; it may be cut otherwise."""
        try:
            digests = self._digests()[:CALIBRATIONS_MAX]
        except OSError:
            return []
        found: list[Calibration] = []
        for digest in digests:
            with contextlib.suppress(ConfigError, FormatError, OSError):  # Another model's.
                if (calibration := self._parsed(digest, layout)) is not None:
                    found.append(calibration)
        return found

    def offer(self, namespace: Namespace, codec: str, calibration: Calibration) -> Calibration:
        """Make a calibration the one of its model and codec; return the one that is, or was.

        On the disk when this returns. Raises ``TierFullError`` for too large a calibration or too
        many, and ``TierUnavailableError`` where the folder cannot be written.
        """
        name, digest = _pointer_name(namespace, codec), calibration.digest
        data = calibration.to_bytes()
        if len(data) > CALIBRATION_BYTES_MAX:
            raise TierFullError(f"a calibration of {len(data)} bytes; {CALIBRATION_BYTES_MAX} fit")
        with _as_our_error(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
            if found := self.load(namespace, codec):
                return found
            self._put_object(digest, data)
            for _ in range(_ATTEMPTS_MAX):
                if self._link(name, digest):
                    return calibration
                if found := self.load(namespace, codec):
                    return found
                self._set_aside(name, self._leads_somewhere)
        raise TierUnavailableError(f"{self._folder / name} leads to no calibration of this model")

    def _parsed(self, digest: str, layout: KVLayout) -> Calibration | None:
        """A calibration; None for what is not there or damaged. Raises for another layout's."""
        data = self._sound(digest)
        return parse_calibration(data, layout) if data else None

    def _sound(self, digest: str) -> bytes:
        """An object's bytes; nothing where it is not there, or damaged and set aside."""
        try:
            data = self._read(digest)
        except FileNotFoundError:
            return b""
        if hashlib.sha256(data).hexdigest() == digest:
            return data
        _log.warning("calibration %s is damaged and set aside", digest[:ID_DIGITS_MIN])
        self._set_aside(digest, lambda name: self._digest(name) == digest)
        return b""

    def audit(self) -> list[tuple[Path, str]]:
        """Return every damaged file with what is wrong: objects, and pointers that lead nowhere.

        Raises ``OSError`` where the folder cannot be read; one that is not there is sound.
        """
        if not self._folder.is_dir():
            return []
        digests = self._digests()
        damaged = [digest for digest in digests if self._digest(digest) != digest]
        sound = set(digests) - set(damaged)
        found = [(self._folder / digest, "differs from its digest") for digest in damaged]
        for path in sorted(self._folder.glob(f"{_POINTER}*")):
            digest = self._pointed(path.name)
            if digest not in sound:
                told = "is no pointer" if digest is None else "leads to no sound calibration"
                found.append((path, told))
        return found

    def put_away(self, path: Path) -> None:
        """Rename a damaged file of this folder, so that a sound one can take its place."""
        path.rename(path.with_name(f"{_DAMAGED}{path.name}-{os.getpid()}-{time.monotonic_ns()}"))

    def _pointed(self, name: str) -> str | None:
        """Return the digest that a pointer names; None for one that is not there, or damaged."""
        try:
            text = (self._folder / name).read_bytes()[: 2 * _DIGEST_DIGITS]
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("calibration pointer %s cannot be read: %s", name, error)
            return None
        digest = text[:_DIGEST_DIGITS].decode("ascii", "replace")
        return digest if text == _pointer_bytes(digest) else None

    def _completed(self, calibration_id: str) -> str | None:
        if len(calibration_id) < ID_DIGITS_MIN or set(calibration_id) - set("0123456789abcdef"):
            return None
        if len(calibration_id) == _DIGEST_DIGITS:
            return calibration_id
        try:
            return next((each for each in self._digests() if each.startswith(calibration_id)), None)
        except OSError:
            return None

    def _digests(self) -> list[str]:
        names = [path.name for path in self._folder.iterdir()]
        return sorted(name for name in names if len(name) == _DIGEST_DIGITS)

    def _read(self, name: str) -> bytes:
        with (self._folder / name).open("rb") as file:
            return file.read(CALIBRATION_BYTES_MAX + 1)

    def _digest(self, name: str) -> str:
        return hashlib.sha256(self._read(name)).hexdigest()

    def _put_object(self, digest: str, data: bytes) -> None:
        """Write an object; one of the same name has the same bytes, or is damaged."""
        known = self._digests()
        if len(known) >= CALIBRATIONS_MAX and digest not in known:
            raise TierFullError(f"{self._folder} holds {len(known)} calibrations")
        with self._written(data) as path:
            path.replace(self._folder / digest)
        _sync_directory(self._folder)

    def _link(self, name: str, digest: str) -> bool:
        """Make a pointer; False when there is one."""
        with self._written(_pointer_bytes(digest)) as path:
            try:
                os.link(path, self._folder / name)
            except FileExistsError:
                return False
        _sync_directory(self._folder)
        return True

    def _set_aside(self, name: str, is_whole: Callable[[str], bool]) -> None:
        """Rename what was found damaged; what another process has put there meanwhile stays."""
        aside = f"{_DAMAGED}{name}-{os.getpid()}-{time.monotonic_ns()}"
        try:
            (self._folder / name).rename(self._folder / aside)
        except FileNotFoundError:
            return
        if is_whole(aside):
            with contextlib.suppress(FileExistsError):
                os.link(self._folder / aside, self._folder / name)
            (self._folder / aside).unlink(missing_ok=True)

    def _leads_somewhere(self, pointer: str) -> bool:
        digest = self._pointed(pointer)
        return digest is not None and (self._folder / digest).exists()

    @contextmanager
    def _written(self, data: bytes) -> Iterator[Path]:
        """A new file with ``data``, on the disk; whatever is left of it goes at the end."""
        descriptor, text = tempfile.mkstemp(prefix=_NEW, dir=self._folder)
        path = Path(text)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _tidy(self) -> None:
        """Remove what dead processes left and the oldest of what was set aside."""
        new = sorted(self._folder.glob(f"{_NEW}*"))
        stale = [path for path in new if _age_s(path) > _STALE_S]
        aside = sorted(self._folder.glob(f"{_DAMAGED}*"), key=_age_s)
        for path in (*stale, *aside[QUARANTINE_FILES_MAX:]):
            path.unlink(missing_ok=True)


def _pointer_name(namespace: Namespace, codec: str) -> str:
    """Name a model, as far as its K is concerned, and a codec. Not how a deployment cuts it."""
    groups = [(each.layers, each.kv_heads, each.k_dim) for each in namespace.layout.groups]
    subject = repr((codec, namespace.weights_id, namespace.rope, groups))
    return _POINTER + hashlib.sha256(subject.encode()).hexdigest()


def _pointer_bytes(digest: str) -> bytes:
    data = digest.encode()
    return data + xxhash.xxh3_64_hexdigest(data).encode()


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _as_our_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierUnavailableError(f"{folder}: {error.strerror or error}") from error
