"""What may be done with a whole tenant: how much it holds, and its end.

A tenant is whoever shares a salt (``Namespace.tenant_salt``, the API's ``cache_salt``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from kvtier.cache.tenancy.quota import Afar, TenantQuotas, tenant_bytes
from kvtier.cache.tenancy.reclaim import Reclaimer
from kvtier.cache.tenancy.roots import Roots
from kvtier.keys import tenant_digest
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramTier
from kvtier.types import Namespace


class Tenants:
    """Any thread may call; takes the cache's lock.

    ``end_loads`` ends, under the lock, every load of an earlier epoch, and doubts the remotes;
    ``save`` has every directory and remote keep the present epochs, blocks, and raises
    ``TierUnavailableError``.
    """

    def __init__(
        self,
        lock: threading.Lock,
        roots: Roots,
        dram: DramTier,
        disk: DiskTier | None,
        afar: Afar,
        reclaimer: Reclaimer,
        quotas: TenantQuotas,
        end_loads: Callable[[], None],
        save: Callable[[], None],
    ) -> None:
        self._lock = lock
        self._roots = roots
        self._dram = dram
        self._disk = disk
        self._afar = afar
        self._reclaimer = reclaimer
        self._quotas = quotas
        self._end_loads = end_loads
        self._save = save

    def nbytes(self, salt: str) -> int:
        """Return the bytes of a tenant's chunks in DRAM, on disk and in remotes, where they lie.

        What a directory held at its opening counts once it is known whose it is; of remotes, what
        this cache has written since its start. What is to be deleted there counts no more: see
        ``reclaimable_bytes``. Raises ``ConfigError`` for the empty salt.
        """
        with self._lock:
            roots = self._roots.of_tenant(tenant_digest(salt))
            return tenant_bytes(roots, self._dram, self._disk, self._afar)

    @property
    def reclaimable_bytes(self) -> int:
        """Bytes of tenants and namespaces of earlier epochs that are still to be given back.

        In remotes they are once these were asked to delete them and raised no fault; connectors
        tell no more.
        """
        with self._lock:
            return self._reclaimer.waiting_bytes

    def limit(self, quota_bytes: int, quotas: Mapping[str, int]) -> None:
        """Put other quotas in place of the config's: for each tenant, and by salt; 0 is none.

        Until the process ends. Who holds more keeps it until it next stores something.
        """
        single = {tenant_digest(salt): nbytes for salt, nbytes in quotas.items()}
        with self._lock:
            self._quotas.limit(quota_bytes, single)

    def delete(self, salt: str) -> int:
        """Make everything that a tenant has stored unreachable, at once; return its new epoch.

        Holds for all of its namespaces, whatever the weights or adapter, and survives a crash once
        this has returned; the bytes are given back soon after. What the tenant stores from now on
        is a new beginning. Loads under way come to nothing. Other hosts learn it through the
        remotes that they share with this one, at most two seconds after this has returned, and what
        the remote takes to answer. Blocks while the epoch is written to disk, then
        up to ``EPOCHS_TELL_S_MAX`` seconds for the remotes. Raises ``ConfigError`` for the empty
        salt, and ``TierUnavailableError``, which says who, when a directory could not keep the
        epoch or a remote could not be told: then it holds for this process, and is written and
        told when that one comes back.
        """
        return self._raise(lambda: self._roots.advance_tenant(salt))

    def invalidate(self, namespace: Namespace) -> int:
        """Do the same with one namespace."""
        return self._raise(lambda: self._roots.advance(namespace))

    def _raise(self, advance: Callable[[], int]) -> int:
        with self._lock:
            epoch = advance()
            self._end_loads()
        self._save()
        return epoch
