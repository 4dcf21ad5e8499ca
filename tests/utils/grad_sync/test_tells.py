# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""What people are told: the plan, what is held back, one line a model, and each warning once, on rank 0."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from cosmos_framework.utils.grad_sync import GradSync, UnsupportedTorchError
from tests.utils.grad_sync.test_window import fsdp_groups
from tests.utils.grad_sync.windows import DIM, Setup, batch, build, gradients, mesh_of, micro_step, shard, worst_error

LOGGER = logging.getLogger("cosmos_framework.utils.grad_sync")
SCATTER, REDUCE, GATHER = (
    "reduce_scatter over dp_shard",
    "all_reduce over dp_replicate",
    "all_gather over dp_shard",
)


class Records(logging.Handler):
    """What was logged: (level, text)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelno, record.getMessage()))

    @property
    def warnings(self) -> list[str]:
        return [text for level, text in self.seen if level == logging.WARNING]


@contextmanager
def logged() -> Iterator[Records]:
    records, level = Records(), LOGGER.level
    LOGGER.addHandler(records)
    LOGGER.setLevel(logging.INFO)
    try:
        yield records
    finally:
        LOGGER.removeHandler(records)
        LOGGER.setLevel(level)


def run(net: nn.Module, sync: GradSync, uses: list[str], windows: int = 2) -> None:
    for _, (step, use) in itertools.product(range(windows), enumerate(uses)):
        with sync.micro_step(boundary=step == len(uses) - 1):
            micro_step(net, step, use, len(uses))
        if step == len(uses) - 1:
            net.zero_grad()


def warnings_of(net: nn.Module, sync: GradSync, uses: list[str] | None = None) -> list[str]:
    """The warnings of two windows; other ranks than 0 say nothing at all."""
    with logged() as records:
        run(net, sync, uses or ["abh", "abh"])
    assert dist.get_rank() == 0 or not records.seen
    return records.warnings


# The plan

PLANS = {
    ("hsdp", "all_reduce"): ((GATHER, SCATTER), (REDUCE,)),
    ("hsdp", "grad_sync"): ((GATHER,), (REDUCE, SCATTER)),
    ("hsdp", "none"): ((GATHER, REDUCE, SCATTER), ()),
    ("fsdp", "all_reduce"): ((GATHER, SCATTER), ()),
    ("fsdp", "grad_sync"): ((GATHER,), (SCATTER,)),
    ("replicate", "all_reduce"): ((), (REDUCE,)),
    ("replicate", "grad_sync"): ((), (REDUCE,)),
}


def plans() -> None:
    mesh_of.cache_clear()
    for (mesh, mode), (each, waits) in PLANS.items():
        for reshard in (True, False):
            net = shard(build(), Setup(mesh, mode))
            (plan,) = GradSync(net, mode, reshard).plan()
            assert plan.backend == "fsdp2"
            assert plan.where.startswith("3 groups over ")
            kept = tuple(name for name in each if name != GATHER)
            assert sorted(plan.each_micro_step) == sorted(each if reshard else kept), (mesh, mode)
            assert sorted(plan.waits) == sorted(waits)
            assert plan.gathered_once is not reshard
            assert bool(plan.no_effect) is not bool(waits)
            assert bool(plan.held_bytes) is bool(waits)
            assert all(name in str(plan) for name in plan.each_micro_step + plan.waits)
    for mode, defers in {"all_reduce": True, "grad_sync": True, "none": False}.items():
        ddp = DistributedDataParallel(build())
        (plan,) = GradSync(ddp, mode).plan()
        assert (plan.backend, bool(plan.waits), bool(plan.no_effect)) == ("ddp", defers, not defers)
        assert not plan.held_bytes
    assert not GradSync(build()).plan()
    both = nn.ModuleList([DistributedDataParallel(build()), shard(build(), Setup())])
    assert [plan.backend for plan in GradSync(both).plan()] == ["ddp", "fsdp2"]


def test_plan_of_every_mesh_and_mode(rank_pool: Any) -> None:
    rank_pool.run(plans)


def held_back() -> None:
    mesh_of.cache_clear()
    for mode in ("all_reduce", "grad_sync"):
        for net in (shard(build(), Setup()), DistributedDataParallel(build(), find_unused_parameters=True)):
            sync = GradSync(net, mode)
            assert not sync.held_back()
            with sync.micro_step(boundary=False):
                micro_step(net, 0, "a", 2)
            held = sync.held_back()
            assert set(held) == {"a.weight", "trunk.weight", "trunk.bias"}
            assert all(nbytes > 0 for nbytes in held.values())
            with sync.micro_step(boundary=True):
                micro_step(net, 0, "a", 2)
            assert not sync.held_back()


def test_held_back_names_what_waits(rank_pool: Any) -> None:
    rank_pool.run(held_back)


# One line a model, one warning a mistake


def vain_modes() -> None:
    mesh_of.cache_clear()
    is_rank0 = dist.get_rank() == 0
    with logged() as records:
        net = shard(build(), Setup())
        run(net, GradSync(net), ["abh", "abh"], windows=3)
    assert len(records.seen) == is_rank0, "one line, whatever the number of windows"
    assert not records.warnings

    net = shard(build(), Setup("fsdp"))
    found = warnings_of(net, GradSync(net, "all_reduce"))
    assert len(found) == is_rank0
    assert all("fsdp_accum_mode='grad_sync'" in text for text in found)

    with logged() as records:
        run(net, GradSync(net, "grad_sync"), ["abh"])
    assert len(records.seen) == is_rank0
    assert all("grad_accum_iter above 1" in text for _, text in records.seen)
    assert not warnings_of(net, GradSync(net, "none")), "that is what was asked for"

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for mode, reduce_dtype, count in (("all_reduce", None, 1), ("grad_sync", torch.float32, 0), ("none", None, 0)):
        net = build()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        fully_shard(net, mesh=mesh_of("hsdp"), mp_policy=policy)
        found = warnings_of(net, GradSync(net, mode))
        assert len(found) == count * is_rank0
        assert all("bfloat16" in text and "reduce_dtype=torch.float32" in text for text in found)


def one_rank() -> None:
    nets: list[Any] = [DistributedDataParallel(build()), fully_shard(build())]
    for net in nets:
        for mode in ("all_reduce", "grad_sync"):
            (text,) = warnings_of(net, GradSync(net, mode))
            assert "on one rank" in text


@pytest.mark.slow
def test_modes_that_save_nothing(rank_pool: Any) -> None:
    rank_pool.run(vain_modes)
    rank_pool.run(one_rank, world_size=1)


def misplaced() -> None:
    mesh_of.cache_clear()
    is_rank0 = dist.get_rank() == 0
    rank = dist.get_rank()

    def models(reshard: bool) -> list[tuple[nn.Module, GradSync]]:
        nets = [shard(build(), Setup()), *(() if not reshard else (DistributedDataParallel(build()),))]
        return [(net, GradSync(net, reshard=reshard)) for net in nets]

    for net, sync in models(reshard=True):
        with logged() as records:
            for index in range(6):
                with sync.micro_step(boundary=False):
                    loss = net(batch(index, rank), "abh").pow(2).mean()
                if isinstance(net, DistributedDataParallel):
                    loss = net(batch(index, rank), "abh").pow(2).mean()
                loss.backward()
                net.zero_grad()
        assert sum("backward() inside the block" in text for text in records.warnings) == is_rank0, type(net)

    cases = [*models(reshard=False), (ddp := DistributedDataParallel(build()), GradSync(ddp))]
    for net, sync in cases:
        with logged() as records:
            for index in range(6):
                loss = net(batch(index, rank), "abh").pow(2).mean() / 3
                with sync.micro_step(boundary=index % 3 == 2):
                    loss.backward()
        assert sum("forward ran outside the block" in text for text in records.warnings) == is_rank0, type(net)

    for net, sync in [*models(reshard=True), *models(reshard=False)]:  # validation between the blocks is fine
        with logged() as records:
            for index in range(6):
                with torch.no_grad():
                    net(batch(index, rank), "abh")
                with sync.micro_step(boundary=index % 3 == 2):
                    micro_step(net, index, "abh", 3)
                    micro_step(net, index, "abh", 3)
        assert not records.warnings, records.warnings


@pytest.mark.slow
def test_forward_or_backward_outside_the_block(rank_pool: Any) -> None:
    rank_pool.run(misplaced)


class Adapted(nn.Module):
    lora: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.base, self.own = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        x = self.own(self.base(x))
        return self.lora(x) if hasattr(self, "lora") else x


def uncovered() -> None:
    mesh_of.cache_clear()
    is_rank0 = dist.get_rank() == 0

    def assert_named(found: list[str], names: str) -> None:
        assert len(found) == is_rank0, found
        assert all(f"never synchronised: {names}." in text for text in found), found

    net = Adapted()
    fully_shard(net, mesh=mesh_of("hsdp"), ignored_params=set(net.own.parameters()))
    assert_named(warnings_of(net, GradSync(net)), "own.weight, own.bias")

    wrapped: list[Any] = [fully_shard(Adapted(), mesh=mesh_of("hsdp")), DistributedDataParallel(Adapted())]
    for late in wrapped:
        sync = GradSync(late)
        assert not warnings_of(late, sync)
        getattr(late, "module", late).lora = nn.Linear(DIM, DIM)
        assert_named(warnings_of(late, sync), "lora.weight, lora.bias")
        assert not warnings_of(late, sync), "once"

    nets = nn.ModuleList([shard(build(), Setup()), build().requires_grad_(False)])
    sync = GradSync(nets)
    with logged() as records:
        run(nets[0], sync, ["abh", "abh"])
        shard(nets[1].requires_grad_(True), Setup())  # type: ignore[arg-type]
        run(nets[0], sync, ["abh", "abh"])
    assert [text.split(" over")[0] for _, text in records.seen] == ["fsdp2 (3 groups", "fsdp2 (6 groups"][
        : 2 * is_rank0
    ]


def test_parameters_that_nobody_synchronises_are_named(rank_pool: Any) -> None:
    rank_pool.run(uncovered)


# Layouts and hooks


class Boom(Exception):
    pass


def unknown_layout() -> None:
    mesh_of.cache_clear()
    for mode, reshard in itertools.product(["all_reduce", "grad_sync"], [True, False]):
        net = shard(build(), Setup())
        micro_step(net, 0, "abh", 1)
        expected = gradients(net)
        net.zero_grad()
        del fsdp_groups(net)[0].fsdp_params[0]._orig_size  # torch itself has no more use for it
        with pytest.raises(UnsupportedTorchError) as caught, GradSync(net, mode, reshard).micro_step(boundary=False):
            pass
        text = str(caught.value)
        assert torch.__version__ in text
        assert "FSDPParam has no _orig_size" in text
        assert "fsdp_accum_mode='none' works" in text
        sync = GradSync(net, "none")
        with pytest.raises(Boom), sync.micro_step(boundary=True):
            raise Boom
        for boundary in (False, True):
            with sync.micro_step(boundary):
                micro_step(net, 0, "abh", 2)
        assert worst_error(gradients(net), expected) < 1e-5


def test_unknown_layout_is_one_clear_error_and_mode_none_works(rank_pool: Any) -> None:
    rank_pool.run(unknown_layout)


def torch_methods(net: nn.Module) -> tuple[Any, ...]:
    """What a block replaces while it is open."""
    group_class = type(fsdp_groups(net)[0])
    return group_class.post_backward, group_class.reshard


def nothing_installed() -> None:
    mesh_of.cache_clear()
    net = shard(build(), Setup())
    micro_step(net, 0, "abh", 1)
    ddp_net = DistributedDataParallel(build())
    for mode, boundaries in (("none", [False, False, True]), ("all_reduce", [True, True]), ("grad_sync", [True])):
        syncs = GradSync(net, mode), GradSync(ddp_net, mode)
        before = torch_methods(net)
        for boundary in boundaries:
            with syncs[0].micro_step(boundary), syncs[1].micro_step(boundary):
                assert torch_methods(net) == before
                assert ddp_net.require_backward_grad_sync is True
                assert ddp_net.require_forward_param_sync is True
                for param in (*net.parameters(), *ddp_net.parameters()):
                    assert not getattr(param, "_post_accumulate_grad_hooks", None)
    with GradSync(net).micro_step(boundary=False):
        assert torch_methods(net) != before, "otherwise this test says nothing"
    assert torch_methods(net) == before


def test_nothing_is_installed_where_nothing_can_wait(rank_pool: Any) -> None:
    rank_pool.run(nothing_installed)
