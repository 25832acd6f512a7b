"""The words of KVTier as values: keys, KV groups, shards, moves, plans and their results.

Plain frozen data: picklable, comparable, no behaviour beyond arithmetic on their own fields.
Everything here crosses a process boundary somewhere (scheduler to worker, owner to client).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple, NewType

from kvtier.constants import CHUNK_TOKENS_DEFAULT, SECTION_LAYERS_DEFAULT

#: 32 bytes: the chained digest of a prefix inside a namespace. Plain bytes on purpose: with
#: hundreds of thousands alive, a class would cost the garbage collector five times as much.
ChunkKey = NewType("ChunkKey", bytes)

#: ``ChunkKey`` followed by group, stage and head group as big-endian uint16: 38 bytes.
ShardKey = NewType("ShardKey", bytes)

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}


class GroupKind(StrEnum):
    """What the layers of a KV group keep."""

    FULL = "full"
    WINDOW = "window"
    LATENT = "latent"


class Fidelity(StrEnum):
    """``exact`` namespaces never hold what a lossy codec has touched."""

    EXACT = "exact"
    LOSSY = "lossy"


class Part(IntEnum):
    """K or V, in the order in which a shard holds them."""

    K = 0
    V = 1


class Tier(StrEnum):
    """Where KV was found. HBM belongs to the engine; KVTier's own tiers start below it."""

    HBM = "hbm"
    DRAM = "dram"
    DISK = "disk"
    REMOTE = "remote"


class MissReason(StrEnum):
    """Why tokens that could have come from a tier did not."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    DEADLINE = "deadline"
    IO_ERROR = "io_error"
    UNAVAILABLE = "unavailable"
    NO_ROOM = "no_room"
    CANCELLED = "cancelled"
    CODEC = "codec"
    WORKER = "worker"
    QUOTA = "quota"
    COST = "cost"
    CROWDED = "crowded"


class Hint(StrEnum):
    """What a caller knows of a session's future; a feature for policies, never an order."""

    NONE = "none"
    WILL_CONTINUE = "will_continue"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with one kind of KV.

    ``layers`` are the model's layer indices, ascending. ``latent`` groups (MLA) keep one row per
    token: ``kv_heads == 1``, ``k_dim`` = latent + rope part, ``v_dim == 0``.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a model's KV is cut into shards; part of the namespace.

    ``head_groups`` is the tensor-parallel degree of the *stored* form (a reader may have another).
    ``stage_starts`` holds the first model layer of each pipeline stage, so ``(0,)`` is one stage.
    """

    groups: tuple[KVGroup, ...]
    chunk_tokens: int = CHUNK_TOKENS_DEFAULT
    head_groups: int = 1
    stage_starts: tuple[int, ...] = (0,)
    section_layers: int = SECTION_LAYERS_DEFAULT


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that makes KV incompatible. Two namespaces never share a key.

    ``rope`` is the canonical text of the rotary embedding's parameters, ``kv_scales_id`` the
    digest of an engine's own KV scales (fp8 pools), ``tenant_salt`` the caller's isolation key.
    """

    weights_id: str
    layout: KVLayout
    rope: str = ""
    kv_scales_id: str = ""
    adapter_id: str = ""
    tenant_salt: str = ""
    fidelity: Fidelity = Fidelity.EXACT


@dataclass(frozen=True, slots=True)
class CodecTraits:
    """What the tiers must know of a codec beside its sizes.

    ``exact``: what comes back is what was stored, bit for bit. ``sink_tokens``: how many of a
    sequence's first tokens it keeps exactly, beside the others of the first chunk.
    """

    exact: bool
    sink_tokens: int = 0


class ShardId(NamedTuple):
    """Which shard of a chunk: KV group index, pipeline stage, head group."""

    group: int
    stage: int
    head_group: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Shape of one shard: planes ``[layer][kv_head][K, V][tokens][dim]``.

    ``layers`` counts this shard's layers (one group, one stage); ``kv_heads`` those of its head
    group. Sizes in bytes belong to the codec; ``plane_bytes`` is the unpacked (pool) size.
    ``sink_tokens`` of the first tokens are kept exactly beside what the codec makes of them: only
    in the shard of the sequence's first chunk, and only for a codec that asks for it.
    """

    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    tokens: int
    section_layers: int = SECTION_LAYERS_DEFAULT
    sink_tokens: int = 0

    @property
    def sections(self) -> int:
        """Number of sections: ``section_layers`` layers each, the last one perhaps fewer."""
        return -(-self.layers // self.section_layers)

    def section_layer_range(self, section: int) -> range:
        """Layers (counted within the shard) that a section holds."""
        start = section * self.section_layers
        return range(start, min(start + self.section_layers, self.layers))

    def plane_bytes(self, part: Part) -> int:
        """Unpacked bytes of one plane, ``tokens x dim``."""
        dim = self.k_dim if part is Part.K else self.v_dim
        return self.tokens * dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which share of the model a worker's pool holds.

    Of a group's kv heads, tensor-parallel rank r of n holds ``kvtier.layout.head_range``;
    ``stage`` is its pipeline stage.
    """

    worker: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """A shard's place in the arena: ``nbytes`` from ``offset``, both multiples of 4096."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Engine blocks that cover tokens from ``start_token`` on, one tuple of ids per KV group.

    A block holds ``block_tokens`` tokens and ``start_token`` is a multiple of that. The engine
    keeps these blocks alive and unchanged until every plan made from them has been answered.
    """

    start_token: int
    block_ids: tuple[tuple[int, ...], ...]
    block_tokens: int


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """``count`` heads: from ``shard_start`` in the shard, from ``pool_start`` in the pool."""

    shard_start: int
    pool_start: int
    count: int


class Direction(StrEnum):
    """Which way a plan moves KV: slot to pool, or pool to slot."""

    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Move:
    """Some sections of one shard, between its arena slot and one worker's pool.

    Token offsets count within the chunk; ``block_ids`` cover exactly ``token_start ..
    token_start + token_count``. ``payload_offset`` is where section 0 starts within the slot and
    ``pool_layer_start`` the pool's layer (within its group) that the shard's layer 0 maps to.
    ``position_start`` is where the chunk's first token stands in the sequence. ``codec`` is the
    name of what packed the slot or is to pack it.
    """

    worker: int
    codec: str
    shard: ShardId
    layout: ShardLayout
    slot: Slot
    payload_offset: int
    first_section: int
    section_count: int
    heads: HeadSlice
    pool_layer_start: int
    token_start: int
    token_count: int
    block_ids: tuple[int, ...]
    position_start: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Orders for the workers named in its moves: plain data that any transport may carry.

    ``deadline`` is a ``time.monotonic`` instant, comparable between the processes of one host: a
    worker starts no move after it, and finishes what it started.
    """

    plan_id: int
    direction: Direction
    deadline: float
    moves: tuple[Move, ...]

    @property
    def workers(self) -> frozenset[int]:
        """The workers that owe a ``Result`` for this plan."""
        return frozenset(move.worker for move in self.moves)


class Moved(NamedTuple):
    """So many bytes of slots, packed by ``codec``, that a worker brought into its pool."""

    codec: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """One worker's answer to one plan: all of its moves done, or none to be trusted.

    ``moved`` says what a load that was done has cost.
    """

    plan_id: int
    worker: int
    ok: bool
    reason: MissReason | None = None
    detail: str = ""
    moved: Moved | None = field(default=None, compare=False)


class ChunkHit(NamedTuple):
    """One chunk of a match, the fastest tier that holds all of it, and its codec there."""

    key: ChunkKey
    tier: Tier
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Miss:
    """Tokens that a tier did not give, and why."""

    tier: Tier
    reason: MissReason
    tokens: int


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """What a load brought: tokens ``start_token .. end_token`` are in the engine's blocks.

    Tokens from ``end_token`` on must be computed, whatever their blocks hold now.
    """

    start_token: int
    end_token: int
    tokens_by_tier: dict[Tier, int] = field(default_factory=dict)
    misses: tuple[Miss, ...] = ()


@dataclass(frozen=True, slots=True)
class Features:
    """What an access says beyond its time: the session's turn and the caller's hints.

    After ``ttl_s`` what the request stores is worthless to the caller and leaves (0: no such
    time); for ``pin_s`` what it stores or finds is to stay (0: as it comes). See ``Wishes``.
    """

    turn: int = 1
    hint: Hint = Hint.NONE
    ttl_s: float = 0.0
    pin_s: float = 0.0


_NEUTRAL = Features()


@dataclass(frozen=True, slots=True)
class Entry:
    """What a policy knows of a chunk. ``parent`` is None for the first chunk of a sequence.

    ``features`` belong to the access that brought it.
    """

    key: ChunkKey
    parent: ChunkKey | None
    nbytes: int
    position: int
    features: Features = _NEUTRAL


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Bytes ``offset .. offset + nbytes`` of the object under ``key``."""

    key: bytes
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A whole object. ``data`` is borrowed until the write's outcome is known."""

    key: bytes
    data: memoryview


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One object of a listing."""

    key: bytes
    nbytes: int
