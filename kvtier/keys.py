"""Content addresses: namespaces, chunks, shards and weights, each a SHA-256 of canonical bytes.

Equal inputs give equal keys in every process, on every machine and in every Python version.
SHA-256, because tenants must not be able to craft collisions::

    root      = H(encoding of the namespace, its epoch and, once raised, its tenant's epoch)
    chunk 0   = H(root      | tokens of chunk 0)         tokens: little-endian int32
    chunk i   = H(chunk i-1 | tokens of chunk i)
    tail      = H(chunk i-1 | "tail" | n | n tokens)     n: little-endian uint16
    foreign   = H(encoding of root, scheme and the foreign key)

A tail's input is 2 bytes longer than a multiple of 4, so that no chunk and no tail hash alike.

In encodings every field is ``tag (1 byte) | length (uint32) | value``, in the order of the tags,
nested fields too; integers are big-endian. All are always present, except the tenant's epoch,
which is absent at 0. No two sets of fields encode alike.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import index as to_index

from kvtier.constants import CHUNK_TOKENS_MAX, DIGEST_BYTES
from kvtier.errors import ConfigError, FormatError, LayoutError
from kvtier.layout import INDEX_MAX, check_integer, validate_layout
from kvtier.types import ChunkKey, Fidelity, KVGroup, KVLayout, Namespace, ShardId, ShardKey

SHARD_KEY_BYTES = DIGEST_BYTES + 6
TOKEN_ID_MAX = 2**31 - 1
#: Longest text field of a namespace or of a weight's name, in UTF-8 bytes.
TEXT_BYTES_MAX = 65_536

#: Longest key of another system that ``foreign_key`` takes.
FOREIGN_KEY_BYTES_MAX = 1024

_NAMESPACE_PREFIX = b"KVTier namespace 1"
_FOREIGN_PREFIX = b"KVTier foreign key 1"
_TENANT_PREFIX = b"KVTier tenant 1"
_WEIGHTS_PREFIX = b"KVTier weights 1"
_SHARD_ID = struct.Struct(">HHH")


def encode_namespace(namespace: Namespace, epoch: int = 0, tenant_epoch: int = 0) -> bytes:
    """Return the canonical bytes of a namespace at its epochs; distinct inputs, distinct bytes.

    Raises ``ConfigError`` or, for the layout, ``LayoutError`` that names the field, its value and
    what is allowed.
    """
    encoded_epoch = _uint64("epoch", epoch)
    encoded_tenant_epoch = _uint64("tenant_epoch", tenant_epoch)
    if not namespace.weights_id:
        raise ConfigError("weights_id is ''; it must say which weights computed the KV")
    if namespace.fidelity not in tuple(Fidelity):
        raise ConfigError(f"fidelity is {namespace.fidelity!r}; allowed are {', '.join(Fidelity)}")
    validate_layout(namespace.layout)
    return _NAMESPACE_PREFIX + b"".join(
        (
            _field(1, _text("weights_id", namespace.weights_id)),
            _field(2, _encode_layout(namespace.layout)),
            _field(3, _text("rope", namespace.rope)),
            _field(4, _text("kv_scales_id", namespace.kv_scales_id)),
            _field(5, _text("adapter_id", namespace.adapter_id)),
            _field(6, _text("tenant_salt", namespace.tenant_salt)),
            _field(7, namespace.fidelity.encode()),
            _field(8, encoded_epoch),
            _field(9, encoded_tenant_epoch) if tenant_epoch else b"",
        )
    )


def namespace_digest(namespace: Namespace, epoch: int = 0, tenant_epoch: int = 0) -> bytes:
    """Return the 32-byte root of every key chain of a namespace at its epochs.

    Raises as ``encode_namespace`` does.
    """
    return hashlib.sha256(encode_namespace(namespace, epoch, tenant_epoch)).digest()


def tenant_digest(salt: str) -> bytes:
    """Return the 32 bytes by which a tenant is known where its salt must not stand.

    Whoever knows it can try salts, so it hides no salt that can be guessed. Raises ``ConfigError``
    for a salt that no namespace may have, and for the empty one, which is no tenant's.
    """
    if not salt:
        raise ConfigError("the tenant's salt is ''; the empty salt is no tenant's")
    return hashlib.sha256(_TENANT_PREFIX + _field(1, _text("tenant_salt", salt))).digest()


def encode_tokens(tokens: Sequence[int] | memoryview) -> bytes:
    """Return token ids as little-endian int32, 4 bytes each.

    A ``memoryview`` must be one-dimensional with format ``i``. Raises ``LayoutError`` that names
    the first token outside 0 .. 2**31 - 1.
    """
    # Unsigned, because array takes those in half the time; the sign is looked for below.
    encoded = array("I")
    if isinstance(tokens, memoryview):
        if tokens.format != "i" or tokens.ndim != 1:
            raise LayoutError(
                f"tokens have format {tokens.format!r} and {tokens.ndim} dimensions; allowed is "
                "a memoryview of int32 (format 'i') with one dimension"
            )
        encoded.frombytes(tokens.tobytes())
    else:
        # A list: array() itself would take bytes for machine values.
        values = tokens if isinstance(tokens, list) else list(tokens)
        try:
            encoded.fromlist(values)
        except (TypeError, OverflowError) as error:
            raise _token_error(values) from error
    if sys.byteorder == "big":
        encoded.byteswap()
    data = encoded.tobytes()
    # The fourth byte of each token carries the sign.
    if not data[3::4].isascii():
        raise _token_error(list(tokens))
    return data


def chunk_key(parent: bytes, tokens: Sequence[int] | memoryview) -> ChunkKey:
    """Return the key of the chunk ``tokens`` whose prefix has the key ``parent``.

    ``parent`` is the namespace's digest for the first chunk. Raises ``LayoutError`` for a token
    that is no int32 or is negative, for no tokens at all and for a parent that is no digest.
    """
    return extend_chain(parent, encode_tokens(tokens))


def extend_chain(parent: bytes, encoded: bytes | memoryview) -> ChunkKey:
    """Return the key of the chunk whose tokens ``encode_tokens`` has encoded."""
    _check_parent(parent)
    if not encoded:
        raise LayoutError("a chunk has no tokens; it needs at least one")
    return ChunkKey(hashlib.sha256(parent + encoded).digest())


def tail_key(parent: bytes, tokens: Sequence[int] | memoryview) -> ChunkKey:
    """Return the key of a tail: fewer tokens than a chunk, never the parent of anything.

    Raises as ``chunk_key`` does.
    """
    _check_parent(parent)
    count = check_integer("the number of tail tokens", len(tokens), 1, CHUNK_TOKENS_MAX - 1)
    head = parent + b"tail" + count.to_bytes(2, "little")
    return ChunkKey(hashlib.sha256(head + encode_tokens(tokens)).digest())


def foreign_key(root: bytes, scheme: str, key: bytes) -> ChunkKey:
    """Return the key of what another system calls ``key``, for plugs that know no tokens.

    ``root`` is the namespace's digest and ``scheme`` says whose key it is, and of what. Raises
    ``ConfigError`` for a scheme that is no text and for a key of no bytes or of more than
    ``FOREIGN_KEY_BYTES_MAX``.
    """
    head = _foreign_head(root, scheme)
    if not 1 <= len(key) <= FOREIGN_KEY_BYTES_MAX:
        raise ConfigError(
            f"a foreign key has {len(key)} bytes; allowed are 1 to {FOREIGN_KEY_BYTES_MAX}"
        )
    return ChunkKey(hashlib.sha256(head + _field(3, key)).digest())


@lru_cache(maxsize=1024)
def _foreign_head(root: bytes, scheme: str) -> bytes:
    """Return what all keys of one scheme under one root begin with. Raises ``ConfigError``."""
    _check_parent(root)
    return _FOREIGN_PREFIX + _field(1, root) + _field(2, _text("scheme", scheme))


def shard_key(chunk: ChunkKey, shard: ShardId) -> ShardKey:
    """Return the 38-byte address of one shard of a chunk."""
    _check_parent(chunk)
    for name, value in zip(shard._fields, shard, strict=True):
        check_integer(name, value, 0, INDEX_MAX)
    return ShardKey(chunk + _SHARD_ID.pack(*shard))


def split_shard_key(key: bytes) -> tuple[ChunkKey, ShardId]:
    """Undo ``shard_key``. Raises ``FormatError`` for any other length than 38 bytes."""
    if len(key) != SHARD_KEY_BYTES:
        raise FormatError(f"a shard key has {SHARD_KEY_BYTES} bytes, not {len(key)}")
    return ChunkKey(key[:DIGEST_BYTES]), ShardId(*_SHARD_ID.unpack(key[DIGEST_BYTES:]))


def weights_id(tensors: Iterable[tuple[str, str, tuple[int, ...], bytes]]) -> str:
    """Return the hexadecimal identity of a set of weights, whatever their order.

    Each tensor is its name, dtype, shape and the SHA-256 of its bytes. Raises ``ConfigError`` for
    no tensors, a name that comes twice, a size that is no uint64 or a digest of another length.
    """
    named: dict[str, bytes] = {}
    for name, dtype, shape, digest in tensors:
        if name in named:
            raise ConfigError(f"tensor {name!r} comes twice; names of weights are unique")
        if len(digest) != DIGEST_BYTES:
            raise ConfigError(
                f"the digest of tensor {name!r} has {len(digest)} bytes; allowed is a SHA-256 "
                f"of {DIGEST_BYTES}"
            )
        named[name] = b"".join(
            (
                _field(1, _text("tensor name", name)),
                _field(2, _text(f"dtype of tensor {name!r}", dtype)),
                _field(3, b"".join(_uint64(f"a size of tensor {name!r}", size) for size in shape)),
                _field(4, digest),
            )
        )
    if not named:
        raise ConfigError("no tensors; weights without tensors have no identity")
    state = hashlib.sha256(_WEIGHTS_PREFIX)
    for name in sorted(named):
        state.update(_field(1, named[name]))
    return state.hexdigest()


def _encode_layout(layout: KVLayout) -> bytes:
    return b"".join(
        (
            _field(1, b"".join(_field(1, _encode_group(group)) for group in layout.groups)),
            _field(2, _uint32(layout.chunk_tokens)),
            _field(3, _uint32(layout.head_groups)),
            _field(4, b"".join(map(_uint32, layout.stage_starts))),
            _field(5, _uint32(layout.section_layers)),
        )
    )


def _encode_group(group: KVGroup) -> bytes:
    return b"".join(
        (
            _field(1, group.kind.encode()),
            _field(2, b"".join(map(_uint32, group.layers))),
            _field(3, _uint32(group.kv_heads)),
            _field(4, _uint32(group.k_dim)),
            _field(5, _uint32(group.v_dim)),
            _field(6, group.dtype.encode()),
            _field(7, _uint32(group.window_tokens)),
        )
    )


def _field(tag: int, value: bytes) -> bytes:
    return bytes((tag,)) + _uint32(len(value)) + value


def _uint32(value: int) -> bytes:
    return value.to_bytes(4, "big")


def _uint64(name: str, value: object) -> bytes:
    try:
        return check_integer(name, value, 0, 2**64 - 1).to_bytes(8, "big")
    except LayoutError as error:
        raise ConfigError(str(error)) from error


def _text(name: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}; allowed is text")
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is {value!r}; allowed is text that UTF-8 can encode") from error
    if len(encoded) > TEXT_BYTES_MAX:
        raise ConfigError(
            f"{name} has {len(encoded)} bytes of UTF-8; allowed are at most {TEXT_BYTES_MAX}"
        )
    return encoded


def _check_parent(parent: bytes) -> None:
    if len(parent) != DIGEST_BYTES:
        raise LayoutError(f"a chunk key has {DIGEST_BYTES} bytes, not {len(parent)}")


def _token_error(tokens: Sequence[object]) -> LayoutError:
    for position, token in enumerate(tokens):
        try:
            fits = 0 <= to_index(token) <= TOKEN_ID_MAX  # type: ignore[arg-type]
        except TypeError:
            fits = False
        if not fits:
            return LayoutError(
                f"token {token!r} at index {position}; allowed are integers from 0 to "
                f"{TOKEN_ID_MAX}"
            )
    raise AssertionError("every token fits")
