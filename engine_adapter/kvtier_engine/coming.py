"""Blocks that are not there yet but on their way, so that no two requests bring the same ones."""

from __future__ import annotations

from kvtier_engine.request import Request, Status


class ComingBlocks:
    """Who is about to bring which block, by digest. A digest is a hint here, never a proof."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, Request] = {}

    def expect(self, request: Request, first: int) -> None:
        """Note that a request brings its full blocks from ``first`` on, by load or by prefill."""
        for digest in request.chain.digests[first:]:
            self._leaders.setdefault(digest, request)

    def settle(self, request: Request, first: int, stop: int) -> None:
        """Note that a request's blocks ``first .. stop - 1`` have come, or never will."""
        for digest in request.chain.digests[first:stop]:
            if self._leaders.get(digest) is request:
                del self._leaders[digest]

    def worth_waiting_for(self, request: Request, position: int) -> bool:
        """Tell whether to wait for the request that is about to bring block ``position``.

        Waiting for a prefill that goes first anyway costs nothing. For loads a request waits once:
        were they to fail, those behind them would fail one after the other.
        """
        leader = self._leaders.get(request.chain.digests[position])
        if leader is None or leader is request:
            return False
        if leader.status is Status.RUNNING:
            return leader.rank < request.rank
        if leader.status is Status.LOADING and not request.followed:
            return True
        request.followed = True
        return False
