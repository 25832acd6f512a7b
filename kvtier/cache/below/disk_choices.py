"""What the disk tier decides and works with, as its settings and the arena ask for it."""

from __future__ import annotations

from typing import NamedTuple

from kvtier.admission.budget import Budgeted, WriteBudget
from kvtier.cache.below.encoder import ChunkEncoder, named_encoder
from kvtier.config import DiskConfig
from kvtier.constants import IO_THREADS_DEFAULT
from kvtier.interfaces import AdmissionPolicy
from kvtier.registry import admissions, policies
from kvtier.tiers.arena import Arena
from kvtier.tiers.disk.bounce import BouncedFiles
from kvtier.tiers.disk.files import FileSystem, LocalFiles
from kvtier.tiers.disk.tier import PolicyFactory
from kvtier.tiers.memory import huge_on_advice


class DiskChoices(NamedTuple):
    """What leaves first, what is worth a write, and what encodes it."""

    policy: PolicyFactory
    admission: AdmissionPolicy
    encoder: ChunkEncoder | None


def disk_choices(config: DiskConfig) -> DiskChoices:
    """Raise ``RegistryError`` for a name that is not known, ``MissingExtraError`` likewise."""
    admission: AdmissionPolicy = admissions.load(config.admission)(config.capacity_bytes)
    if config.write_bytes_per_day:
        admission = Budgeted(admission, WriteBudget(config.write_bytes_per_day))
    encoder = named_encoder(config.byte_codec)
    return DiskChoices(policies.load(config.policy), admission, encoder)


def local_files(arena: Arena) -> FileSystem:
    """Return the way to the disk: O_DIRECT is slow into ordinary pages, as in a shared arena."""
    if arena.huge or not huge_on_advice():
        return LocalFiles()
    return BouncedFiles(LocalFiles(), IO_THREADS_DEFAULT + 1)
