# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Other wrappers with a `no_sync()`: torch's FSDP1 as the one that is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from cosmos_framework.utils.collectives import CollectiveCounter
from cosmos_framework.utils.grad_sync import GradSync

WINDOWS, LENGTH = 2, 3


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(index: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * index + rank))


def gradients(mode: str, discard_first: bool) -> tuple[list[torch.Tensor], int, dict[str, int]]:
    """Returns each window's flat gradient, the reductions of all windows, and what is held after a micro-step."""
    model = FullyShardedDataParallel(
        build(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"), use_orig_params=False
    )
    sync = GradSync(model, mode=mode)
    if discard_first:
        with sync.micro_step(boundary=False):
            model(batch(99, dist.get_rank())).pow(2).mean().backward()
        sync.discard()
    seen, held = [], {}
    with CollectiveCounter() as counter:
        for index in range(WINDOWS * LENGTH):
            boundary = index % LENGTH == LENGTH - 1
            with sync.micro_step(boundary):
                (model(batch(index, dist.get_rank())).pow(2).mean() / LENGTH).backward()
            held = held or sync.held_back()
            if boundary:
                assert not sync.held_back()
                seen.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
                model.zero_grad()
    return seen, sum(traffic.calls for (kind, _), traffic in counter.totals().items() if kind == "all_reduce"), held


def reference() -> list[torch.Tensor]:
    model, seen = build().double(), []
    for window in range(WINDOWS):
        for index in range(window * LENGTH, (window + 1) * LENGTH):
            for rank in range(4):
                (model(batch(index, rank).double()).pow(2).mean() / LENGTH / 4).backward()
        seen.append(torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None]))
        model.zero_grad()
    return seen


def both_modes() -> list[Any]:
    return [gradients(mode, discard) for mode, discard in (("none", False), ("grad_sync", False), ("all_reduce", True))]


def test_windows_of_fsdp1_are_exact_and_reduce_once(rank_pool: Any) -> None:
    expected = reference()
    for none, *deferred in rank_pool.run(both_modes):
        assert none[1] == WINDOWS * LENGTH
        assert not none[2]
        for windows, reductions, held in deferred:
            assert reductions == WINDOWS
            assert held
            for found, wanted in zip(windows, expected, strict=True):
                torch.testing.assert_close(found[: len(wanted)].double(), wanted, rtol=1e-5, atol=1e-7)


class Refusing(nn.Linear):
    """Shards gradients in each backward, so that it has nothing to offer but a refusal."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        raise AssertionError("gradients are sharded here")
        yield


def test_wrapper_that_refuses_is_named() -> None:
    model = Refusing(2, 2)
    with pytest.raises(RuntimeError, match=r"Refusing.no_sync\(\): gradients are sharded here.*fsdp_accum_mode='none'"):
        with GradSync(model).micro_step(boundary=False):
            raise NotImplementedError
    for boundary in (False, True):
        with GradSync(model, "none").micro_step(boundary):
            model(torch.ones(1, 2)).sum().backward()
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [2, 2]
