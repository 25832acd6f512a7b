"""Which namespaces are in use, whose they are, and which of them are stale.

A chunk says under which root it was stored: the digest of its namespace and epochs. That does not
tell whose it is, so this is noted beside it, here and in each directory of the disk tier.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import NamedTuple, Protocol

from kvtier.cache.tenancy.epochs import Epochs
from kvtier.constants import ROOTS_MAX
from kvtier.keys import namespace_digest, tenant_digest
from kvtier.types import Namespace

# Every call asks for the present epoch; encoding a namespace anew would take longer than a lookup.
_digest = lru_cache(maxsize=1024)(namespace_digest)
#: Of so many roots for which there is no room, one has all others looked through.
_LOOK_EVERY = 1024
_tenant = lru_cache(maxsize=1024)(tenant_digest)


class Rooted(Protocol):
    """What a sequence says of where its keys begin."""

    @property
    def namespace(self) -> Namespace:
        """What makes its KV incompatible with others."""
        ...

    @property
    def root(self) -> bytes:
        """The digest that its first key is chained to."""
        ...


class RootRow(NamedTuple):
    """What a root stands for: digests of namespace (at epoch 0) and tenant, and their epochs.

    ``tenant`` is empty where there is no salt.
    """

    namespace: bytes
    tenant: bytes
    epoch: int
    tenant_epoch: int


class Roots:
    """Used under the cache's lock. At most ``ROOTS_MAX`` are kept, those first that hold something.

    ``held`` names the roots under which any tier holds something. Each of ``keepers`` media keeps
    what is needed after a restart.
    """

    def __init__(self, epochs: Epochs, keepers: int, held: Callable[[], Collection[bytes]]) -> None:
        self._epochs = epochs
        self._held = held
        self._rows: dict[bytes, RootRow] = {}
        self._crowded = 0  # How many have found no room since there was some.
        self._by_tenant: dict[bytes, set[bytes]] = {}
        # Under which something was stored since the start.
        self._stored: set[bytes] = set()
        self._stored_version = 0
        self._kept = [0] * keepers
        self._stale: frozenset[bytes] = frozenset()
        # What is noted at its first use is current then, so only another epoch makes it stale.
        self._stale_at = -1
        # Many calls in a row are for one namespace.
        self._last: tuple[Namespace, int, bytes] | None = None

    def root(self, namespace: Namespace) -> bytes:
        """Return the digest that a namespace's keys follow from, in its present epochs."""
        last, version = self._last, self._epochs.version
        if last is not None and last[0] is namespace and last[1] == version:
            return last[2]
        root = self._root(namespace)
        self._last = (namespace, version, root)
        return root

    def _root(self, namespace: Namespace) -> bytes:
        row = self._row(namespace)
        root = row.namespace
        if row.epoch or row.tenant_epoch:
            root = _digest(namespace, row.epoch, row.tenant_epoch)
        if root not in self._rows:
            self._note(root, row)
        return root

    def current(self, sequence: Rooted) -> bool:
        """Tell whether a sequence's namespace is still in the epochs in which it began."""
        return sequence.root == self.root(sequence.namespace)

    def note_store(self, sequence: Rooted) -> bool:
        """Note that something is stored under a current sequence's root; False: one too many."""
        if sequence.root not in self._rows:
            return False
        if sequence.root not in self._stored:
            self._stored.add(sequence.root)
            self._stored_version += 1
        return True

    def tenant_of(self, root: bytes) -> bytes:
        """Return whose a root is; empty: nobody's, or not known."""
        row = self._rows.get(root)
        return row.tenant if row is not None else b""

    def row_of(self, root: bytes) -> RootRow | None:
        """Return what a root stands for; None: not known."""
        return self._rows.get(root)

    def of_tenant(self, tenant: bytes) -> Collection[bytes]:
        """Return the roots of a tenant, the stale ones too."""
        return self._by_tenant.get(tenant, ())

    def stale(self) -> frozenset[bytes]:
        """Return the roots that no sequence has any more."""
        if self._epochs.version != self._stale_at:
            self._stale_at = self._epochs.version
            self._stale = frozenset(
                root for root, row in self._rows.items() if not self._is_current(row)
            )
        return self._stale

    def advance(self, namespace: Namespace) -> int:
        """Begin a namespace's next epoch and return it."""
        return self._epochs.advance(_digest(namespace))

    def advance_tenant(self, salt: str) -> int:
        """Begin a tenant's next epoch and return it. Raises ``ConfigError`` for the empty salt."""
        return self._epochs.advance(_tenant(salt))

    def unsaved(self, keeper: int) -> bool:
        """Tell whether a medium keeps less than is needed after a restart."""
        return self._kept[keeper] != self._stored_version

    def snapshot(self, held: Collection[bytes]) -> tuple[dict[bytes, RootRow], int]:
        """Return the rows of what a medium holds or is about to, and which state this is."""
        wanted = {*held, *self._stored}
        return {r: self._rows[r] for r in wanted if r in self._rows}, self._stored_version

    def saved(self, keeper: int, version: int) -> None:
        """Note that a medium keeps the snapshot of a version."""
        self._kept[keeper] = version

    def merge(self, rows: Mapping[bytes, RootRow]) -> None:
        """Take in what a medium kept."""
        for root, row in rows.items():
            if root not in self._rows:
                self._note(root, row)
        self._stale_at = -1

    def _row(self, namespace: Namespace) -> RootRow:
        base = _digest(namespace)
        tenant = _tenant(namespace.tenant_salt) if namespace.tenant_salt else b""
        tenant_epoch = self._epochs.get(tenant) if tenant else 0
        return RootRow(base, tenant, self._epochs.get(base), tenant_epoch)

    def _is_current(self, row: RootRow) -> bool:
        tenant_epoch = self._epochs.get(row.tenant) if row.tenant else 0
        return (row.epoch, row.tenant_epoch) == (self._epochs.get(row.namespace), tenant_epoch)

    def _note(self, root: bytes, row: RootRow) -> None:
        if len(self._rows) >= ROOTS_MAX:
            # Looking through all takes a while: not each time, when it was in vain before.
            if self._crowded % _LOOK_EVERY == 0:
                self._drop_empty()
            self._crowded = self._crowded + 1 if len(self._rows) >= ROOTS_MAX else 0
        if len(self._rows) >= ROOTS_MAX:
            return
        self._rows[root] = row
        if row.tenant:
            self._by_tenant.setdefault(row.tenant, set()).add(root)

    def _drop_empty(self) -> None:
        """Forget roots under which nothing is held, at most half of all."""
        self._last = None
        held = self._held()
        empty = [root for root in self._rows if root not in held][: ROOTS_MAX // 2]
        for root in empty:
            row = self._rows.pop(root)
            self._stored.discard(root)
            if row.tenant:
                roots = self._by_tenant[row.tenant]
                roots.discard(root)
                if not roots:
                    del self._by_tenant[row.tenant]
        self._stale_at = -1
