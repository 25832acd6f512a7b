"""One bucket, call by call, through boto3. Every call may block.

::

    PREFIX/3f/00ffab….kv    an object: its key in hex, under one of 256 prefixes by its hash

S3 scales by prefix, so objects are spread over many whatever their keys begin with.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import boto3
import botocore.loaders
import botocore.session
from botocore import exceptions as boto_errors

from kvtier.errors import ConnectorDataError, ConnectorError, ConnectorUnavailableError
from kvtier.types import KeyInfo
from kvtier_connectors.s3.answers import NOTHING, Piece, Placed, field, take_in
from kvtier_connectors.s3.errors import MET, is_missing, status_of, translated
from kvtier_connectors.s3.settings import Settings, client_config
from kvtier_connectors.threads import Halt

#: In hex and with its ending a key must fit into 255 bytes: S3 allows more, stores that keep
#: objects as files do not.
KEY_BYTES_MAX: Final = 120
DELETES_MAX: Final = 1000

# Reading what boto3 knows of S3 takes a second; one is enough for all buckets.
_LOADER: Final = botocore.loaders.create_loader()
_LOADER_LOCK: Final = threading.Lock()
_NAME: Final = re.compile(r"[0-9a-f]{2}/((?:[0-9a-f]{2})*)\.kv")
#: Answers of stores that know no condition on a PUT, or no deletion of many.
_UNKNOWN: Final = {400, 405, 501}


class Upload(NamedTuple):
    """A part of a large object that is on its way."""

    key: bytes
    upload_id: str
    number: int
    data: memoryview


class Bucket:
    """Calls of S3. Used from several threads; raises ``ConnectorError`` and nothing else."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._here = threading.local()
        self._made: Any = None
        self._conditions = settings.if_absent

    @contextmanager
    def unless(self, halt: Halt) -> Iterator[None]:
        """Let the calls of this thread send nothing any more once ``halt`` is set."""
        self._here.halt = halt
        try:
            yield
        finally:
            del self._here.halt

    def contains(self, key: bytes) -> bool:
        """Tell whether the object is there."""
        return self._size(key) is not None

    def read(self, piece: Piece, halt: Halt) -> Placed | None:
        """Fill the memory as far as the object reaches; None: it is not there.

        An answer that ends too early is gone on with from where it ended, while the object is the
        same; each such try counts.
        """
        if len(piece.key) > KEY_BYTES_MAX:
            return None
        if len(piece.into) == 0:
            return self._nothing_of(piece)
        placed, problem = NOTHING, ConnectorError()
        for _ in range(self._settings.tries):
            try:
                answer = self._get(piece, placed)
                placed, problem = take_in(answer, piece, placed, halt)
            except boto_errors.ClientError as error:
                if is_missing(error):
                    return None
                if status_of(error) == 416:
                    return self._nothing_of(piece)
                if status_of(error) != 412:
                    raise translated(error) from error
                # Another object under the same name, while we were at the old one's middle.
                placed, problem = NOTHING, ConnectorUnavailableError("an object that changes")
            except MET as error:
                raise translated(error) from error
            if placed.fills(piece):
                return placed
        raise problem

    def write(self, key: bytes, data: memoryview) -> None:
        """Store an object in one go; the store verifies its checksum."""
        # boto3 takes no memoryview; the copy is a small part of what sending it costs.
        self._store("put_object", key, Body=bytes(data))

    def begin_upload(self, key: bytes) -> str | None:
        """Begin an object that is sent in parts; None: what is there is to stay."""
        if self._conditions and self.contains(key):
            return None
        answer = self._guarded("create_multipart_upload", key, ChecksumAlgorithm="CRC32")
        return str(field(answer, "UploadId"))

    def send_part(self, upload: Upload) -> dict[str, Any]:
        """Send a part; return what ``end_upload`` must know of it."""
        answer = self._guarded(
            "upload_part",
            upload.key,
            UploadId=upload.upload_id,
            PartNumber=upload.number,
            Body=bytes(upload.data),
            ChecksumAlgorithm="CRC32",
        )
        part = {"PartNumber": upload.number, "ETag": field(answer, "ETag")}
        if "ChecksumCRC32" in answer:
            part["ChecksumCRC32"] = answer["ChecksumCRC32"]
        return part

    def end_upload(self, key: bytes, upload_id: str, parts: list[dict[str, Any]]) -> None:
        """Make an object of the parts; until then nobody sees any of it."""
        options = {"UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
        if not self._store("complete_multipart_upload", key, **options):
            self.abort_upload(key, upload_id)

    def abort_upload(self, key: bytes, upload_id: str) -> None:
        """Let go of the parts."""
        self._guarded("abort_multipart_upload", key, UploadId=upload_id)

    def delete(self, keys: list[bytes]) -> None:
        """Delete at most ``DELETES_MAX`` objects."""
        able = [key for key in keys if len(key) <= KEY_BYTES_MAX]
        names = {"Objects": [{"Key": self._name(key)} for key in able], "Quiet": True}
        if not able:
            return
        try:
            self._client().delete_objects(Bucket=self._settings.bucket, Delete=names)
        except boto_errors.ClientError as error:
            if status_of(error) not in _UNKNOWN:
                raise translated(error) from error
            for key in able:
                self._guarded("delete_object", key)
        except MET as error:
            raise translated(error) from error

    def page(self, prefix: bytes, token: str | None) -> tuple[list[KeyInfo], str | None]:
        """Return some of the objects, and where to go on; None: that was the last page."""
        options = {"ContinuationToken": token} if token else {}
        try:
            answer = self._client().list_objects_v2(
                Bucket=self._settings.bucket, Prefix=self._settings.prefix, **options
            )
        except MET as error:
            raise translated(error) from error
        found = list(self._infos(answer.get("Contents", []), prefix))
        following = answer.get("NextContinuationToken") if answer.get("IsTruncated") else None
        if following is not None and following == token:
            raise ConnectorDataError("the store lists the same page again and again")
        return found, following

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            if self._made is not None:
                self._made.close()

    def _infos(self, contents: list[dict[str, Any]], prefix: bytes) -> Iterator[KeyInfo]:
        for each in contents:
            match = _NAME.fullmatch(field(each, "Key")[len(self._settings.prefix) :])
            if match and match[1].startswith(prefix.hex()):
                yield KeyInfo(bytes.fromhex(match[1]), field(each, "Size"))

    def _get(self, piece: Piece, placed: Placed) -> dict[str, Any]:
        """Ask for the rest of a piece, of the version that has come so far."""
        start, stop = piece.offset + placed.nbytes, piece.offset + len(piece.into)
        condition = {"IfMatch": placed.etag} if placed.etag else {}
        return self._call("get_object", piece.key, Range=f"bytes={start}-{stop - 1}", **condition)

    def _nothing_of(self, piece: Piece) -> Placed | None:
        """Return an empty piece of the object, if that is there."""
        size = self._size(piece.key)
        return None if size is None else Placed(0, "", min(size, piece.offset))

    def _store(self, verb: str, key: bytes, **options: Any) -> bool:
        """Do what makes an object; False: there is one already, which is to stay."""
        if self._conditions:
            try:
                self._call(verb, key, IfNoneMatch="*", **options)
                return True
            except boto_errors.ClientError as error:
                if status_of(error) == 412:
                    return False
                if status_of(error) != 501:
                    raise translated(error) from error
                # A store that knows no conditions: it costs uploads, and no more.
                self._conditions = False
            except MET as error:
                raise translated(error) from error
        self._guarded(verb, key, **options)
        return True

    def _size(self, key: bytes) -> int | None:
        if len(key) > KEY_BYTES_MAX:
            return None
        try:
            return int(field(self._call("head_object", key), "ContentLength"))
        except boto_errors.ClientError as error:
            if is_missing(error):
                return None
            raise translated(error) from error
        except MET as error:
            raise translated(error) from error

    def _guarded(self, verb: str, key: bytes, **options: Any) -> dict[str, Any]:
        try:
            return self._call(verb, key, **options)
        except MET as error:
            raise translated(error) from error

    def _call(self, verb: str, key: bytes, **options: Any) -> dict[str, Any]:
        method = getattr(self._client(), verb)
        answer: dict[str, Any] = method(
            Bucket=self._settings.bucket, Key=self._name(key), **options
        )
        return answer

    def _client(self) -> Any:
        """Make the client at first use: that takes a while and reads files."""
        with self._lock:
            if self._made is None:
                with _LOADER_LOCK:
                    core = botocore.session.Session(profile=self._settings.profile)
                    core.register_component("data_loader", _LOADER)
                    self._made = boto3.session.Session(botocore_session=core).client(
                        "s3",
                        endpoint_url=self._settings.endpoint,
                        region_name=self._settings.region,
                        config=client_config(self._settings),
                    )
                self._made.meta.events.register("before-send.s3", self._before_send)
            return self._made

    def _before_send(self, **_: Any) -> None:
        """Called by boto3 before each try of each call."""
        halt: Halt | None = getattr(self._here, "halt", None)
        if halt is not None and halt.is_set():
            raise ConnectorUnavailableError("the call was given up")

    def _name(self, key: bytes) -> str:
        spread = hashlib.blake2b(key, digest_size=1).hexdigest()
        return f"{self._settings.prefix}{spread}/{key.hex()}.kv"
