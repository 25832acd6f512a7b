"""The tables of ``kvtier stat``: from what a server says to what a person reads. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvtier.config import format_size
from kvtier.tiers.disk.at_rest import AtRest

#: What a server says, as parsed from JSON.
Said = Mapping[str, Any]

_COLUMNS: Final = (
    "tier", "state", "codec", "used", "of", "chunks", "hit tokens", "read GB/s", "write GB/s",
    "read ms p50/p99",
)  # fmt: skip


def server_view(now: Said, before: Said | None) -> Group:
    """Show a server. Rates are those since ``before``, or since its start without."""
    if before is not None and before.get("uptime_s", 0.0) >= now.get("uptime_s", 0.0):
        before = None  # It was started anew, and counts from zero.
    table = Table(*_COLUMNS, box=None, padding=(0, 1, 0, 0))  # As it is, it fits into 80 columns.
    earlier = {} if before is None else {t.get("name"): t for t in before.get("tiers", ())}
    seconds = now.get("uptime_s", 0.0) - (before or {}).get("uptime_s", 0.0)
    for tier in now.get("tiers", ()):
        table.add_row(*map(Text, _row(tier, earlier.get(tier.get("name"), {}), seconds)))
    parts: list[Table | Text] = [Text(_title(now)), table, *map(Text, _notes(now))]
    parts.append(Text(_moves(now)))
    if now.get("tenants"):
        parts.append(_tenants(now["tenants"]))
    return Group(*parts)


def rest_view(found: AtRest) -> Group:
    """Show a directory at rest."""
    title = f"{found.root}: {found.chunks} chunks, {format_size(found.nbytes)}"
    table = Table("namespace", "codec", "chunks", "bytes", "last uses")
    for each in found.held:
        uses = f"{_time(each.used_first_s)} to {_time(each.used_last_s)}"
        name, size = each.namespace.hex()[:12], format_size(each.nbytes)
        table.add_row(*map(Text, (name, each.codec, str(each.chunks), size, uses)))
    notes = []
    if not found.indexed:
        notes.append(Text("no index that can be used: the next start reads every header"))
    if found.quarantined_files:
        size = format_size(found.quarantined_bytes)
        notes.append(Text(f"in quarantine: {found.quarantined_files} files, {size}"))
    return Group(Text(title), table, *notes)


def _title(now: Said) -> str:
    state = "degraded" if now.get("degraded") else "ok"
    return f"{now.get('model', '?')}: {state}, up {now.get('uptime_s', 0.0):.0f} s"


def _row(tier: Said, before: Said, seconds: float) -> Iterator[str]:
    yield str(tier.get("name", "?"))
    yield str(tier.get("state", "?"))
    yield str(tier.get("codec", ""))
    # A remote that others write to, too, has no bound of ours: what it holds is not known here.
    sizes = (tier.get(name) or 0 for name in ("used_bytes", "capacity_bytes"))
    used, capacity = map(format_size, sizes)
    bounded = bool(tier.get("capacity_bytes"))
    yield used if bounded else ""
    yield capacity if bounded else _unbounded(tier)
    yield _count(tier, "chunks") if bounded else ""
    yield _count(tier, "hit_tokens")
    for name in ("read_bytes", "written_bytes"):
        moved = tier.get(name, 0) - before.get(name, 0)
        yield f"{moved / seconds / 1e9:.3f}" if name in tier and seconds > 0 else ""
    yield _latency(tier.get("read_s", {}))


def _notes(now: Said) -> Iterator[str]:
    """What does not fit into a column: what is wrong with a tier, and what it did not give."""
    for tier in now.get("tiers", ()):
        if tier.get("detail"):
            yield f"{tier.get('name')} is {tier.get('state')}: {tier['detail']}"
        misses = sorted(tier.get("miss_tokens", {}).items())
        if misses:
            told = ", ".join(f"{reason} {tokens}" for reason, tokens in misses)
            yield f"tokens that {tier.get('name')} did not give: {told}"


def _unbounded(tier: Said) -> str:
    return "no bound" if tier.get("name") == "remote" else ""


def _count(tier: Said, name: str) -> str:
    return f"{tier[name]}" if name in tier else ""


def _latency(latency: Said) -> str:
    p50, p99 = latency.get("p50"), latency.get("p99")
    return "" if p50 is None or p99 is None else f"{p50 * 1e3:.1f}/{p99 * 1e3:.1f}"


def _moves(now: Said) -> str:
    hits = sum(now.get("hit_tokens", {}).values())
    asked = now.get("prompt_tokens", 0)
    share = f" ({hits / asked:.1%})" if asked else ""
    text = f"{hits} of {asked} prompt tokens were not computed{share}"
    if "connections" in now:  # A cache server: it also reads what nobody asked it for, to warm.
        text = f"{asked} objects were asked for, {hits} were read"
    cache = now.get("cache")
    if cache is None:
        return text
    return (
        f"{text}; {cache.get('saved_compute_s', 0.0):.1f} s of computing saved, "
        f"{cache.get('lost_compute_s', 0.0):.1f} s lost\n"
        f"under way: {cache.get('loads_inflight', 0)} loads, "
        f"{cache.get('stores_inflight', 0)} stores, {cache.get('writes_queued', 0)} writes; "
        f"{cache.get('late_jobs', 0)} reads overdue"
    )


def _tenants(tenants: Said) -> Table:
    table = Table("tenant", "hit tokens", "misses by reason")
    for name, figures in tenants.items():
        hits = ", ".join(f"{tier} {n}" for tier, n in figures.get("hit_tokens", {}).items())
        misses = ", ".join(
            f"{tier} {reason} {tokens}"
            for tier, reasons in figures.get("miss_tokens", {}).items()
            for reason, tokens in reasons.items()
        )
        table.add_row(Text(name), Text(hits), Text(misses))
    return table


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
