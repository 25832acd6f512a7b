"""What the connector sees of vLLM, without vLLM: requests, a block pool, ranks, steps.

KV follows from all tokens before it, and every step looks at all that it attends to. So KV that is
wrong, late or from elsewhere is seen at the next token, as a model's answer would show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Final

import torch

from kvtier.cache.cache import Cache
from kvtier.cache.worker import CacheWorker
from kvtier.clock import SystemClock
from kvtier.layout import head_range
from kvtier.testing.engine_double import wait_until
from kvtier.types import Namespace, Placement, Plan, Result
from kvtier_adapters.vllm.events import EventDesk
from kvtier_adapters.vllm.geometry import Geometry, LayerGroup
from kvtier_adapters.vllm.messages import Answers, Orders
from kvtier_adapters.vllm.pool import open_pool
from kvtier_adapters.vllm.scheduler_side import Duties, SchedulerSide
from kvtier_adapters.vllm.worker_side import WorkerSide
from tests.lib.vllm_double_parts import BLOCK_TOKENS, DoublePool, DoubleRequest

LAYERS: Final = 2
HEADS: Final = 2
DIM: Final = 8
STEPS_MAX: Final = 20_000


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
        windows: Sequence[int] = (0,),
    ) -> None:
        """With ``hasty`` all moves are made before the step's forward, else beside it.

        Each of the ``windows``, which count as vLLM does, is a KV group; 0: it attends to all.
        """
        self.block_tokens, self.step_tokens, self.heads = block_tokens, step_tokens, heads
        self.windows = tuple(windows)
        self.pool = DoublePool(block_count)
        clock = SystemClock()
        duties = duties or Duties(
            block_tokens, 4, load_deadline_s=0.5, ranks=ranks, windows=self.windows
        )
        feed = cache.events
        events = EventDesk(feed, block_tokens) if feed is not None else None
        self.side = SchedulerSide(cache, namespace, duties, clock, None, events)
        self.side.bind(self.pool)
        self.geometry = double_geometry(ranks, block_tokens, block_count, heads, windows)
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
        # The same memory for each group, as vLLM has it: their blocks differ.
        memory = self.memory[rank] * len(self.windows)
        layers = dict(zip(self.geometry.layer_names, memory, strict=True))
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
                SimpleNamespace(req_id=each.request_id, block_ids=_copied(each.tables))
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
        self._release(request)
        request.num_computed_tokens, request.status = 0, "waiting"
        self.queue.insert(0, request)

    def finish(self, request: DoubleRequest) -> None:
        """End a request: what vLLM does at a stop, and at an abort."""
        loading = request.status == "loading"
        self.side.finished(request, _copied(request.tables))
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
        self._release(request)
        del self.requests[request.request_id]

    def _release(self, request: DoubleRequest) -> None:
        for table in request.tables:
            self.pool.release(table)
        request.tables = []

    def _schedule(self) -> tuple[list[DoubleRequest], dict[DoubleRequest, int]]:
        new: list[DoubleRequest] = []
        for request in list(self.queue):
            if request.status == "waiting" and self._admit(request):
                new.append(request)
                self.queue.remove(request)
        scheduled = {}
        for request in self.running:
            self._slide(request)
            left = request.num_tokens - request.num_computed_tokens
            scheduled[request] = min(left, self.step_tokens)
        return new, scheduled

    def _admit(self, request: DoubleRequest) -> bool:
        """Find blocks for a request; True when it runs, False when it waits for whatever."""
        tokens = 0
        shared: list[list[int]] = []
        if request.num_computed_tokens == 0:
            shared = self._shared_blocks(request)
            found = len(shared[0]) * self.block_tokens if shared else 0
            more, _ = self.side.lookup(request, found)
            if more is None:
                return False
            tokens = more
        if not request.tables and not self._allocate(request, shared, tokens):
            return False
        self._slide(request)
        self.side.allocated(request, _copied(request.tables), tokens)
        request.status = "loading" if tokens else "running"
        if not tokens:
            self.running.append(request)
        return not tokens

    def _allocate(self, request: DoubleRequest, shared: list[list[int]], tokens: int) -> bool:
        """Find blocks of every group, null ones for what no window needs; False: there are none."""
        size = self.block_tokens
        wanted = -(-(len(request.prompt) + request.max_tokens) // size)
        found = len(shared[0]) if shared else 0
        computed = found * size + tokens
        tables, new = [], 0
        for group, window in enumerate(self.windows):
            nulls = max(0, computed - window + 1) // size if window else 0
            kept = shared[group][nulls:] if shared else []
            tables.append([0] * nulls + kept)
            new += wanted - len(tables[-1])
        more = self.pool.allocate(new)
        if more is None:
            return False
        for table in tables:
            self.pool.touch([self.pool.blocks[each] for each in table if each])
            count = wanted - len(table)
            table.extend(more[:count])
            del more[:count]
        request.tables, request.num_computed_tokens = tables, computed
        return True

    def _slide(self, request: DoubleRequest) -> None:
        """Give back what no token to come attends to."""
        for table, window in zip(request.tables, self.windows, strict=True):
            if window:
                stop = max(0, request.num_computed_tokens - window + 1) // self.block_tokens
                gone, table[:stop] = table[:stop], [0] * min(stop, len(table))
                self.pool.release(gone)

    def _shared_blocks(self, request: DoubleRequest) -> list[list[int]]:
        """Blocks that others have, or will have when this step's forward is done: vLLM's own cache.

        What is computed in the same step counts, because it is computed in this order.
        """
        best: list[list[int]] = []
        for other in self.running:
            if other.cache_salt != request.cache_salt:
                continue
            will_be = min(other.num_tokens, other.num_computed_tokens + self.step_tokens)
            pairs = zip(request.all_token_ids[:-1], other.all_token_ids[:will_be], strict=False)
            same = next((n for n, (one, two) in enumerate(pairs) if one != two), None)
            if same is None:
                same = min(request.num_tokens - 1, will_be)
            count = same // self.block_tokens
            blocks = [table[:count] for table in other.tables]
            if self._usable(blocks) and count > (len(best[0]) if best else 0):
                best = blocks
        return best

    def _usable(self, tables: list[list[int]]) -> bool:
        """Whether the windows at the end of some blocks are there."""
        end, size = len(tables[0]) * self.block_tokens, self.block_tokens
        return all(
            0 not in table[max(0, end - window + 1) // size if window else 0 :]
            for table, window in zip(tables, self.windows, strict=True)
        )

    def _compute(self, request: DoubleRequest, count: int) -> None:
        """Look at all KV that is attended to, compute some more, and sample at the end."""
        computed = request.num_computed_tokens
        for group, window in enumerate(self.windows):
            for position in range(max(0, computed - window + 1) if window else 0, computed):
                for rank in range(len(self.memory)):
                    found = self._row(rank, request, group, position)
                    expected = self._expected(rank, request, group, position)
                    assert torch.equal(found, expected), (
                        f"{request.request_id} attends to wrong KV at {position}, group {group}"
                    )
            for position in range(computed, computed + count):
                block, row = divmod(position, self.block_tokens)
                for rank, planes in enumerate(self.memory):
                    expected = self._expected(rank, request, group, position)
                    for plane, values in zip(planes, expected, strict=True):
                        plane[request.tables[group][block], :, row] = values
        request.num_computed_tokens += count
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(request.kv(request.num_tokens - 1) % 1000)

    def _row(self, rank: int, request: DoubleRequest, group: int, position: int) -> torch.Tensor:
        block, row = divmod(position, self.block_tokens)
        number = request.tables[group][block]
        assert number, f"{request.request_id} attends to a null block at {position}"
        return torch.stack([plane[number, :, row] for plane in self.memory[rank]])

    def _expected(
        self, rank: int, request: DoubleRequest, group: int, position: int
    ) -> torch.Tensor:
        heads = head_range(self.heads, rank, len(self.memory))
        layers = torch.arange(group * LAYERS, (group + 1) * LAYERS)
        base = layers.view(-1, 1, 1) * 262_144
        head = torch.tensor(list(heads)).view(1, -1, 1) * 65_536
        return (base + head + request.kv(position)).expand(-1, -1, 2 * DIM).float()

    def _collect(self) -> None:
        """Merge what the ranks say, as vLLM's aggregator does, and act on it as its scheduler."""
        answers, bad, ended, failed = Answers(), set[int](), set[str](), set[str]()
        for worker in self.workers:
            for request_id in worker.take_received():
                self.received[request_id] = self.received.get(request_id, 0) + 1
                if self.received[request_id] == len(self.workers):
                    del self.received[request_id]
                    ended.add(request_id)
            bad |= worker.take_bad_blocks()
            failed |= worker.take_failed()
            answers = answers.merged(worker.take_answers())
        for request in self.requests.values():
            if request.status != "loading":
                continue
            if request.request_id in failed:
                request.num_computed_tokens = 0
            for index in range(request.num_computed_tokens // self.block_tokens if bad else 0):
                (table,) = request.tables
                if table[index] in bad:
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
            self._release(request)


def _copied(tables: list[list[int]]) -> tuple[list[int], ...]:
    return tuple(list(table) for table in tables)


def double_geometry(
    ranks: int,
    block_tokens: int,
    block_count: int,
    heads: int = HEADS,
    windows: Sequence[int] = (0,),
) -> Geometry:
    """The double's model: of each group two layers, two KV heads unless said otherwise."""
    groups = []
    for group, window in enumerate(windows):
        layers = tuple(range(group * LAYERS, (group + 1) * LAYERS))
        names = tuple(f"model.layers.{layer}.attn" for layer in layers)
        groups.append(LayerGroup(names, layers, max(0, window - 1)))
    return Geometry(
        groups=tuple(groups),
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
