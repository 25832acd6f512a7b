"""Requests and a block pool as the connector sees those of vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

#: Of a block, unless a test says otherwise.
BLOCK_TOKENS: Final = 4


@dataclass(eq=False)
class DoubleRequest:
    """A request with the fields that the connector reads."""

    request_id: str
    prompt: list[int]
    max_tokens: int = 1
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    num_computed_tokens: int = 0
    loaded: int = 0
    status: str = "waiting"
    tables: list[list[int]] = field(default_factory=list)
    _states: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        """What vLLM calls its full blocks: here by the KV that stands at their ends."""
        ends = range(BLOCK_TOKENS, self.num_tokens + 1, BLOCK_TOKENS)
        return [f"{self.cache_salt} {end} {self.kv(end - 1)}".encode() for end in ends]

    def kv(self, position: int) -> int:
        """What the KV of a position follows from."""
        states = self._states
        while len(states) <= position:
            before = states[-1] if states else sum(map(ord, self.cache_salt or ""))
            states.append((before * 31 + self.all_token_ids[len(states)] + 1) % 65_521)
        return states[position]


class DoublePool:
    """Blocks with reference counts, as vLLM's block pool. Block 0 is never given out."""

    def __init__(self, count: int) -> None:
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=0) for number in range(count)]
        self.free = list(range(1, count))

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for number in taken:
            self.blocks[number].ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "a store of a block that nobody has"
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                self.free.append(block.block_id)

    def release(self, numbers: list[int]) -> None:
        self.free_blocks([self.blocks[number] for number in reversed(numbers) if number])
