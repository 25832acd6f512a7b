"""Limits and sizes that everything agrees on. Each limit has a test that reaches it."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# Alignment of headers, sections and slots: what O_DIRECT needs on every device in use.
ALIGN_BYTES: Final = 4096
HUGE_PAGE_BYTES: Final = 2 * MIB

# Keys.
DIGEST_BYTES: Final = 32
TOKEN_BYTES: Final = 4
CHUNK_TOKENS_DEFAULT: Final = 256
CHUNK_TOKENS_MAX: Final = 65_536

# Shard format.
SHARD_MAGIC: Final = b"KVTS"
SHARD_FORMAT_VERSION: Final = 1
# A shard whose sections a byte codec has encoded.
STORED_FORMAT_VERSION: Final = 2
CODEC_NAME_BYTES_MAX: Final = 64
SECTION_LAYERS_DEFAULT: Final = 4
HEADER_BYTES_MAX: Final = 64 * KIB
SECTIONS_MAX: Final = 512
SHARD_BYTES_MAX: Final = 4 * GIB

# Payloads under foreign keys: the unit of their checksums, and bounds of what one call may ask.
OPAQUE_SECTION_BYTES: Final = MIB
OPAQUE_BYTES_MAX: Final = SECTIONS_MAX * OPAQUE_SECTION_BYTES
KEYED_BATCH_MAX: Final = 16_384
KEYED_PIECES_MAX: Final = 1024
KEYED_INFLIGHT_MAX: Final = 32
KEYED_INFLIGHT_BYTES: Final = 64 * MIB
KEYED_ORDER_MAX: Final = 16
KEYED_FETCH_BYTES_MAX: Final = 16 * MIB
CONVOY_STIR_PAYLOADS: Final = 8
KEYED_TRANSFERS_MAX: Final = 256

# DRAM arena.
SLAB_BYTES_DEFAULT: Final = 64 * MIB
#: The arena of a cache without a DRAM tier: what is on its way to or from the tiers below.
STAGING_BYTES: Final = 256 * MIB
#: Of that, what may not leave at most once something is stored: the rest is for what is loaded.
STORE_STAGING_SHARE: Final = 0.5
# What others may lend such a cache at a time, half of what a server lends one connection: what is
# given back and what is asked for anew pass each other. What has lent nothing is asked no sooner.
LENT_BYTES_MAX: Final = 128 * MIB
LEND_PAUSE_S: Final = 5.0
# Owners who have a file of their own in an arena that others map: each takes two descriptors.
ARENA_OWNERS_MAX: Final = 128

# Executor: bounded work in flight; a queue that is full refuses.
IO_THREADS_DEFAULT: Final = 4
WRITES_INFLIGHT_MAX: Final = 4
STORE_CHUNKS_INFLIGHT_MAX: Final = 256
# A load has some large chunks on their way at a time, or many small ones.
LOAD_CHUNKS_INFLIGHT_MAX: Final = 8
LOAD_CHUNKS_INFLIGHT_MIN: Final = 4
LOAD_BYTES_INFLIGHT: Final = 64 * MIB
#: What of a load may lie in DRAM beside that, until the engine asks for it: as much comes
#: during a long step.
LOAD_BYTES_AHEAD: Final = 256 * MIB
# What is ready at once goes out in plans of about so much, the first layers first. Two: more
# are more and smaller moves, which cost a load to a GPU more than early layers are worth.
LOAD_PLAN_BYTES: Final = 64 * MIB
LOAD_PLANS_MAX: Final = 2
LATE_JOBS_MAX: Final = 8
READ_STEP_BYTES: Final = 8 * MIB
READ_FIRST_BYTES: Final = 4 * MIB
# Buffers for encoded shards that are kept for the next ones.
SCRATCH_BUFFERS_KEPT: Final = 8
LOAD_DEADLINE_S_DEFAULT: Final = 5.0
PENDING_DEADLINE_S_DEFAULT: Final = 2.0
STORE_DEADLINE_S: Final = 10.0
#: What giving a GPU its moves takes of an engine's thread whenever it looks; plans at once.
COPY_TURN_S: Final = 0.002
PLANS_IN_TURN_MAX: Final = 16
WRITE_DEADLINE_S: Final = 10.0
CLOSE_DEADLINE_S_DEFAULT: Final = 10.0
# What the last one to be closed gets, where others have taken all of that.
CLOSE_S_MIN: Final = 0.5
WARM_UP_S_MAX: Final = 120.0
HOUSEKEEPING_S: Final = 0.1

# Disk tier.
# A sweep looks at a directory in parts where it has more chunks than this, and asks for so many
# files at a time under the lock.
SWEEP_WHOLE_CHUNKS: Final = 4096
SWEEP_LOCK_FILES: Final = 256
# Chunks that leave in one go where a bound has shrunk; the rest leaves in the next ones.
TRIM_CHUNKS_MAX: Final = 1024
# Accesses remembered for the index at rest, and for how long at most.
USED_KEYS_MAX: Final = 65_536
USED_NOTE_S: Final = 5.0
QUARANTINE_FILES_MAX: Final = 16
READ_FAILURES_MAX: Final = 3
HEALTH_BACKOFF_S_MIN: Final = 0.5
HEALTH_BACKOFF_S_MAX: Final = 30.0
# A read that was given up sooner tells how patient its caller was, not how the medium does. Under
# load a healthy disk takes some hundred milliseconds for a chunk, and more for a large one: with
# four readers a hard disk or a link of 1 Gbit/s still gives each of them more than this a second.
SLOW_S_MIN: Final = 1.0
SLOW_BYTES_PER_S: Final = 16 * MIB
GROUP_COMMIT_S: Final = 0.2
# How long a cache that starts waits for the epochs: a sequence that begins before they are known
# finds nothing of a namespace that was ever invalidated.
EPOCHS_WAIT_S_MAX: Final = 1.0
# Namespaces and tenants whose epochs are kept one by one; the file of all takes some megabytes.
EPOCHS_MAX: Final = 65_536
# No record of epochs says more than this, nor is it longer. Far from what a root can hold.
EPOCH_MAX: Final = 2**62
EPOCHS_BYTES_MAX: Final = 4 * MIB
# A remote's epochs are read so long after they were last read, and after that failed. With that,
# a turn of housekeeping and some slack, what other hosts raise is seen within two seconds and what
# the remote takes to answer; so the documentation promises.
EPOCHS_READ_S: Final = 1.5
EPOCHS_RETRY_S: Final = 0.5
# How long an invalidation waits for the remotes together, and how often one round writes and looks.
EPOCHS_TELL_S_MAX: Final = 5.0
EPOCHS_TRIES_MAX: Final = 4
# Namespaces, each in one epoch, of which is known whose they are; how often that is written.
ROOTS_MAX: Final = 65_536
ROOTS_SAVE_S: Final = 1.0
# Chunks of stale namespaces that leave in one go, in each tier.
RECLAIMED_CHUNKS_MAX: Final = 256
# Of what a tenant has on disk and has not used since the start: so many are looked at in one go
# when something of it has to give way.
GIVE_WAY_ROWS_MAX: Final = 1024
# Tenants at their quota of whom is kept what gives way next; for others it is put in order anew.
GIVE_WAY_TENANTS_MAX: Final = 64

# Pins: the share of a tier that they may take, chunks in each tier, and for how long.
PINNED_SHARE_MAX: Final = 0.5
PINNED_CHUNKS_MAX: Final = 4096
PIN_S_MAX: Final = 30 * 86_400.0
# Chunks that are to leave at a time of their own, and the latest such time from now.
EXPIRING_CHUNKS_MAX: Final = 65_536
TTL_S_MAX: Final = 30 * 86_400.0
# How often pins that are over are forgotten, and what could not leave in time is tried again.
WISHES_LOOK_S: Final = 1.0

# The disk tier's index at rest: a snapshot and a log of what has changed since.
JOURNAL_ROWS_MAX: Final = 1 << 25
JOURNAL_KINDS_BYTES_MAX: Final = 64 * MIB
JOURNAL_BATCH_BYTES_MAX: Final = 32 * MIB
JOURNAL_BATCH_CHANGES_MAX: Final = 16_384
JOURNAL_LOG_BYTES_MAX: Final = GIB
# A log is folded into a new snapshot above this many changes, or above half of the rows.
JOURNAL_CHANGES_LOGGED: Final = 65_536

# Remote tier.
BREAKER_FAILURES_MAX: Final = 3
REMOTE_CONNECTIONS_DEFAULT: Final = 4
REMOTE_CONNECTIONS_MAX: Final = 64
# What an admission takes for the capacity of a remote that others bound.
REMOTE_CAPACITY_BYTES: Final = 1024 * GIB
REMOTE_DEADLINE_S_DEFAULT: Final = 2.0
REMOTE_TTL_S_DEFAULT: Final = 60.0
REMOTE_ABSENT_S_DEFAULT: Final = 2.0
# Tries of one call, and the longest wait after the first one; it doubles with each.
REMOTE_TRIES_MAX: Final = 3
REMOTE_RETRY_S: Final = 0.05
# What one call of a connector takes, and how much waits for one.
REMOTE_BATCH_KEYS_MAX: Final = 1024
REMOTE_BATCH_OBJECTS_MAX: Final = 64
REMOTE_BATCH_BYTES: Final = 16 * MIB
REMOTE_JOBS_MAX: Final = 8192
# Bytes of a shard that are read at once, if sections are smaller.
REMOTE_STEP_BYTES: Final = 2 * MIB
REMOTE_STEPS_AHEAD: Final = 8
# What is remembered of chunks, asked for at once by one request, and by all.
REMOTE_KNOWN_CHUNKS_MAX: Final = 262_144
REMOTE_ASK_CHUNKS_MIN: Final = 64
REMOTE_ASK_CHUNKS_MAX: Final = 1024
REMOTE_ASKED_CHUNKS_MAX: Final = 8192
REMOTE_CODECS_MAX: Final = 256
# A listing with more objects than this is not bounded by us.
REMOTE_LISTED_MAX: Final = 4_000_000
# Chunks waiting to be written to a remote, in one job, and jobs at a time.
UPLOADS_WAITING_MAX: Final = 4096
UPLOAD_CHUNKS_MAX: Final = 16
UPLOAD_JOBS_MAX: Final = 2
UPLOAD_TRIES_MAX: Final = 3
# Chunks waiting to be deleted in a remote, and in one call. Beyond it they are not let go yet.
DELETIONS_WAITING_MAX: Final = 65_536
DELETION_CHUNKS_MAX: Final = 256
PREFETCHES_MAX: Final = 64
PREFETCH_CHUNKS_INFLIGHT_MAX: Final = 4
# Of DRAM, what one prefetch takes at most.
PREFETCH_SHARE: Final = 0.5

# Write-back: the dirty share of DRAM above which dirty chunks are written, and down to which.
DIRTY_SHARE_HIGH: Final = 0.5
DIRTY_SHARE_LOW: Final = 0.3
# Chunks kept in DRAM a second time, packed with the disk's own codec, until they are written.
STAGED_CHUNKS_MAX: Final = 32

# What transfers and recomputing cost: of how many measurements, at most, a line is made. Eight:
# then nothing is left of what was before a change.
COST_POINTS_MAX: Final = 8
COST_KEPT_POINTS_MAX: Final = 32
#: Of how many pairs of prefill steps it is learned how a token's cost grows with its place.
COST_PAIRS_MAX: Final = 128
COST_SAVE_S: Final = 60.0
COST_NAMES_MAX: Final = 16
COST_FILE_BYTES_MAX: Final = 64 * KIB

# At most one log line per message and minute; the rest is counted.
LOG_INTERVAL_S: Final = 60.0

# Tenants whose figures are kept apart; all others are counted together.
TENANTS_COUNTED_MAX: Final = 256

# KV events that wait to be taken, chunks that are told of (their tokens are kept: 1 KiB each for
# chunks of 256), and events in one message, whose encoding holds up other threads for as long.
EVENTS_QUEUED_MAX: Final = 8192
EVENT_CHUNKS_MAX: Final = 131_072
EVENTS_TAKEN_MAX: Final = 64

# The cache server's wire: what one frame may hold, checked before anything is allocated.
WIRE_HEADER_BYTES_MAX: Final = 64 * KIB
# A payload is stored with a byte behind it.
WIRE_PAYLOAD_BYTES_MAX: Final = OPAQUE_BYTES_MAX - 1
WIRE_KEYS_MAX: Final = 1024
WIRE_KEY_BYTES_MAX: Final = 1024
WIRE_TOKEN_BYTES_MAX: Final = 4096
WIRE_TEXT_BYTES_MAX: Final = 1024
# Bytes that are handed to a socket at a time, and how long one such piece may take to go.
WIRE_PIECE_BYTES: Final = MIB // 2
WIRE_STALL_S_MAX: Final = 10.0
# What is little enough to be copied and sent at once, so that nobody waits for it.
WIRE_SMALL_BYTES: Final = 64 * KIB
# Slower than this a frame does not count as coming.
WIRE_BYTES_PER_S_MIN: Final = 256 * KIB
# Nor is one taken, which holds its object meanwhile: of 64 MiB that is 26 s at most, of the largest
# one 138 s. Who waits for an answer for 5 s, the default, has given up long before; and all that is
# under way for all connections goes within the first WIRE_STALL_S_MAX over a link of 1 Gbit/s.
WIRE_SENT_BYTES_PER_S_MIN: Final = 4 * MIB

# The cache server: connections and what may be under way, of one and of all.
DAEMON_CONNECTIONS_MAX: Final = 256
DAEMON_REQUESTS_MAX: Final = 256
# Connections that are let in before others' turn, and those that may shake hands at a time.
DAEMON_ACCEPTS_MAX: Final = 64
DAEMON_HANDSHAKES_MAX: Final = 256
# Of the requests that a connection sends in one go, those that are answered before others' turn.
DAEMON_AT_ONCE_MAX: Final = 16
DAEMON_CONNECTION_BYTES_MAX: Final = 64 * MIB
DAEMON_BYTES_MAX: Final = GIB
# Of that, what a connection may ask for whatever the others do.
DAEMON_SHARE_BYTES: Final = 16 * MIB
DAEMON_IDLE_S_MAX: Final = 600.0
DAEMON_REQUEST_S_MAX: Final = 10.0
DAEMON_DRAIN_S: Final = 10.0
DAEMON_TOKENS_MAX: Final = 1024
# Shared memory: what one connection may lease and for how long, files for uploads, of which there
# are as many as clients at most, and how much is copied in one go.
DAEMON_LEASES_MAX: Final = 256
DAEMON_LEASE_BYTES_MAX: Final = 256 * MIB
DAEMON_LEASE_S_MAX: Final = 30.0
DAEMON_STAGING_BYTES: Final = 32 * MIB
DAEMON_STAGINGS_MAX: Final = 16
SHARED_PIECE_BYTES: Final = MIB
# Below this a socket is quicker than two more messages.
SHARED_BYTES_MIN: Final = 64 * KIB

# What the dashboard begins with: a quarter of an hour.
HISTORY_STEP_S: Final = 10.0
HISTORY_SAMPLES_MAX: Final = 91
DAEMON_CONFIG_BYTES_MAX: Final = 256 * KIB
# Its control plane: what one request may hold, how many run, what is done at once under the lock.
CONTROL_BODY_BYTES_MAX: Final = 4 * MIB
CONTROL_KEYS_MAX: Final = 4096
CONTROL_REQUESTS_MAX: Final = 64
# Beyond as many connections as are answered, those that are told that they are too many.
CONTROL_CONNECTIONS_MAX: Final = 256
CONTROL_HEAD_BYTES_MAX: Final = 64 * KIB
CONTROL_STALL_S_MAX: Final = 10.0
CONTROL_OBJECTS_MAX: Final = 65_536
CONTROL_OBJECTS_AT_ONCE: Final = 256
CONTROL_WARMED_AT_ONCE: Final = 8
CONTROL_WARM_S_MAX: Final = 600.0
CONTROL_FINDINGS_MAX: Final = 100
