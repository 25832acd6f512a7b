"""What goes in and out by HTTP, as its description tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from kvtier.constants import (
    CONTROL_FINDINGS_MAX,
    CONTROL_KEYS_MAX,
    CONTROL_WARM_S_MAX,
    PIN_S_MAX,
    WIRE_KEY_BYTES_MAX,
)
from kvtier_server.disk_check import DiskCheck, State


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 7.0 is as whole as 7."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: A client's key, in hexadecimal digits.
Key = Annotated[str, StringConstraints(pattern=rf"^([0-9a-fA-F]{{2}}){{1,{WIRE_KEY_BYTES_MAX}}}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
#: Bytes, within what every reader of JSON takes for a whole number.
Size = Annotated[int, Field(ge=0, le=2**53 - 1), BeforeValidator(_whole)]


class _In(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ByKeys(_In):
    """Objects of one credential: the caller's, unless another one is named; an operator's is
    ``default``.
    """

    credential: Name | None = None
    keys: Annotated[list[Key], Field(min_length=1, max_length=CONTROL_KEYS_MAX)]


class Everything(_In):
    """All objects of one credential."""

    credential: Name | None = None
    all: Literal[True]


Selected = ByKeys | Everything


class Evict(_In):
    """What is to leave, and from where."""

    objects: Selected
    tiers: Annotated[list[Literal["dram", "disk"]], Field(min_length=1, max_length=2)] = Field(
        default=["dram", "disk"]
    )


class Pin(_In):
    """What is to stay, and for how long."""

    objects: Selected
    seconds: Annotated[float, Field(gt=0, le=PIN_S_MAX)]


class Unpin(_In):
    """What need not stay any more."""

    objects: Selected


class Warm(_In):
    """What is to come up into memory, and within which time."""

    objects: Selected
    seconds: Annotated[float, Field(gt=0, le=CONTROL_WARM_S_MAX)] = 30.0


class Invalidate(_In):
    """What is never to be found again."""

    objects: Selected


class SetQuota(_In):
    """How much a credential may hold; ``null``: as much as those without a quota of their own.

    Without a credential it is that of all of these.
    """

    credential: Name | None = None
    quota_bytes: Size | None


class Namespace(BaseModel):
    """What one credential has in one epoch. ``credential`` is null where its name is not known."""

    credential: str | None
    tenant: str
    epoch: int
    current: bool
    dram_bytes: int
    disk_bytes: int
    pinned_bytes: int
    quota_bytes: int


class Namespaces(BaseModel):
    """All that lies in DRAM and on disk."""

    namespaces: list[Namespace]


class PinRow(BaseModel):
    """What of one credential is pinned for so many more seconds."""

    credential: str | None
    tenant: str
    seconds: int
    objects: int
    dram_bytes: int
    disk_bytes: int


class Pins(BaseModel):
    """All that is pinned, what ends first in front."""

    pins: list[PinRow]


class Quotas(BaseModel):
    """Bytes that may be held, 0: no bound; ``quotas`` are those of single credentials."""

    quota_bytes: int
    quotas: dict[str, int]


class Evicted(BaseModel):
    """Objects by what came of them."""

    credential: str
    evicted: int
    absent: int
    pinned: int
    busy: int


class Pinned(BaseModel):
    """Objects by what came of them; ``no_room``: as much is pinned as may be."""

    credential: str
    pinned: int
    absent: int
    no_room: int


class Unpinned(BaseModel):
    """Objects that were pinned, and others."""

    credential: str
    unpinned: int
    absent: int


class Warmed(BaseModel):
    """Objects that lie in memory now, and others."""

    credential: str
    warmed: int
    warmed_bytes: int
    absent: int
    refused: int
    late: int


class Invalidated(BaseModel):
    """``removed`` objects of those named, or the epoch that begins where all are meant."""

    credential: str
    removed: int | None = None
    busy: int | None = None
    epoch: int | None = None


class Reloaded(BaseModel):
    """The options that are others now."""

    changed: list[str]


class Draining(BaseModel):
    """The server stops."""

    draining: bool


class Finding(BaseModel):
    """One file in trouble, and what the trouble is."""

    file: str
    problem: str
    detail: str


class Verification(BaseModel):
    """How far the last reading of the disk has come. ``clean`` is known when it is ``done``."""

    state: State
    read_bytes: int = 0
    total_bytes: int = 0
    sound_shards: int = 0
    quarantined_files: int = 0
    finding_count: int = 0
    findings: list[Finding] = []
    clean: bool | None = None
    detail: str = ""


class Ready(BaseModel):
    """Whether to send clients here."""

    ready: bool


class Fault(BaseModel):
    """What is wrong, in one word and in a sentence."""

    type: str
    message: str


class Refusal(BaseModel):
    """Every answer that is no success."""

    error: Fault


def told_check(check: DiskCheck) -> Verification:
    """Return what is told of a reading of the disk."""
    told = Verification(
        state=check.state,
        read_bytes=check.read_bytes,
        total_bytes=check.total_bytes,
        detail=check.detail,
    )
    verdict = check.verdict
    if verdict is None:
        return told
    told.sound_shards, told.clean = verdict.sound_shards, verdict.clean
    told.quarantined_files, told.finding_count = verdict.quarantined_files, len(verdict.findings)
    told.findings = [
        Finding(file=Path(each.path).name, problem=each.problem.value, detail=each.detail)
        for each in verdict.findings[:CONTROL_FINDINGS_MAX]
    ]
    return told
