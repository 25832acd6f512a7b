"""What the connector sees of vLLM, without vLLM: requests, a block pool, ranks, steps.

KV follows from all tokens before it, and every step looks at all that it attends to. So KV that is
wrong, late or from elsewhere is seen at the next token, as a model's answer would show it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import torch

from kvtier.cache.cache import Cache
from kvtier.cache.worker import CacheWorker
from kvtier.clock import SystemClock
from kvtier.layout import head_range
from kvtier.testing.engine_double import wait_until
from kvtier.types import Namespace, Placement, Plan, Result
from kvtier_adapters.vllm.events import EventDesk
from kvtier_adapters.vllm.geometry import Geometry
from kvtier_adapters.vllm.messages import Answers, Orders
from kvtier_adapters.vllm.pool import open_pool
from kvtier_adapters.vllm.scheduler_side import Duties, SchedulerSide
from kvtier_adapters.vllm.worker_side import WorkerSide

LAYERS: Final = 2
HEADS: Final = 2
DIM: Final = 8
#: Of a block, unless a test says otherwise.
BLOCK_TOKENS: Final = 4
STEPS_MAX: Final = 20_000


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
    table: list[int] = field(default_factory=list)
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
        self.free_blocks([self.blocks[number] for number in reversed(numbers)])


class HastyWorker(CacheWorker):
    """One that is done with every plan before anything else happens."""

    number: int
    kept: list[Result]

    def execute(self, plan: Plan) -> None:
        super().execute(plan)
        if any(move.worker == self.number for move in plan.moves):
            found = len(self.kept)
            wait_until(lambda: bool(self._take()) or len(self.kept) > found, "a plan")

    def poll(self) -> list[Result]:
        self._take()
        kept, self.kept = self.kept, []
        return kept

    def serve(self, number: int) -> None:
        """Say whose plans to wait for."""
        self.number, self.kept = number, []

    def _take(self) -> int:
        results = super().poll()
        self.kept += results
        return len(results)


class VllmDouble:
    """A scheduler and its ranks around one cache. ``step`` until ``idle``."""

    def __init__(
        self,
        cache: Cache,
        namespace: Namespace,
        *,
        ranks: int = 1,
        block_tokens: int = BLOCK_TOKENS,
        block_count: int = 64,
        step_tokens: int = 24,
        duties: Duties | None = None,
        hasty: bool = False,
        heads: int = HEADS,
    ) -> None:
        """With ``hasty`` all moves are made before the step's forward, else beside it."""
        self.block_tokens, self.step_tokens, self.heads = block_tokens, step_tokens, heads
        self.pool = DoublePool(block_count)
        clock = SystemClock()
        duties = duties or Duties(block_tokens, 4, load_deadline_s=0.5, ranks=ranks)
        feed = cache.events
        events = EventDesk(feed, block_tokens) if feed is not None else None
        self.side = SchedulerSide(cache, namespace, duties, clock, None, events)
        self.side.bind(self.pool)
        self.geometry = double_geometry(ranks, block_tokens, block_count, heads)
        shape = (block_count, self.geometry.rank_heads, block_tokens, 2 * DIM)
        self.memory = [[torch.full(shape, -1.0) for _ in range(LAYERS)] for _ in range(ranks)]
        self.workers = [self._open_rank(cache, rank, hasty=hasty) for rank in range(ranks)]
        self.requests: dict[str, DoubleRequest] = {}
        self.queue: list[DoubleRequest] = []
        self.running: list[DoubleRequest] = []
        self.received: dict[str, int] = {}
        self.done: list[DoubleRequest] = []

    def _open_rank(self, cache: Cache, rank: int, *, hasty: bool) -> WorkerSide:
        place = Placement(rank, rank, len(self.memory))
        layers = dict(zip(self.geometry.layer_names, self.memory[rank], strict=True))
        pool = open_pool(self.geometry, layers, {})
        assert not isinstance(pool, str), pool
        side = WorkerSide(place)

        def open_worker(orders: Orders) -> CacheWorker:
            kind = HastyWorker if hasty else CacheWorker
            worker = kind(place, cache.arena, codecs=cache.codecs)
            worker.register_pool(pool)
            if isinstance(worker, HastyWorker):
                worker.serve(rank)
            return worker

        side.serve(open_worker)
        return side

    @property
    def idle(self) -> bool:
        """Nothing to compute, to load or to wait for."""
        return not self.requests and not self.side.busy

    def add(self, request: DoubleRequest) -> DoubleRequest:
        """Take a request in."""
        self.requests[request.request_id] = request
        self.queue.append(request)
        self.side.arrived(request)
        return request

    def run(self) -> None:
        """Step until idle. ``AssertionError`` where that does not come."""
        clock = SystemClock()
        for _ in range(STEPS_MAX):
            if self.idle:
                return
            if not self.step():
                clock.sleep(0.0005)
        raise AssertionError("stuck")

    def step(self) -> bool:
        """Schedule, order, compute, answer. False when nothing was computed."""
        new, scheduled = self._schedule()
        output = SimpleNamespace(
            num_scheduled_tokens={each.request_id: count for each, count in scheduled.items()},
            scheduled_new_reqs=[
                SimpleNamespace(req_id=each.request_id, block_ids=(list(each.table),))
                for each in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], resumed_req_ids=set()
            ),
        )
        orders = self.side.orders(output)
        for worker in self.workers:
            worker.execute(orders)
        for request, count in scheduled.items():
            self._compute(request, count)
        self._collect()
        for request in list(scheduled):
            if request.num_tokens >= len(request.prompt) + request.max_tokens:
                self.finish(request)
        self.side.step_ended()
        return bool(scheduled)

    def preempt(self, request: DoubleRequest) -> None:
        """Take a running request's blocks away; it begins again later."""
        self.running.remove(request)
        self.pool.release(request.table)
        request.table, request.num_computed_tokens, request.status = [], 0, "waiting"
        self.queue.insert(0, request)

    def finish(self, request: DoubleRequest) -> None:
        """End a request: what vLLM does at a stop, and at an abort."""
        loading = request.status == "loading"
        self.side.finished(request, list(request.table))
        for line in (self.queue, self.running):
            if request in line:
                line.remove(request)
        request.status = "finished"
        self.done.append(request)
        if not loading:
            self._forget(request)

    def close(self) -> None:
        """End the ranks."""
        for worker in self.workers:
            worker.close()

    def _forget(self, request: DoubleRequest) -> None:
        self.pool.release(request.table)
        del self.requests[request.request_id]

    def _schedule(self) -> tuple[list[DoubleRequest], dict[DoubleRequest, int]]:
        new: list[DoubleRequest] = []
        for request in list(self.queue):
            if request.status == "waiting" and self._admit(request):
                new.append(request)
                self.queue.remove(request)
        scheduled = {}
        for request in self.running:
            left = request.num_tokens - request.num_computed_tokens
            scheduled[request] = min(left, self.step_tokens)
        return new, scheduled

    def _admit(self, request: DoubleRequest) -> bool:
        """Find blocks for a request; True when it runs, False when it waits for whatever."""
        tokens = 0
        shared: list[int] = []
        if request.num_computed_tokens == 0:
            shared = self._shared_blocks(request)
            found, _ = self.side.lookup(request, len(shared) * self.block_tokens)
            if found is None:
                return False
            tokens = found
        wanted = -(-(len(request.prompt) + request.max_tokens) // self.block_tokens)
        more = self.pool.allocate(wanted - len(request.table) - len(shared))
        if more is None:
            return False
        self.pool.touch([self.pool.blocks[number] for number in shared])
        request.table = shared + request.table + more
        request.num_computed_tokens += len(shared) * self.block_tokens + tokens
        self.side.allocated(request, request.table, tokens)
        request.status = "loading" if tokens else "running"
        if not tokens:
            self.running.append(request)
        return not tokens

    def _shared_blocks(self, request: DoubleRequest) -> list[int]:
        """Blocks that others have, or will have when this step's forward is done: vLLM's own cache.

        What is computed in the same step counts, because it is computed in this order.
        """
        best: list[int] = []
        for other in self.running:
            if other.cache_salt != request.cache_salt:
                continue
            will_be = min(other.num_tokens, other.num_computed_tokens + self.step_tokens)
            pairs = zip(request.all_token_ids[:-1], other.all_token_ids[:will_be], strict=False)
            same = next((n for n, (one, two) in enumerate(pairs) if one != two), None)
            if same is None:
                same = min(request.num_tokens - 1, will_be)
            blocks = other.table[: same // self.block_tokens]
            best = max(best, blocks, key=len)
        return list(best)

    def _compute(self, request: DoubleRequest, count: int) -> None:
        """Look at all KV that is there, compute some more, and sample where the end is reached."""
        for position in range(request.num_computed_tokens):
            for rank in range(len(self.memory)):
                found = self._row(rank, request, position)
                assert torch.equal(found, self._expected(rank, request, position)), (
                    f"{request.request_id} attends to wrong KV at {position}"
                )
        for position in range(request.num_computed_tokens, request.num_computed_tokens + count):
            for rank in range(len(self.memory)):
                expected = self._expected(rank, request, position)
                block, row = divmod(position, self.block_tokens)
                for layer, plane in enumerate(self.memory[rank]):
                    plane[request.table[block], :, row] = expected[layer]
        request.num_computed_tokens += count
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(request.kv(request.num_tokens - 1) % 1000)

    def _row(self, rank: int, request: DoubleRequest, position: int) -> torch.Tensor:
        block, row = divmod(position, self.block_tokens)
        return torch.stack([plane[request.table[block], :, row] for plane in self.memory[rank]])

    def _expected(self, rank: int, request: DoubleRequest, position: int) -> torch.Tensor:
        heads = head_range(self.heads, rank, len(self.memory))
        base = torch.arange(LAYERS).view(-1, 1, 1) * 262_144
        head = torch.tensor(list(heads)).view(1, -1, 1) * 65_536
        return (base + head + request.kv(position)).expand(-1, -1, 2 * DIM).float()

    def _collect(self) -> None:
        """Merge what the ranks say, as vLLM's aggregator does, and act on it as its scheduler."""
        answers, bad, ended = Answers(), set[int](), set[str]()
        for worker in self.workers:
            for request_id in worker.take_received():
                self.received[request_id] = self.received.get(request_id, 0) + 1
                if self.received[request_id] == len(self.workers):
                    del self.received[request_id]
                    ended.add(request_id)
            bad |= worker.take_bad_blocks()
            answers = answers.merged(worker.take_answers())
        for request in self.requests.values():
            if request.status == "loading":
                for index in range(request.num_computed_tokens // self.block_tokens):
                    if request.table[index] in bad:
                        request.num_computed_tokens = index * self.block_tokens
                        break
        self.side.answered(answers)
        for request_id in ended:
            self._received(self.requests[request_id])

    def _received(self, request: DoubleRequest) -> None:
        if request.status == "finished":
            self._forget(request)
            return
        assert request.status == "loading", "a load ends once"
        request.status, request.loaded = "waiting", request.num_computed_tokens
        if not request.num_computed_tokens:
            self.pool.release(request.table)
            request.table = []


def double_geometry(
    ranks: int, block_tokens: int, block_count: int, heads: int = HEADS
) -> Geometry:
    """The double's model: two layers, two KV heads unless said otherwise."""
    return Geometry(
        layer_names=tuple(f"model.layers.{layer}.attn" for layer in range(LAYERS)),
        layers=tuple(range(LAYERS)),
        kv_heads=heads,
        rank_heads=max(1, heads // ranks),
        head_dim=DIM,
        dtype="float32",
        block_tokens=block_tokens,
        block_count=block_count,
        tp_size=ranks,
        opaque=True,
        cache_dtype="auto",
    )
