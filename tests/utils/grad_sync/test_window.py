# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever ends a window, nothing of it is left: no gradient, no flag, no hook, no memory, no model."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from cosmos_framework.utils.distributed import ddp_sync_grad, grad_sync_of
from cosmos_framework.utils.grad_sync import GradSync
from tests.utils.grad_sync.windows import (
    Setup,
    build,
    gradients,
    mesh_of,
    micro_step,
    run_windows,
    shard,
    whole,
    worst_error,
)

WINDOW = ["abh", "ah", "bh"]
SETUPS = [Setup("hsdp", *each) for each in itertools.product(["none", "all_reduce", "grad_sync"], [True, False])]
DEFERRING = [setup for setup in SETUPS if setup.mode != "none"]


def sharded(setup: Setup) -> tuple[nn.Module, GradSync]:
    net = shard(build(), setup)
    return net, GradSync(net, setup.mode, setup.reshard)


def run_open(net: nn.Module, sync: GradSync, uses: list[str], start: int = 50) -> None:
    """Runs micro-steps of a window and leaves it open."""
    for index, use in enumerate(uses, start):
        with sync.micro_step(boundary=False):
            micro_step(net, index, use, 3)


def run_window(net: nn.Module, sync: GradSync, uses: list[str] = WINDOW) -> dict[str, Tensor | None]:
    for index, use in enumerate(uses):
        with sync.micro_step(boundary=index == len(uses) - 1):
            micro_step(net, index, use, len(uses))
    return gradients(net)


@functools.cache
def wanted(mesh: str = "hsdp") -> dict[str, Tensor | None]:
    """The gradients of WINDOW on a fresh model in mode "none"."""
    (grads,), _ = run_windows([WINDOW], Setup(mesh, "none"))
    return grads


def start() -> None:
    mesh_of.cache_clear()
    wanted.cache_clear()
    wanted()


def fsdp_groups(net: nn.Module) -> list[Any]:
    states = {id(s): s for m in net.modules() if isinstance(m, FSDPModule) and (s := m._get_fsdp_state())}
    lists = [getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group] for s in states.values()]
    return [group for groups in lists for group in groups if group is not None]


def torch_holds(net: nn.Module) -> list[Tensor]:
    """Every gradient that torch keeps inside FSDP2, out of `parameters()`'s sight."""
    found = [group._partial_reduce_output for group in fsdp_groups(net)]
    for param in (param for group in fsdp_groups(net) for param in group.fsdp_params):
        found += [param.unsharded_accumulated_grad, getattr(getattr(param, "_unsharded_param", None), "grad", None)]
    return [tensor for tensor in found if tensor is not None]


def we_hold(sync: GradSync) -> list[Tensor]:
    held = list(sync._window.held.values())
    return [grad for each in held for grad in each.unsharded.values()] + [
        each.partial for each in held if each.partial is not None
    ]


def assert_nothing_left(net: nn.Module, sync: GradSync) -> None:
    assert not torch_holds(net)
    assert not we_hold(sync)
    assert not sync.held_back()
    assert all(param.grad is None for param in net.parameters())
    for group in fsdp_groups(net):
        assert group.is_sharded
        assert all(param.sharded_param.grad is None for param in group.fsdp_params)


def flags(net: nn.Module) -> list[tuple[Any, ...]]:
    names = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "post_forward_mesh_info")
    return [
        (*(getattr(group, name) for name in names), type(group).post_backward, type(group).reshard, len(vars(group)))
        for group in fsdp_groups(net)
    ]


# Giving up


def discard_everywhere() -> None:
    start()
    for setup in SETUPS:
        net, sync = sharded(setup)
        for uses in (["abh"], ["h", "abh", "", "a"]):
            run_open(net, sync, uses)
            sync.discard()
            assert_nothing_left(net, sync)
            assert worst_error(run_window(net, sync), wanted()) < 1e-5, (setup, uses)
            sync.discard()  # no window is open: the gradients stay
            assert net.trunk.weight.grad is not None  # type: ignore[union-attr]
            net.zero_grad()
        with sync.micro_step(boundary=False):
            micro_step(net, 60, "abh", 3)
            sync.discard()
            assert_nothing_left(net, sync)
            micro_step(net, 0, "abh", 3)
        for index, use in enumerate(WINDOW[1:], 1):
            with sync.micro_step(boundary=index == 2):
                micro_step(net, index, use, 3)
        assert worst_error(gradients(net), wanted()) < 1e-5, setup


@pytest.mark.slow
def test_discarded_window_reaches_no_later_one(rank_pool: Any) -> None:
    rank_pool.run(discard_everywhere)


class Boom(Exception):
    pass


class InBackward(torch.autograd.Function):
    """Runs a function when the backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], None]) -> Tensor:  # type: ignore[override]
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.act()
        return grad, None


def at(where: str, net: nn.Module, act: Callable[[], None]) -> Any:
    """Runs a function between the trunk and the head: in forward, or in backward when the head's is over."""

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if where == "backward":
            return InBackward.apply(out, act)
        act()
        return out

    return net.trunk.register_forward_hook(hook)  # type: ignore[union-attr]


def fail(error: BaseException) -> None:
    raise error


def exceptions_everywhere(setups: list[Setup]) -> None:
    start()
    for setup in setups:
        net, sync = sharded(setup)
        for where, healthy in itertools.product(["forward", "backward"], [0, 1, 2]):
            before = flags(net)
            run_open(net, sync, ["abh", "ah"][:healthy])
            error: BaseException = KeyboardInterrupt() if healthy == 1 else Boom("original")
            hook = at(where, net, functools.partial(fail, error))
            with pytest.raises(type(error)) as caught, sync.micro_step(boundary=healthy == 2):
                micro_step(net, 70, "abh", 3)
            assert caught.value is error
            hook.remove()
            assert_nothing_left(net, sync)
            if healthy:
                assert flags(net) == before
            assert worst_error(run_window(net, sync), wanted(setup.mesh)) < 1e-5, (setup, where, healthy)
            net.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_exception_leaves_nothing_and_the_next_window_is_exact(rank_pool: Any, reshard_after_forward: bool) -> None:
    setups = [Setup(s.mesh, s.mode, s.reshard, reshard_after_forward=reshard_after_forward) for s in SETUPS]
    rank_pool.run(exceptions_everywhere, setups)


@pytest.mark.slow
def test_exception_where_blocks_reshard_to_two_ranks(rank_pool: Any) -> None:
    setups = [
        Setup("fsdp", mode, reshard, reshard_after_forward=2)
        for mode, reshard in [("none", True), ("grad_sync", True), ("grad_sync", False)]
    ]
    rank_pool.run(exceptions_everywhere, setups)


def generators_everywhere() -> None:
    start()

    def losses(net: nn.Module, sync: GradSync) -> Iterator[None]:
        for index in range(3):
            with sync.micro_step(boundary=index == 2):
                micro_step(net, 80 + index, "abh", 3)
                yield

    for setup in SETUPS:
        for taken in (1, 2, 3):
            net, sync = sharded(setup)
            before = flags(net)
            generator = losses(net, sync)
            for _ in range(taken):
                next(generator)
            generator.close()  # type: ignore[attr-defined]
            assert_nothing_left(net, sync)
            assert [each[-3:-1] for each in flags(net)] == [each[-3:-1] for each in before], "torch's methods are back"
            assert worst_error(run_window(net, sync), wanted()) < 1e-5, (setup, taken)


@pytest.mark.slow
def test_generator_that_stops_inside_a_block(rank_pool: Any) -> None:
    rank_pool.run(generators_everywhere)


def abandoned_everywhere() -> None:
    start()
    for old, new in itertools.product(DEFERRING, SETUPS[::2]):
        net, sync = sharded(old)
        run_open(net, sync, ["abh", "h"])
        for param in net.parameters():
            param.grad = None
        sync = GradSync(net, new.mode, new.reshard)
        assert not sync.held_back()
        assert worst_error(run_window(net, sync), wanted()) < 1e-5, (old, new)


@pytest.mark.slow
def test_new_grad_sync_inherits_nothing(rank_pool: Any) -> None:
    rank_pool.run(abandoned_everywhere)


def boundary_that_runs_nothing(setup: Setup, forward: bool) -> dict[str, Tensor | None]:
    net, sync = sharded(setup)
    run_open(net, sync, ["abh", "ah"])
    with sync.micro_step(boundary=True):
        if forward:
            net(torch.ones(4, 12), "abh")
    assert not sync.held_back()
    seen = gradients(net)
    net.zero_grad()
    assert worst_error(run_window(net, sync), wanted()) < 1e-5, setup
    return seen


def boundaries_that_run_nothing() -> None:
    start()
    for forward in (False, True):
        none = boundary_that_runs_nothing(SETUPS[0], forward)
        assert none["b.weight"] is not None
        for setup in SETUPS:
            assert worst_error(boundary_that_runs_nothing(setup, forward), none) < 1e-5, (setup, forward)


@pytest.mark.slow
def test_boundary_without_a_backward_ends_the_window(rank_pool: Any) -> None:
    rank_pool.run(boundaries_that_run_nothing)


# Restoring


def nested_in_itself(setup: Setup) -> dict[str, Tensor | None]:
    net, sync = sharded(setup)
    with sync.micro_step(boundary=False):
        micro_step(net, 0, "abh", 1)
        with sync.micro_step(boundary=True):
            micro_step(net, 1, "ah", 1)
        assert not sync.held_back()
        micro_step(net, 2, "bh", 1)
    assert bool(sync.held_back()) == (setup.mode != "none")
    with sync.micro_step(boundary=True):
        micro_step(net, 3, "ab", 1)
        with sync.micro_step(boundary=False):
            micro_step(net, 4, "abh", 1)
        micro_step(net, 5, "b", 1)
    assert not sync.held_back()
    return gradients(net)


def nested_in_another(outer: Setup, inner: Setup) -> dict[str, Tensor | None]:
    net, sync = sharded(outer)
    other = GradSync(net, inner.mode, inner.reshard)
    with sync.micro_step(boundary=False):
        micro_step(net, 0, "abh", 1)
        with other.micro_step(boundary=True):
            micro_step(net, 1, "ah", 1)
        assert net.a.weight.grad is not None, "the inner block is a boundary"  # type: ignore[union-attr]
        with other.micro_step(boundary=False):
            micro_step(net, 2, "bh", 1)
    assert bool(sync.held_back()) == (outer.mode != "none")
    assert bool(other.held_back()) == (inner.mode != "none")
    with sync.micro_step(boundary=True):
        micro_step(net, 3, "ab", 1)
    assert not sync.held_back()
    with other.micro_step(boundary=True):
        micro_step(net, 4, "abh", 1)
        micro_step(net, 5, "b", 1)
    assert not other.held_back()
    return gradients(net)


def nested_everywhere() -> None:
    start()
    none = nested_in_itself(SETUPS[0])
    for setup in SETUPS:
        assert worst_error(nested_in_itself(setup), none) < 1e-5, setup
    for outer, inner in itertools.product(SETUPS, SETUPS):
        assert worst_error(nested_in_another(outer, inner), none) < 1e-5, (outer, inner)


@pytest.mark.slow
def test_inner_block_wins_and_the_outer_one_resumes(rank_pool: Any) -> None:
    rank_pool.run(nested_everywhere)


def nested_in_other_settings(outer: Setup, outer_ends: bool, inner: Setup, inner_ends: bool) -> dict[str, Any]:
    net = shard(build(), outer)
    with ddp_sync_grad(net, False, outer.mode, outer.reshard):
        micro_step(net, 0, "abh", 1)
    with ddp_sync_grad(net, outer_ends, outer.mode, outer.reshard):
        micro_step(net, 1, "ah", 1)
        with ddp_sync_grad(net, inner_ends, inner.mode, inner.reshard):
            micro_step(net, 2, "abh", 1)
        micro_step(net, 3, "b", 1)
    if not outer_ends:
        with ddp_sync_grad(net, True, outer.mode, outer.reshard):
            micro_step(net, 4, "a", 1)
    assert grad_sync_of(net).held_back() == {}  # type: ignore[union-attr]
    return gradients(net)


def nested_in_other_settings_everywhere() -> None:
    start()
    for outer_ends in (True, False):
        none = nested_in_other_settings(SETUPS[0], outer_ends, SETUPS[0], True)
        for outer, inner in itertools.permutations(SETUPS[::2] + SETUPS[3:4], 2):
            for inner_ends in (True, False):
                found = nested_in_other_settings(outer, outer_ends, inner, inner_ends)
                assert worst_error(found, none) < 1e-5, (outer, outer_ends, inner, inner_ends)


@pytest.mark.slow
def test_inner_block_with_other_settings(rank_pool: Any) -> None:
    rank_pool.run(nested_in_other_settings_everywhere)


def set_by_hand(setup: Setup) -> nn.Module:
    """A model whose root decides by itself whether to reshard, and whose user has set the rest."""
    net = build()
    fully_shard(net.trunk, mesh=mesh_of(setup.mesh), reshard_after_forward=2)
    fully_shard(net.head, mesh=mesh_of(setup.mesh))
    fully_shard(net, mesh=mesh_of(setup.mesh))
    net.trunk.set_reshard_after_backward(False)  # type: ignore[operator, union-attr]
    net.head.set_reshard_after_forward(False)  # type: ignore[operator, union-attr]
    net.head.set_requires_all_reduce(False)  # type: ignore[operator, union-attr]
    return net


def restored_everywhere() -> None:
    start()
    untouched = set_by_hand(SETUPS[0])
    never_run = flags(untouched)
    micro_step(untouched, 0, "abh", 1)
    once_run = flags(untouched)
    for setup in SETUPS:
        net, seen = set_by_hand(setup), never_run
        sync = GradSync(net, setup.mode, setup.reshard)
        for index, use in enumerate(["abh", "a", "bh", "abh"]):
            with sync.micro_step(boundary=index == 2):
                assert [each[:1] for each in flags(net)] == [each[:1] for each in seen]
                micro_step(net, index, use, 1)
            seen = once_run
            assert flags(net) == seen, (setup, index)


def test_every_flag_is_restored(rank_pool: Any) -> None:
    rank_pool.run(restored_everywhere)


def closed_out_of_order(setup: Setup) -> None:
    nets = [sharded(setup) for _ in range(2)]
    for net, sync in nets:
        run_window(net, sync)
        net.zero_grad()
    before = [flags(net) for net, _ in nets]

    def suspended(index: int) -> Iterator[None]:
        net, sync = nets[index]
        with sync.micro_step(boundary=False):
            micro_step(net, 0, "abh", 3)
            yield

    first, second = suspended(0), suspended(1)
    next(first), next(second)
    first.close()
    assert_nothing_left(*nets[0])
    with nets[1][1].micro_step(boundary=False):
        micro_step(nets[1][0], 1, "abh", 3)
    assert nets[1][1].held_back()
    second.close()
    assert [flags(net) for net, _ in nets] == before, setup
    for net, sync in nets:
        assert_nothing_left(net, sync)
        assert worst_error(run_window(net, sync), wanted()) < 1e-5, setup


def closed_out_of_order_everywhere() -> None:
    start()
    for setup in DEFERRING[::3]:
        closed_out_of_order(setup)


def test_blocks_close_in_any_order(rank_pool: Any) -> None:
    rank_pool.run(closed_out_of_order_everywhere)


def all_reduce_by_hand(setup: Setup) -> list[dict[str, Tensor | None]]:
    net, sync = sharded(setup)
    net.head.set_requires_all_reduce(False)  # type: ignore[operator, union-attr]
    seen = [run_window(net, sync)]
    assert seen[0]["head.weight"] is None
    net.head.set_requires_all_reduce(True)  # type: ignore[operator, union-attr]
    # torch keeps what it holds of the head for the next backward, here a window of one.
    seen.append(run_window(net, sync, ["abh"]))
    return seen


def all_reduce_by_hand_everywhere() -> None:
    start()
    none = all_reduce_by_hand(SETUPS[0])
    for setup in SETUPS:
        assert max(map(worst_error, all_reduce_by_hand(setup), none)) < 1e-5, setup


@pytest.mark.slow
def test_all_reduce_switched_off_by_hand_stays_torchs_business(rank_pool: Any) -> None:
    rank_pool.run(all_reduce_by_hand_everywhere)


# The model


def states_everywhere() -> None:
    start()
    for setup in SETUPS:
        net, sync = sharded(setup)
        before = {name: whole(value).clone() for name, value in net.state_dict().items()}
        for index, use in enumerate(WINDOW):
            with sync.micro_step(boundary=index == 2):
                micro_step(net, index, use, 3)
            state = net.state_dict()
            assert list(state) == list(before)
            for each in (state, copy.deepcopy(state), saved_and_loaded(state)):
                assert all(torch.equal(whole(each[name]), value) for name, value in before.items())
        assert worst_error(gradients(net), wanted()) < 1e-5, setup


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.slow
def test_state_dict_in_mid_window(rank_pool: Any) -> None:
    rank_pool.run(states_everywhere)


def garbage_everywhere() -> None:
    start()
    for setup, windows in itertools.product(SETUPS[1:], ([False], [False, True, False])):
        net = shard(build(), setup)
        refs = [weakref.ref(net), weakref.ref(net.head), *map(weakref.ref, fsdp_groups(net))]
        for index, boundary in enumerate(windows):
            with ddp_sync_grad(net, boundary, setup.mode, setup.reshard):
                micro_step(net, index, "abh", 1)
        sync: Any = grad_sync_of(net)
        del net
        gc.collect()
        assert not [ref for ref in refs if ref() is not None], (setup, windows)
        assert not sync.held_back()
        sync.discard()


def ddp_in_mid_window() -> None:
    def step(ddp: nn.Module, index: int, boundary: bool) -> None:
        with ddp_sync_grad(ddp, boundary):
            micro_step(ddp, index, "abh", 1)

    ddp = DistributedDataParallel(build())
    step(ddp, 0, False)
    for each in (copy.deepcopy(ddp.module), pickle.loads(pickle.dumps(ddp.module))):
        assert list(each.state_dict()) == list(build().state_dict())
        assert not any(vars(param).get("_post_accumulate_grad_hooks") for param in each.parameters())
    sync = grad_sync_of(ddp)
    assert sync is not None
    assert sync is grad_sync_of(ddp.module)
    assert sum(sync.held_back().values()) == sum(p.numel() * 4 for p in ddp.parameters() if p.requires_grad)
    sync.discard()
    assert not sync.held_back()
    assert all(param.grad is None for param in ddp.parameters())
    step(ddp, 1, False)
    step(ddp, 2, True)
    fresh = DistributedDataParallel(build())
    micro_step(fresh, 1, "abh", 1)
    micro_step(fresh, 2, "abh", 1)
    assert worst_error(gradients(ddp), gradients(fresh)) < 1e-5
    step(ddp, 3, False)
    refs = [weakref.ref(ddp), weakref.ref(ddp.module)]
    del ddp, sync
    gc.collect()
    assert not [ref for ref in refs if ref() is not None]


def test_ddp_copies_pickles_and_goes_in_mid_window(rank_pool: Any) -> None:
    rank_pool.run(ddp_in_mid_window, world_size=2)


@pytest.mark.slow
def test_model_is_collected_whenever_it_is_dropped(rank_pool: Any) -> None:
    rank_pool.run(garbage_everywhere)


def late_modules_everywhere() -> None:
    start()
    seen = {}
    for setup in SETUPS:
        nets = nn.ModuleList([build(), build()])
        sync = GradSync(nets, setup.mode, setup.reshard)
        for count in (1, 2):
            shard(nets[count - 1], setup)  # type: ignore[arg-type]
            for index, use in enumerate(WINDOW):
                with sync.micro_step(boundary=index == 2):
                    for net in nets[:count]:
                        micro_step(net, index, use, 3)
                if setup.mode != "none" and index < 2:
                    assert any(name.startswith(f"{count - 1}.") for name in sync.held_back())
        seen[setup] = gradients(nets)
    for setup, grads in seen.items():
        assert worst_error(grads, seen[SETUPS[0]]) < 1e-5, setup


@pytest.mark.slow
def test_module_sharded_later_joins_the_next_window(rank_pool: Any) -> None:
    rank_pool.run(late_modules_everywhere)


# Memory


def bytes_everywhere(mesh: str, mixed: bool) -> None:
    start()
    shards = {"hsdp": 2, "replicate": 1}[mesh]
    for mode, reshard in itertools.product(["all_reduce", "grad_sync"], [True, False]):
        setup = Setup(mesh, mode, reshard, mixed)
        net, sync = sharded(setup)
        trained = [param for param in net.parameters() if param.requires_grad]
        size = {"all_reduce": lambda p: -(-p.shape[0] // shards) * p[:1].numel(), "grad_sync": lambda p: p.numel()}
        expected = 4 * sum(map(size[mode], trained))
        unsharded_seen: list[int] = []
        at("backward", net, lambda net=net, seen=unsharded_seen: seen.append(len(torch_holds(net))))  # type: ignore[misc]
        assert [plan.held_bytes for plan in sync.plan()] == [expected]
        for index in range(6):
            boundary = index in (2, 5)
            with sync.micro_step(boundary=boundary):
                micro_step(net, index, "abh", 3)
            assert not torch_holds(net)
            held = sum(tensor.untyped_storage().nbytes() for tensor in we_hold(sync))
            assert held == sum(sync.held_back().values()) == (0 if boundary else expected), (setup, index)
        assert unsharded_seen == [0] * 6, "the head's gradient is still whole when the trunk's backward begins"


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("mesh", ["hsdp", pytest.param("replicate", marks=pytest.mark.slow)])
def test_bytes_held_after_each_micro_step(rank_pool: Any, mesh: str, mixed: bool) -> None:
    """Sharded gradients in all_reduce, whole ones in grad_sync, none after the boundary."""
    rank_pool.run(bytes_everywhere, mesh, mixed)
