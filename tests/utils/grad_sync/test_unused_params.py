# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that use different parameters of one FSDP2 group, as when each rank has its own domain's head."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cosmos_framework.utils.collectives import CollectiveCounter
from cosmos_framework.utils.grad_sync import GradSync, HeldBackGradientError
from tests.utils.grad_sync.windows import MIXED, Setup, gradients, mesh_of, worst_error

DIM, HEADS, WORLD = 8, 6, 4

# The head of each rank, by micro-step and window; -1: the trunk alone. Head 5 rests, 4 is used by one rank once.
WINDOWS = [
    [[0, 1, 2, 3], [0, 0, 1, 1]],
    [[0, 1, 0, 1], [-1, 2, -1, 2], [1, 1, 1, 4]],
    [[3, -1, -1, -1]],
]


class Domains(nn.Module):
    """A trunk of its own group, and heads that share the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(DIM, DIM)
        self.heads = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(HEADS))

    def forward(self, x: Tensor, head: int) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return self.heads[head](x) if head >= 0 else x


def build() -> Domains:
    torch.manual_seed(0)
    return Domains()


def loss(net: nn.Module, index: int, rank: int, head: int, length: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(100 * index + rank)).to(dtype)
    return net(x, head).to(dtype).pow(2).mean() / length


def reference(windows: list[list[list[int]]] = WINDOWS) -> list[dict[str, Tensor | None]]:
    """Each window's gradients, averaged over the ranks, in float64."""
    net, seen, index = build().double(), [], 0
    for window in windows:
        for heads in window:
            for rank, head in enumerate(heads):
                (loss(net, index, rank, head, len(window), torch.float64) / WORLD).backward()
            index += 1
        seen.append(gradients(net))
        net.zero_grad()
    return seen


def sharded(setup: Setup) -> tuple[nn.Module, GradSync]:
    net = build()
    for part in (net.trunk, net):
        policy = MIXED if setup.mixed else MixedPrecisionPolicy()
        fully_shard(part, mesh=mesh_of(setup.mesh), mp_policy=policy)  # type: ignore[call-overload]
    return net, GradSync(net, setup.mode, setup.reshard, setup.reduce_unused)


def run(net: nn.Module, sync: GradSync, windows: list[list[list[int]]] = WINDOWS) -> list[dict[str, Tensor | None]]:
    seen, index, rank = [], 0, dist.get_rank()
    for window in windows:
        for step, heads in enumerate(window):
            with sync.micro_step(boundary=step == len(window) - 1):
                loss(net, index, rank, heads[rank], len(window), torch.float32).backward()
            index += 1
        seen.append(gradients(net))
        net.zero_grad()
    return seen


SETUPS = [
    Setup(mesh, mode, reshard, mixed, reduce_unused=True)
    for mesh in ("hsdp", "fsdp", "replicate")
    for mode, reshard, mixed in itertools.product(["none", "all_reduce", "grad_sync"], [True, False], [False, True])
]


def errors(setups: list[Setup]) -> list[float]:
    mesh_of.cache_clear()
    return [max(map(worst_error, run(*sharded(setup)), reference())) for setup in setups]


@pytest.mark.slow
def test_each_rank_its_own_head(rank_pool: Any) -> None:
    """None only where no rank used the parameter: `worst_error` is infinite otherwise."""
    for found in rank_pool.run(errors, SETUPS):
        for setup, error in zip(SETUPS, found, strict=True):
            assert error < (4e-2 if setup.mixed else 1e-5), setup


SAME = [[[0] * WORLD, [0] * WORLD]]
DIFFERENT = {
    "heads.1.weight, heads.1.bias": [[[0, 0, 0, 0], [0, 0, 1, 0]]],
    "heads.0.weight, heads.0.bias, heads.5.weight, heads.5.bias": [[[0, 0, 0, 5], [1, 1, 1, 1]]],
}


def refused(setups: list[Setup]) -> None:
    mesh_of.cache_clear()
    in_turns = [[[0, 0, 1, 1], [1, 1, 0, 0]]]
    (expected,), (expected_in_turns,) = reference(SAME), reference(in_turns)
    for setup in setups:
        net, sync = sharded(setup)
        for names, windows in DIFFERENT.items():
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            before = {name: value.to_local().clone() for name, value in net.state_dict().items()}
            with pytest.raises(HeldBackGradientError, match="fsdp_reduce_unused_params=True") as caught:
                run(net, sync, windows)
            assert f"some ranks used {names} in" in str(caught.value), setup
            optimizer.step()
            assert all(torch.equal(value.to_local(), before[name]) for name, value in net.state_dict().items())
            assert not sync.held_back()
            assert worst_error(run(net, sync, SAME)[0], expected) < 1e-5, setup
        # Each rank used the same parameters in the window, though not in the same micro-steps.
        assert worst_error(run(net, sync, in_turns)[0], expected_in_turns) < 1e-5, setup


@pytest.mark.slow
def test_ranks_that_differ_without_saying_so_are_named(rank_pool: Any) -> None:
    """The gradients are refused on every rank, and gone, before an optimizer could step."""
    setups = [setup for setup in SETUPS if setup.mode != "none" and not setup.mixed]
    rank_pool.run(refused, [replace(setup, reduce_unused=False) for setup in setups])


def small_collectives(setups: list[Setup]) -> list[dict[str, tuple[int, int]]]:
    mesh_of.cache_clear()
    sizes = []
    for setup in setups:
        net, sync = sharded(setup)
        with CollectiveCounter() as counter:
            run(net, sync, [[[0] * WORLD] * 4] * 2)
        total = counter.totals().get(("all_reduce", "world"))
        sizes.append({str(setup): (total.calls, total.bytes) if total else (0, 0)})
    return sizes


def test_agreeing_costs_one_small_all_reduce_a_window(rank_pool: Any) -> None:
    setups = [
        Setup("hsdp", mode, reduce_unused=unused) for mode in ("all_reduce", "grad_sync") for unused in (False, True)
    ]
    parameters = len(list(build().parameters()))
    for sizes in rank_pool.run(small_collectives, setups):
        for size in sizes:
            ((setup, (calls, nbytes)),) = size.items()
            assert (calls, nbytes) == (2, 2 * 2 * parameters), setup
    print(f"two windows: {calls} all-reduces of {nbytes // calls} bytes for {parameters} parameters")
