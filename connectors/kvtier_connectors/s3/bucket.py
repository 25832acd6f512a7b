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
from typing import Any, Final, NamedTuple

import boto3
import botocore.loaders
import botocore.session
from botocore import exceptions as boto_errors

from kvtier.constants import MIB
from kvtier.errors import ConnectorDataError, ConnectorError, ConnectorUnavailableError
from kvtier.types import KeyInfo
from kvtier_connectors.s3.errors import MET, is_missing, status_of, translated
from kvtier_connectors.s3.settings import Settings, client_config
from kvtier_connectors.threads import Halt

#: In hex and with its ending a key must fit into 255 bytes: S3 allows more, stores that keep
#: objects as files do not.
KEY_BYTES_MAX: Final = 120
DELETES_MAX: Final = 1000
#: A cancelled read ends after so many bytes.
STEP_BYTES: Final = MIB

# Reading what boto3 knows of S3 takes a second; one is enough for all buckets.
_LOADER: Final = botocore.loaders.create_loader()
_LOADER_LOCK: Final = threading.Lock()
_NAME: Final = re.compile(r"[0-9a-f]{2}/((?:[0-9a-f]{2})*)\.kv")
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Piece(NamedTuple):
    """A range of an object, and the memory for it."""

    key: bytes
    offset: int
    into: memoryview


class Placed(NamedTuple):
    """How much of a piece came; which version of the object it is from, and how large that is."""

    nbytes: int
    etag: str
    object_bytes: int


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
        self._made: Any = None

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
        placed = Placed(0, "", -1)
        problem: ConnectorError = ConnectorUnavailableError("answers that end too early")
        for _ in range(self._settings.tries):
            try:
                answer = self._get(piece, placed)
                if answer is None:
                    return None
                placed, problem = _received(answer, piece, placed, halt)
            except MET as error:
                raise translated(error) from error
            end = min(placed.object_bytes - piece.offset, len(piece.into))
            if placed.nbytes >= end:
                return placed
        raise problem

    def write(self, key: bytes, data: memoryview) -> None:
        """Store an object in one go; the store verifies its checksum."""
        condition = {"IfNoneMatch": "*"} if self._settings.if_absent else {}
        try:
            # boto3 takes no memoryview; the copy is a small part of what sending it costs.
            self._call("put_object", key, Body=bytes(data), **condition)
        except boto_errors.ClientError as error:
            if status_of(error) != 412:
                raise translated(error) from error
        except MET as error:
            raise translated(error) from error

    def begin_upload(self, key: bytes) -> str:
        """Begin an object that is sent in parts."""
        answer = self._guarded("create_multipart_upload", key, ChecksumAlgorithm="CRC32")
        return str(answer["UploadId"])

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
        part = {"PartNumber": upload.number, "ETag": answer["ETag"]}
        if "ChecksumCRC32" in answer:
            part["ChecksumCRC32"] = answer["ChecksumCRC32"]
        return part

    def end_upload(self, key: bytes, upload_id: str, parts: list[dict[str, Any]]) -> None:
        """Make an object of the parts; until then nobody sees any of it."""
        self._guarded(
            "complete_multipart_upload",
            key,
            UploadId=upload_id,
            MultipartUpload={"Parts": parts},
        )

    def abort_upload(self, key: bytes, upload_id: str) -> None:
        """Let go of the parts."""
        self._guarded("abort_multipart_upload", key, UploadId=upload_id)

    def delete(self, keys: list[bytes]) -> None:
        """Delete at most ``DELETES_MAX`` objects."""
        names = [{"Key": self._name(key)} for key in keys if len(key) <= KEY_BYTES_MAX]
        if names:
            try:
                self._client().delete_objects(
                    Bucket=self._settings.bucket, Delete={"Objects": names, "Quiet": True}
                )
            except MET as error:
                raise translated(error) from error

    def page(self, prefix: bytes, token: str | None) -> tuple[list[KeyInfo], str | None]:
        """Return some of the objects, and where to go on."""
        options = {"ContinuationToken": token} if token else {}
        try:
            answer = self._client().list_objects_v2(
                Bucket=self._settings.bucket, Prefix=self._settings.prefix, **options
            )
        except MET as error:
            raise translated(error) from error
        found = list(self._infos(answer.get("Contents", []), prefix))
        return found, answer.get("NextContinuationToken") if answer["IsTruncated"] else None

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            if self._made is not None:
                self._made.close()

    def _infos(self, contents: list[dict[str, Any]], prefix: bytes) -> Iterator[KeyInfo]:
        for each in contents:
            match = _NAME.fullmatch(each["Key"][len(self._settings.prefix) :])
            if match and match[1].startswith(prefix.hex()):
                yield KeyInfo(bytes.fromhex(match[1]), each["Size"])

    def _get(self, piece: Piece, placed: Placed) -> dict[str, Any] | None:
        """Ask for the rest of a piece. An empty answer: there is nothing behind its beginning."""
        if len(piece.into) == 0:
            size = self._size(piece.key)
            return None if size is None else {"size": size}
        start, stop = piece.offset + placed.nbytes, piece.offset + len(piece.into)
        condition = {"IfMatch": placed.etag} if placed.etag else {}
        try:
            answer: dict[str, Any] = self._call(
                "get_object", piece.key, Range=f"bytes={start}-{stop - 1}", **condition
            )
        except boto_errors.ClientError as error:
            if status_of(error) == 416:
                size = self._size(piece.key)
                return None if size is None else {"size": size}
            # Another object under the same name, while we were at the old one's middle.
            if is_missing(error) or status_of(error) == 412:
                return None
            raise
        return answer

    def _size(self, key: bytes) -> int | None:
        if len(key) > KEY_BYTES_MAX:
            return None
        try:
            return int(self._call("head_object", key)["ContentLength"])
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
        with self._lock, _LOADER_LOCK:
            if self._made is None:
                core = botocore.session.Session(profile=self._settings.profile)
                core.register_component("data_loader", _LOADER)
                self._made = boto3.session.Session(botocore_session=core).client(
                    "s3",
                    endpoint_url=self._settings.endpoint,
                    region_name=self._settings.region,
                    config=client_config(self._settings),
                )
            return self._made

    def _name(self, key: bytes) -> str:
        spread = hashlib.blake2b(key, digest_size=1).hexdigest()
        return f"{self._settings.prefix}{spread}/{key.hex()}.kv"


def _received(
    answer: dict[str, Any], piece: Piece, placed: Placed, halt: Halt
) -> tuple[Placed, ConnectorError]:
    """Take in an answer; return how far the piece has come, and what to say if that is all."""
    problem: ConnectorError = ConnectorUnavailableError("an answer that ended too early")
    if "size" in answer:
        return Placed(0, placed.etag, min(answer["size"], piece.offset)), problem
    body, done = answer["Body"], placed.nbytes
    size = _object_bytes(answer, piece.offset + done)
    end = min(size - piece.offset, len(piece.into))
    try:
        while done < end and not halt.is_set():
            count = body.readinto(piece.into[done : min(done + STEP_BYTES, end)])
            if count == 0:
                break
            done += count
    except MET as error:
        problem = translated(error)
    finally:
        body.close()
    return Placed(done, answer["ETag"], size), problem


def _object_bytes(answer: dict[str, Any], start: int) -> int:
    """Return the size of the whole object, of which this answer begins where it should."""
    match = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
    if match and int(match[1]) == start:
        return int(match[3])
    if not match and start == 0:
        return int(answer["ContentLength"])
    raise ConnectorDataError("the store answered with another range than was asked for")
