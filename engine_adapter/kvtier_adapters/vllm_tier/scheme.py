"""What a chunk's bytes depend on and vLLM's block hash does not say. Pure."""

from __future__ import annotations

import hashlib
from typing import Any, Final

SYSTEM: Final = "vllm secondary tier"


def chunk_scheme(config: Any, chunk_bytes: int, version: str, device: str) -> str:
    """Return the scheme of chunks.

    ``config`` is vLLM's ``OffloadingConfig``. A chunk holds the bytes of all ranks of one replica
    in vLLM's own layout, which belongs to its version, and on a CPU to the CPU.
    """
    parallel = config.parallel
    groups = [f"{group.tokens_per_block}:{','.join(group.layer_names)}" for group in config.groups]
    layers = hashlib.sha256("|".join(groups).encode()).hexdigest()
    ranks = ",".join(
        f"{name}{getattr(parallel, f'{name}_size')}" for name in ("tp", "pp", "pcp", "dcp")
    )
    parts = [
        "chunks 1",
        f"vllm={version}",
        f"device={device}",
        f"model={config.model.name}",
        f"dtype={config.model.dtype}",
        f"layout={config.kv_cache_layout}",
        f"canonical={config.canonical_layout}",
        f"replicated={config.replicated_layout}",
        f"tokens={config.cache.tokens_per_hash}x{config.cache.blocks_per_chunk}",
        f"ranks={ranks}",
        f"layers={layers}",
        f"bytes={chunk_bytes}",
    ]
    return "; ".join(parts)


def device_text(kind: str, cpu_flags: str) -> str:
    """Return the device that a layout belongs to: attention on a CPU packs for its instructions."""
    if kind != "cpu":
        return kind
    return f"cpu-{hashlib.sha256(cpu_flags.encode()).hexdigest()[:16]}"


def cpu_flags(cpu_info: str) -> str:
    """Return the instruction sets in the text of ``/proc/cpuinfo``; empty where it names none."""
    for line in cpu_info.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return " ".join(sorted(value.split()))
    return ""
