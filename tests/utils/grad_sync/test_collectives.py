# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""What a window sends, counted by kind and mesh dimension."""

from __future__ import annotations

from typing import Any

import pytest

from cosmos_framework.utils.collectives import Traffic
from tests.utils.grad_sync.windows import Setup, mesh_of, run_windows

GROUPS, ACCUMULATION = 3, 4
WINDOW = [["abh"] * ACCUMULATION]

# mesh, mode -> reduce-scatters and all-reduces of gradients, a group and window
EXPECTED = {
    ("hsdp", "none"): (4, 4),
    ("hsdp", "all_reduce"): (4, 1),
    ("hsdp", "grad_sync"): (1, 1),
    ("fsdp", "none"): (4, 0),
    ("fsdp", "all_reduce"): (4, 0),
    ("fsdp", "grad_sync"): (1, 0),
    ("replicate", "none"): (0, 4),
    ("replicate", "all_reduce"): (0, 1),
    ("replicate", "grad_sync"): (0, 1),
}


def traffic(setups: list[Setup]) -> list[dict[tuple[str, str], Traffic]]:
    mesh_of.cache_clear()
    return [run_windows(WINDOW, setup)[1] for setup in setups]


def calls(totals: dict[tuple[str, str], Traffic], kind: str, *dimensions: str) -> int:
    return sum(totals[kind, dim].calls for dim in dimensions if (kind, dim) in totals)


@pytest.mark.parametrize("mesh", ["hsdp", "fsdp", "replicate"])
def test_reductions_of_a_window(rank_pool: Any, mesh: str) -> None:
    # torch gives a mesh of one dimension over all ranks the world's process group.
    shard, replicate = {
        "hsdp": ("dp_shard", "dp_replicate"),
        "fsdp": ("world", "-"),
        "replicate": ("-", "dp_replicate"),
    }[mesh]
    setups = [Setup(mesh, mode, reshard) for mode in ("none", "all_reduce", "grad_sync") for reshard in (True, False)]
    for totals_of in rank_pool.run(traffic, setups):
        for setup, totals in zip(setups, totals_of, strict=True):
            scatters, reduces = EXPECTED[mesh, setup.mode]
            assert calls(totals, "reduce_scatter", shard) == scatters * GROUPS, setup
            if replicate in {dim for _, dim in totals}:
                assert calls(totals, "all_reduce", replicate) == reduces * GROUPS, setup


def test_parameters_are_gathered_once_a_window_when_kept(rank_pool: Any) -> None:
    setups = [Setup("hsdp", mode, reshard=False) for mode in ("all_reduce", "grad_sync", "none")]
    for totals_of in rank_pool.run(traffic, [*setups, Setup("hsdp", "none")]):
        *kept, resharded = [calls(totals, "all_gather", "dp_shard") for totals in totals_of]
        assert kept == [GROUPS] * 3
        assert resharded == ACCUMULATION * 2 * GROUPS


def test_deferral_sends_one_small_message_more(rank_pool: Any) -> None:
    """The ranks agree at the boundary on which parameters the window used: two bytes a parameter."""
    setups = [Setup("hsdp", mode) for mode in ("none", "all_reduce", "grad_sync")]
    for none, *deferred in rank_pool.run(traffic, setups):
        assert ("all_reduce", "world") not in none
        for totals in deferred:
            assert totals["all_reduce", "world"] == Traffic(calls=1, bytes=2 * 7)
