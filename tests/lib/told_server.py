"""A cache server that says what a test tells it to say, to a page that takes it for a real one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from playwright.sync_api import BrowserContext, Route

from kvtier.obs.counters import tenant_name
from kvtier.obs.dashboard.history import History
from kvtier.obs.dashboard.page import dashboard
from kvtier.obs.stats import (
    CacheStats,
    Histogram,
    RemoteStats,
    TenantCounters,
    TierCounters,
    TierStats,
)
from kvtier.types import MissReason, Tier
from kvtier_server.counters import Counters
from kvtier_server.figures import Snapshot, stats_of

ADDRESS = "http://kvtier.test"
GIB = 1 << 30
PAGE = dashboard("v1/stats", "v1/history", "v1/namespaces")


def tier(
    which: Tier, *, hits: int = 0, misses: Mapping[MissReason, int] | None = None, **fields: Any
) -> TierStats:
    """A tier that has 3 of 4 GiB in use, unless told otherwise; a remote has no bound."""
    capacity_bytes = 0 if which is Tier.REMOTE else 4 * GIB
    made = TierStats(
        which, "ok", "", capacity_bytes, 3 * GIB, 40, 0, 0,
        TierCounters(hit_tokens=hits, miss_tokens=Counter(misses or {})), codec="raw",
    )  # fmt: skip
    counted = {name: fields.pop(name) for name in list(fields) if hasattr(made.counters, name)}
    return replace(made, counters=replace(made.counters, **counted), **fields)


def times(*seconds: float) -> Histogram:
    made = Histogram()
    for each in seconds:
        made.observe(each)
    return made


@dataclass
class ToldServer:
    """What is said now. ``token`` is wanted where there is one; ``away`` answers nothing at all."""

    uptime_s: float = 100.0
    tiers: tuple[TierStats, ...] = (tier(Tier.DRAM), tier(Tier.DISK))
    counters: Counters = field(default_factory=Counters)
    remotes: tuple[RemoteStats, ...] = ()
    tenants: dict[str, TenantCounters] = field(default_factory=dict)
    held_bytes: dict[str, int] = field(default_factory=dict)
    token: str = ""
    away: bool = False
    draining: bool = False
    history: History = field(default_factory=History)
    asked: list[str] = field(default_factory=list)

    def stats(self) -> dict[str, Any]:
        tenants = {tenant_name(name): counters for name, counters in self.tenants.items()}
        cache = CacheStats(self.tiers, 1, 2, 3, 0, tenants=tenants, remotes=self.remotes)
        now = Snapshot(cache, self.counters, 5, 0, 0, self.uptime_s, self.draining)
        return stats_of(now, self.tenants)

    def note(self) -> None:
        """Keep what is said now as a sample of the past."""
        self.history.note(self.stats())

    def answer(self, route: Route) -> None:
        """Answer the browser."""
        path = route.request.url.removeprefix(ADDRESS)
        self.asked.append(path)
        if self.away:
            route.abort("connectionrefused")
        elif path == "/":
            route.fulfill(body=PAGE.html, headers={"Content-Type": "text/html", **PAGE.headers})
        elif self.token and route.request.headers.get("authorization") != f"Bearer {self.token}":
            route.fulfill(status=401, json={"detail": "a token is needed"})
        elif path == "/v1/stats":
            route.fulfill(json=self.stats())
        elif path == "/v1/history":
            route.fulfill(json=self.history.told())
        elif path == "/v1/namespaces":
            route.fulfill(json={"namespaces": list(map(self._held, self.held_bytes))})
        else:
            route.fulfill(status=404)

    def serve(self, context: BrowserContext) -> None:
        """Be what this browser reaches, whatever it asks for."""
        context.route("**/*", self.answer)

    def _held(self, name: str) -> dict[str, Any]:
        half = self.held_bytes[name] // 2
        return {"credential": name, "tenant": "00", "dram_bytes": half, "disk_bytes": half}
