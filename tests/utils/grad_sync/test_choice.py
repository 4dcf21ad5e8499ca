# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Mode "auto": a memory budget goes to what saves the most time per byte, and the gradients stay those of "none"."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard

from cosmos_framework.utils.grad_sync import AccumMode, GradSync, Plan, Settings
from tests.utils.grad_sync.test_window import fsdp_groups, we_hold
from tests.utils.grad_sync.windows import (
    Setup,
    build,
    gradients,
    mesh_of,
    micro_step,
    run_windows,
    shard,
    sync_of,
    worst_error,
)

WINDOW = ["abh", "ah", "bh", "ab"]


def spent(plans: list[Plan]) -> int:
    return sum(plan.held_bytes + plan.gathered_bytes for plan in plans)


def plans_of(setup: Setup) -> list[Plan]:
    net = shard(build(), setup)  # a GradSync keeps no model alive
    return sync_of(net, setup).plan()


def all_of_it(mesh: str, mixed: bool) -> int:
    """The least budget that has room for everything: what "inf" spends beyond budget 0."""
    auto = Setup(mesh, "auto", mixed=mixed)
    return spent(plans_of(replace(auto, memory_bytes=math.inf))) - spent(plans_of(auto))


# The ends


def ends() -> None:
    mesh_of.cache_clear()
    for mesh, mixed in (("fsdp", False), ("hsdp", True), ("replicate", False)):
        none, _ = run_windows([WINDOW], Setup(mesh, "none", mixed=mixed))
        pairs = {0.0: Setup(mesh, "all_reduce", mixed=mixed), math.inf: Setup(mesh, "grad_sync", False, mixed)}
        for budget, end in pairs.items():
            found, traffic = run_windows([WINDOW], Setup(mesh, "auto", mixed=mixed, memory_bytes=budget))
            _, expected = run_windows([WINDOW], end)
            assert traffic == expected, (mesh, mixed, budget)
            assert worst_error(found[0], none[0]) < (1e-2 if mixed else 1e-5)


@pytest.mark.slow
def test_ends_send_what_all_reduce_and_grad_sync_send(rank_pool: Any) -> None:
    rank_pool.run(ends)


# In between


def between(mesh: str, mixed: bool, share: float) -> tuple[list[str], list[int], int]:
    """Returns the plans, the bytes held after each micro-step, and the budget with what all_reduce holds."""
    mesh_of.cache_clear()
    none, _ = run_windows([WINDOW] * 2, Setup(mesh, "none", mixed=mixed))
    budget = share * all_of_it(mesh, mixed)
    setup = Setup(mesh, "auto", mixed=mixed, memory_bytes=budget)
    net = shard(build(), setup)
    sync = sync_of(net, setup)
    plans, held = sync.plan(), []
    base = spent(plans_of(replace(setup, memory_bytes=0.0)))
    for window in range(2):
        for index, use in enumerate(WINDOW):
            with sync.micro_step(boundary=index == len(WINDOW) - 1):
                micro_step(net, window * len(WINDOW) + index, use, len(WINDOW))
            held.append(sum(tensor.nbytes for tensor in we_hold(sync)) + gathered_bytes(net))
        assert worst_error(gradients(net), none[window]) < (1e-2 if mixed else 1e-5)
        net.zero_grad()
    assert spent(plans) <= base + budget
    return list(map(str, plans)), held, math.floor(base + budget)


def gathered_bytes(net: nn.Module) -> int:
    params = [param for group in fsdp_groups(net) for param in group.fsdp_params]
    return sum(param._unsharded_param.untyped_storage().nbytes() for param in params if group_is_sharded(param))


def group_is_sharded(param: Any) -> bool:
    """Whether a gathered copy is more than the parameter itself."""
    return hasattr(param, "_unsharded_param") and param.mesh_info.mesh.size(-1) > 1


@pytest.mark.slow
@given(st.sampled_from(["fsdp", "hsdp"]), st.booleans(), st.floats(0, 1))
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_budget_is_kept_and_exact(rank_pool: Any, mesh: str, mixed: bool, share: float) -> None:
    results = rank_pool.run(between, mesh, mixed, share)
    assert all(plans == results[0][0] for plans, _, _ in results), "the ranks have to agree"
    for _, held, limit in results:
        assert max(held) <= limit


def test_a_budget_for_some_is_kept_and_exact(rank_pool: Any) -> None:
    for plans, held, limit in rank_pool.run(between, "fsdp", True, 0.7):
        assert limit / 3 < max(held) <= limit
        assert len(plans) > 1


# What comes first


def order() -> None:
    mesh_of.cache_clear()
    layers = [nn.Linear(8, 8, bias=False), nn.Linear(64, 64, bias=False)]
    for layer in layers:
        fully_shard(layer, mesh=mesh_of("fsdp"))
    in_host = fully_shard(nn.Linear(8, 8, bias=False), mesh=mesh_of("hsdp"))
    model = nn.ModuleDict({"small": layers[0], "large": layers[1], "inside": in_host})

    def affordable(budget: int, *frozen: str) -> set[str]:
        for name, param in model.named_parameters():
            param.requires_grad_(name.split(".")[0] not in frozen)
        with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="2"):
            plans = GradSync(model, "auto", memory_bytes=budget).plan()
        return {
            f"{what} {name}"
            for plan in plans
            for what, is_put_off in (("scatter", "reduce_scatter" in str(plan.waits)), ("gather", plan.gathered_once))
            if is_put_off
            for name in plan.where.rpartition(": ")[2].split(", ")
        }

    one_small, one_large = 8 * 8 * 4, 64 * 64 * 4
    small, large = {"gather small", "scatter small"}, {"gather large", "scatter large"}
    inside = {"gather inside", "scatter inside"}
    assert affordable(0) == set()
    # Two gathers saved are worth more than one reduce-scatter of as many bytes.
    assert affordable(one_small) == {"gather small"}
    assert affordable(2 * one_small) == small
    # The shards of "inside" share a host: its links are not the slow ones.
    assert affordable(2 * one_small + one_large) == small | {"gather large"}
    assert affordable(2 * one_small + 2 * one_large) == small | large
    # What is too large is passed over, not waited for.
    assert small < affordable(3 * one_small) < small | inside
    assert affordable(10**9, "small") == {"gather small"} | large | inside


def test_slow_links_and_small_groups_come_first(rank_pool: Any) -> None:
    rank_pool.run(order)


def told() -> None:
    mesh_of.cache_clear()
    vain = plans_of(Setup("fsdp", "auto"))
    assert all("raise fsdp_accum_memory_gib" in plan.no_effect for plan in vain)
    some = plans_of(Setup("fsdp", "auto", memory_bytes=0.7 * all_of_it("fsdp", mixed=False)))
    assert len(some) > 1
    named = [name for plan in some for name in plan.where.rpartition(": ")[2].split(", ")]
    assert sorted(named) == ["head", "the root", "trunk"]
    assert all(name in str(plan) for plan in some for name in plan.waits)


def test_plan_names_the_modules_of_each_choice(rank_pool: Any) -> None:
    rank_pool.run(told)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({"memory_bytes": -1.0}, "is no budget"),
        ({"memory_bytes": math.nan}, "is no budget"),
        ({"memory_bytes": 2.0**31}, "fsdp_accum_memory_gib=2 has no effect with fsdp_accum_mode='all_reduce'"),
        ({"mode": AccumMode.AUTO, "reshard": False}, "fsdp_accum_reshard=False has no effect"),
    ],
)
def test_budgets_that_mean_nothing(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Settings(**arguments)
