"""The remote edge of a cache: its remotes, and what goes to each of them."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from kvtier.admission.budget import Budgeted, WriteBudget
from kvtier.cache.below.afar import InRemotes
from kvtier.cache.below.deletions import Deletions
from kvtier.cache.below.encoder import ChunkEncoder, named_encoder
from kvtier.cache.below.remote_epochs import RemoteEpochs, await_remotes, tell_last, tell_remotes
from kvtier.cache.below.remote_source import Remote
from kvtier.cache.below.remotes import Remotes
from kvtier.cache.below.upload import Uploader
from kvtier.cache.executor import Executor
from kvtier.cache.match import Ready
from kvtier.cache.shapes import Shapes
from kvtier.cache.state_log import StateLog
from kvtier.cache.tenancy.epochs import Epochs
from kvtier.cache.tenancy.quota import Quotas
from kvtier.config import RemoteConfig
from kvtier.constants import REMOTE_CAPACITY_BYTES
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.interfaces import AdmissionPolicy, Clock, Connector
from kvtier.obs.counters import Counters
from kvtier.obs.events import EventLog
from kvtier.obs.stats import TierStats
from kvtier.registry import admissions, policies, shown_url
from kvtier.tiers.dram import DramTier
from kvtier.tiers.remote.channel import Channel
from kvtier.tiers.remote.holdings import Holdings, PolicyFactory
from kvtier.tiers.remote.tier import RemoteTier
from kvtier.types import ChunkKey, Features, KVLayout, ShardId, Tier

_log = logging.getLogger("kvtier.remote")


class RemoteRoom:
    """Owns the remotes and their uploads. Used under the cache's lock, but for ``close``."""

    def __init__(
        self,
        opened: Sequence[OpenedRemote],
        codec: str,
        dram: DramTier,
        executor: Executor,
        lock: threading.Lock,
        counters: Counters,
        clock: Clock,
        shapes: Shapes,
        epochs: Epochs,
        directories: int,
        raised: Callable[[], None],
    ) -> None:
        """``codec`` is the cache's own; see ``Remotes``, and ``RemoteEpochs`` for ``raised``.

        ``directories`` keep the same epochs, and come before the remotes among the keepers.
        """
        self._counters = counters
        self._clock = clock
        self._log = StateLog(", ".join(shown_url(each.config.url) for each in opened), "remote")
        remotes = [Remote(each.tier, each.channel) for each in opened]
        for number, each in enumerate(opened):
            if each.config.capacity_bytes:
                each.tier.holdings = Holdings(
                    each.config.capacity_bytes, each.policy, clock, partial(self._left, number)
                )
        work = (dram, executor, lock, counters, clock, shapes)
        self._deletions = [Deletions(remote, executor, lock) for remote in remotes]
        self._uploaders = [
            Uploader(remote, deletions, *work, each.config.mode, each.admission, each.encoder)
            for remote, deletions, each in zip(remotes, self._deletions, opened, strict=True)
        ]
        self.remotes = Remotes(remotes, executor, lock, clock, shapes, codec)
        #: What was put there for tenants.
        self.afar = InRemotes(remotes, self._deletions, self.writes)
        self._lock = lock
        self._epochs = [
            RemoteEpochs(remote, directories + number, epochs, lock, clock, raised)
            for number, remote in enumerate(remotes)
        ]
        self._closed = False

    def serve(self, quotas: Quotas, owned: Callable[[bytes], bool]) -> None:
        """Ask ``quotas`` before each write; count what goes there under roots that are ``owned``.

        Called once, before the first request.
        """
        for uploader in self._uploaders:
            uploader.quotas = quotas
            uploader.owned = owned

    def await_epochs(self) -> None:
        """Block until the epochs of all remotes are known, for a bounded time; without the lock."""
        await_remotes(self._epochs, self._lock)

    def doubt(self) -> None:
        """Note that an epoch was raised here: what others have raised is to be read again."""
        for keeper in self._epochs:
            keeper.doubt()

    def tell(self) -> None:
        """Tell all remotes of what was raised here; blocks for a bounded time, without the lock.

        Raises ``TierUnavailableError`` where one could not be told.
        """
        if self._closed:
            raise TierUnavailableError("the cache is closed; no remote has been told of the epoch")
        tell_remotes(self._epochs, self._lock)

    def watch(self, events: EventLog | None) -> None:
        """Have told what comes to a remote of ours alone, and what goes."""
        for remote in self.remotes.all:
            if remote.tier.holdings is not None:
                remote.tier.holdings.index.watch(events, Tier.REMOTE)

    @property
    def waiting_count(self) -> int:
        """Chunks that are to be written to a remote, or are being written."""
        return sum(uploader.waiting_count for uploader in self._uploaders)

    @property
    def deleting_count(self) -> int:
        """Chunks that are still to be deleted in a remote."""
        return sum(deletions.count for deletions in self._deletions)

    def note(self, key: ChunkKey, layout: KVLayout, features: Features) -> None:
        """Note an access to a chunk: if it is whole in DRAM, it may belong in a remote too."""
        for uploader in self._uploaders:
            uploader.note(key, layout, features)

    def touch(self, match: Ready) -> None:
        """Note a request's access to all that a match found."""
        keys = [hit.key for hit in reversed(match.hits)]
        for remote in self.remotes.all:
            if remote.tier.holdings is not None:
                remote.tier.holdings.touch(keys, match.sequence.features)
        for hit in match.hits:
            self.note(hit.key, match.sequence.layout, match.sequence.features)

    def left_dram(self, key: ChunkKey) -> None:
        """Note that a chunk leaves DRAM."""
        for uploader in self._uploaders:
            uploader.left_dram(key)

    def writes(self, key: ChunkKey) -> bool:
        """Tell whether a chunk is being written to a remote now."""
        return any(uploader.writes(key) for uploader in self._uploaders)

    def waits(self, key: ChunkKey) -> bool:
        """Tell whether a chunk is still to be written to a remote."""
        return any(uploader.waits(key) for uploader in self._uploaders)

    def owes(self, key: ChunkKey) -> bool:
        """Tell whether it is to be written now, to one that takes it."""
        return any(uploader.owes(key) for uploader in self._uploaders)

    @property
    def deletes(self) -> bool:
        """True when chunks may be removed: no remote has too much to delete yet."""
        return not any(deletions.full for deletions in self._deletions)

    def remove(self, key: ChunkKey, shards: Collection[ShardId]) -> None:
        """Have a chunk deleted everywhere, as far as is known what there is of it.

        ``shards`` are those that a nearer tier had. Only where it ``deletes``.
        """
        for deletions in self._deletions:
            deletions.add(key, shards)

    def pump(self) -> None:
        """Start what may be out."""
        for uploader in self._uploaders:
            uploader.pump()
        for deletions in self._deletions:
            deletions.pump()

    def tick(self) -> str | None:
        """Start what is due; return what is to be logged."""
        for keeper in self._epochs:
            keeper.tick()
        self.remotes.tick()
        self.pump()
        return self._log.line(*self.remotes.state, self._clock.now())

    def flush(self) -> None:
        """From now on write everything, whatever the mode, and take no epoch any more."""
        self._closed = True
        for uploader in self._uploaders:
            uploader.flush()

    def close(self, timeout_s: float) -> None:
        """Tell what is still to be told, end the connectors; one that hangs is left behind."""
        with self._lock:
            owing = [keeper for keeper in self._epochs if keeper.owing]
            left = self.deleting_count
        if left:
            _log.warning("%d chunks stay in remotes that were to be deleted there", left)
        if owing:
            timeout_s /= 2
            tell_last(owing, self._lock, timeout_s)
        for remote in self.remotes.all:
            remote.channel.close(timeout_s)

    def stats(self, codec: str) -> TierStats:
        """Count all remotes together, now."""
        tiers = [remote.tier for remote in self.remotes.all]
        holdings = [tier.holdings for tier in tiers if tier.holdings is not None]
        state, detail = self.remotes.state
        return TierStats(
            tier=Tier.REMOTE,
            state=state,
            detail=detail,
            capacity_bytes=sum(each.capacity_bytes for each in holdings),
            used_bytes=sum(each.used_bytes for each in holdings),
            chunks=sum(len(each.index) for each in holdings),
            pinned_chunks=sum(each.index.pinned_count for each in holdings),
            quarantined_files=0,
            counters=self._counters[Tier.REMOTE].copy(),
            codec=codec,
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        self.remotes.check_integrity()
        for uploader in self._uploaders:
            uploader.check_integrity()
        for deletions in self._deletions:
            deletions.check_integrity()

    def _left(self, number: int, key: ChunkKey) -> None:
        """Note that a remote of ours alone gave a chunk up."""
        self._counters[Tier.REMOTE].evicted_chunks += 1
        self.remotes.all[number].tier.evicted(key)
        self._uploaders[number].left_remote(key)


class OpenedRemote(NamedTuple):
    """A remote with its settings, before there is anything that goes there."""

    config: RemoteConfig
    policy: PolicyFactory
    admission: AdmissionPolicy
    encoder: ChunkEncoder | None
    tier: RemoteTier
    channel: Channel


def open_remotes(
    configs: Sequence[RemoteConfig],
    connect: Callable[[str], Connector],
    lock: threading.Lock,
    clock: Clock,
) -> list[OpenedRemote]:
    """Open every connector. ``lock`` is the cache's, which is not held.

    Raises ``ConfigError``, ``RegistryError`` or ``MissingExtraError``, and then leaves none open.
    A store that is down is no error: it is tried again.
    """
    opened: list[OpenedRemote] = []
    with ExitStack() as undo:
        for number, config in enumerate(configs):
            opened.append(_opened(number, config, connect, lock, clock))
            undo.callback(opened[-1].channel.close, 1.0)
        undo.pop_all()
    return opened


def _opened(
    number: int,
    config: RemoteConfig,
    connect: Callable[[str], Connector],
    lock: threading.Lock,
    clock: Clock,
) -> OpenedRemote:
    policy, admission = policies.load(config.policy), _admission(config)
    encoder = named_encoder(config.byte_codec)
    # Not the same for any two processes: they must not come back in step.
    draws = random.Random(os.urandom(8))  # noqa: S311
    tier = RemoteTier(number, clock, draws, ttl_s=config.ttl_s, absent_s=config.absent_s)
    tier.shrinks = encoder is not None

    def slow() -> None:
        with lock:
            tier.slow()

    channel = Channel(
        partial(connect, config.url),
        clock,
        draws,
        slow,
        connections=config.connections,
        deadline_s=config.deadline_s,
        name=str(number),
    )
    if config.capacity_bytes and not channel.listable:
        channel.close(1.0)
        raise ConfigError(
            "remotes.capacity_bytes: this connector cannot list what it holds, so that only the "
            "store itself can bound it; allowed is 0"
        )
    return OpenedRemote(config, policy, admission, encoder, tier, channel)


def _admission(config: RemoteConfig) -> AdmissionPolicy:
    capacity_bytes = config.capacity_bytes or REMOTE_CAPACITY_BYTES
    admission: AdmissionPolicy = admissions.load(config.admission)(capacity_bytes)
    if config.write_bytes_per_day:
        admission = Budgeted(admission, WriteBudget(config.write_bytes_per_day))
    return admission
