# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""When collectives are in flight."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cosmos_framework.utils.collectives import Collective, CollectiveCounter, in_flight_s

INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=8)


def collective(start_s: float, end_s: float) -> Collective:
    return Collective("all_reduce", "world", bytes=4, start_s=start_s, end_s=end_s)


@given(INTERVALS)
def test_time_in_flight_is_that_of_each_instant_once(intervals: list[tuple[int, int]]) -> None:
    in_flight = {second for start, length in intervals for second in range(start, start + length)}
    assert in_flight_s(collective(start, start + length) for start, length in intervals) == len(in_flight)


def issue_and_wait() -> None:
    """Rank 1 joins the collectives of rank 0 when it is told to, not before."""
    counter, signal = CollectiveCounter(), torch.zeros(1)
    if dist.get_rank() == 1:
        dist.recv(signal, src=0)
        dist.all_reduce(torch.ones(5))
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
        dist.all_reduce(torch.ones(1))
        return
    with CollectiveCounter() as outer, counter:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        issued_s = counter.elapsed_s()
        assert counter.collectives()[0].end_s >= issued_s, "still in flight"
        dist.send(signal, dst=1)
        while not work.is_completed():
            time.sleep(0.001)
        completed_s = counter.elapsed_s()
        work.wait()
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
    dist.all_reduce(torch.ones(1))
    assert outer.totals() == counter.totals(), "each of nested blocks counts"
    reduce, scatter = counter.collectives()
    assert 0 <= reduce.start_s <= issued_s <= reduce.end_s <= completed_s, "ends when it is done, not when waited for"
    assert completed_s <= scatter.start_s < scatter.end_s <= counter.elapsed_s()
    assert (reduce.key, reduce.bytes) == (("all_reduce", "world"), 20)
    assert (scatter.key, scatter.bytes) == (("reduce_scatter", "world"), 16)


def test_a_collective_ends_when_its_result_is_there(rank_pool: Any) -> None:
    rank_pool.run(issue_and_wait, world_size=2)


def test_compiled_code_stays_compiled_while_collectives_are_counted() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(torch.sin, backend=backend)
    with CollectiveCounter():
        compiled(torch.ones(3))
    assert len(graphs) == 1
