# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""DDP: one all-reduce a bucket and window, exact, or an error before the optimizer could step."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cosmos_framework.utils import distributed
from cosmos_framework.utils.collectives import CollectiveCounter
from cosmos_framework.utils.grad_sync import GradSync, HeldBackGradientError
from tests.utils.grad_sync.windows import DIM, batch, build, gradients, micro_step, reference, worst_error

ALL_USED = [["abh", "abh", "abh"], ["abh"], ["abh", "abh"]]
UNUSED = {
    "head unused at the boundary": [["abh", "ab"], ["abh", "abh", "ab"]],
    "head never used": [["ab", "ab"], ["ab", "ab"]],
    "a then b": [["ah", "bh"], ["bh", "ah"], ["b", "b"]],
    "first used at the boundary": [["a", "abh"], ["a", "bh"]],
    "windows of one": [["abh"], ["a"], ["bh", "a"], ["h"]],
}
CLOSE = 1e-5
RANKS = 2


def wrap(kind: type[DistributedDataParallel] = DistributedDataParallel, **options: Any) -> DistributedDataParallel:
    return kind(build(), **options)


def run(ddp: Any, sync: GradSync, windows: list[list[str]]) -> list[dict[str, Tensor | None]]:
    """Each window's gradients, of the micro-steps that `reference` runs."""
    seen, index = [], 0
    for window in windows:
        for step, use in enumerate(window):
            boundary = step == len(window) - 1
            with sync.micro_step(boundary):
                micro_step(ddp, index, use, len(window))
            assert bool(sync.held_back()) <= (not boundary)
            index += 1
        seen.append(gradients(ddp.module))
        ddp.zero_grad()
    return seen


@functools.cache
def expected_by_key(key: tuple[tuple[str, ...], ...]) -> list[dict[str, Tensor | None]]:
    return reference([list(window) for window in key], RANKS)


def expected_of(windows: list[list[str]]) -> list[dict[str, Tensor | None]]:
    return expected_by_key(tuple(map(tuple, windows)))


def error(ddp: nn.Module, windows: list[list[str]], mode: str = "all_reduce") -> float:
    return max(map(worst_error, run(ddp, GradSync(ddp, mode), windows), expected_of(windows)))


# Collectives


def all_reduces(**options: Any) -> list[int]:
    """The all-reduces of each micro-step of three windows of three."""
    ddp, found = wrap(**options), []
    sync = GradSync(ddp)
    for index in range(9):
        with CollectiveCounter() as counter, sync.micro_step(boundary=index % 3 == 2):
            micro_step(ddp, index, "abh", 3)
        found.append(counter.calls("all_reduce", "world"))
    return found


def counts() -> None:
    small = {"bucket_cap_mb": 0.0005}  # a bucket a parameter or two, from the second reduction on
    assert all_reduces() == [0, 0, 1] * 3
    assert all_reduces(**small) == [0, 0, 1, 0, 0, 4, 0, 0, 4]
    # The very first backward of a static graph synchronises as well, with a map of the parameters used beside it.
    assert all_reduces(static_graph=True) == [2, 0, 1, 0, 0, 1, 0, 0, 1]
    assert all_reduces(static_graph=True, **small) == [2, 0, 1, 0, 0, 4, 0, 0, 4]
    # With parameters that may be unused, DDP sends such a map at each boundary.
    assert all_reduces(find_unused_parameters=True) == [0, 0, 2] * 3


def test_all_reduces_of_three_windows(rank_pool: Any) -> None:
    rank_pool.run(counts, world_size=RANKS)


# Exactness


def kinds_of_wrapper() -> None:
    kinds = (DistributedDataParallel, distributed.DistributedDataParallel)
    for kind, static, view, mode in itertools.product(kinds, [True, False], [True, False], ["all_reduce", "grad_sync"]):
        ddp = wrap(kind, static_graph=static, gradient_as_bucket_view=view)
        assert error(ddp, ALL_USED, mode) < CLOSE, (kind, static, view, mode)


def test_every_wrapper_and_setting_is_exact(rank_pool: Any) -> None:
    rank_pool.run(kinds_of_wrapper, world_size=RANKS)


def unused_parameters() -> None:
    for (name, windows), view in itertools.product(UNUSED.items(), [True, False]):
        ddp = wrap(find_unused_parameters=True, gradient_as_bucket_view=view)
        none = wrap(find_unused_parameters=True, gradient_as_bucket_view=view)
        expected = run(none, GradSync(none, "none"), windows)
        found = run(ddp, GradSync(ddp), windows)
        assert max(map(worst_error, found, expected)) < CLOSE, (name, view)
        assert max(map(worst_error, found, expected_of(windows))) < CLOSE, (name, view)


def test_find_unused_parameters_is_exact(rank_pool: Any) -> None:
    rank_pool.run(unused_parameters, world_size=RANKS)


class Checkpointed(nn.Module):
    """One layer checkpointed and, once more, not; another that is never used."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.unused = (nn.Linear(DIM, DIM) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, use: str) -> Tensor:
        x = checkpoint(self.shared, self.first(x), use_reentrant=self.use_reentrant)
        return self.shared(torch.tanh(x))


def static_graphs(use_reentrant: bool) -> None:
    ddp = DistributedDataParallel(Checkpointed(use_reentrant), static_graph=True)
    truth = Checkpointed(use_reentrant).double()
    sync, reductions = GradSync(ddp), []
    for index in range(8):
        with CollectiveCounter() as counter, sync.micro_step(boundary=index % 2 == 1):
            micro_step(ddp, index, "", 2)
        reductions.append(counter.calls("all_reduce", "world"))
        for rank in range(RANKS):
            (truth(batch(index, rank).double(), "").pow(2).mean() / 2 / RANKS).backward()
        if index % 2:
            assert worst_error(gradients(ddp.module), gradients(truth)) < CLOSE, index
            ddp.zero_grad(), truth.zero_grad()
    # Four windows: one reduction each, that of the very first backward, and its map of the parameters used.
    assert reductions == [2, 1, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_static_graph_with_checkpointing_shared_and_unused_parameters(rank_pool: Any, use_reentrant: bool) -> None:
    rank_pool.run(static_graphs, use_reentrant, world_size=RANKS)


def compiled() -> None:
    torch._dynamo.reset()
    models: list[tuple[Any, Any]] = [
        (ddp := DistributedDataParallel(torch.compile(build(), backend="eager")), ddp),
        (torch.compile(ddp := wrap(), backend="eager"), ddp),
    ]
    for model, ddp in models:
        sync, reductions = GradSync(model), []
        for index in range(6):
            with CollectiveCounter() as counter, sync.micro_step(boundary=index % 3 == 2):
                micro_step(model, index, "abh", 3)
            reductions.append(counter.calls("all_reduce", "world"))
            if index % 3 == 2:
                found = {name.removeprefix("_orig_mod."): grad for name, grad in gradients(ddp.module).items()}
                assert worst_error(found, expected_of([["abh"] * 3] * 2)[index // 3]) < CLOSE
                model.zero_grad()
        assert reductions == [0, 0, 1] * 2


@pytest.mark.slow
def test_compiled_inside_and_outside_of_ddp(rank_pool: Any) -> None:
    rank_pool.run(compiled, world_size=RANKS)


def counting_hook(calls, bucket):  # type: ignore[no-untyped-def]  # torch wants annotations that are no strings
    calls.append(bucket.index())
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None is the world


class TwoInputs(nn.Module):
    """A plain root that trains a DDP model and another one."""

    def __init__(self, student: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.student, self.critic = student, critic


def ways_of_use() -> None:
    calls: list[int] = []
    ddp = wrap()
    ddp.register_comm_hook(calls, counting_hook)
    assert error(ddp, ALL_USED) < CLOSE
    assert len(calls) == len(ALL_USED)

    net = build()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["b.weight"])
    ddp = DistributedDataParallel(net)
    (found,) = run(ddp, GradSync(ddp), [["abh"] * 2])
    own = own_gradient_of_b()
    assert worst_error({"b": found.pop("b.weight")}, {"b": own}) < CLOSE
    expected = expected_of([["abh"] * 2])[0]
    assert worst_error(found, {name: expected[name] for name in found}) < CLOSE

    both = TwoInputs(wrap(), wrap(static_graph=True))
    sync = GradSync(both)
    for index in range(3):
        with sync.micro_step(boundary=index == 2):
            micro_step(both.student, index, "abh", 3)
            micro_step(both.critic, index, "abh", 3)
        names = {name.split(".")[0] for name in sync.held_back()}
        # The critic's first backward has synchronised, to record the graph.
        assert names == [{"student"}, {"student", "critic"}, set()][index]
    part: Any
    for part in (both.student, both.critic):
        assert worst_error(gradients(part.module), expected_of([["abh"] * 3])[0]) < CLOSE


def own_gradient_of_b() -> Tensor | None:
    net = build()
    for index in range(2):
        micro_step(net, index, "abh", 2)
    return net.b.weight.grad


def test_comm_hooks_ignored_parameters_and_nesting(rank_pool: Any) -> None:
    rank_pool.run(ways_of_use, world_size=RANKS)


# Errors


def refusals() -> None:
    before_use = {"first window": [], "later window": [["abh", "abh"]]}
    for (name, windows), view in itertools.product(before_use.items(), [True, False]):
        ddp = wrap(gradient_as_bucket_view=view)
        sync = GradSync(ddp)
        run(ddp, sync, windows)
        with sync.micro_step(boundary=False):
            micro_step(ddp, 0, "abh", 2)
        with pytest.raises(HeldBackGradientError) as caught, sync.micro_step(boundary=True):
            micro_step(ddp, 1, "ab", 2)
        assert "head.weight, head.bias" in str(caught.value), name
        assert "find_unused_parameters=True" in str(caught.value)
        assert all(param.grad is None for param in ddp.parameters())
        assert not sync.held_back()
        assert max(map(worst_error, run(ddp, sync, ALL_USED), expected_of(ALL_USED))) < CLOSE, name


def test_parameter_unused_at_the_boundary_is_refused(rank_pool: Any) -> None:
    """Mode "none" would have reduced it in an earlier micro-step; DDP alone tells in the next forward."""
    rank_pool.run(refusals, world_size=RANKS)


def misplaced_forward_and_backward() -> None:
    each: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    for options in each:
        ddp = wrap(**options)
        sync = GradSync(ddp)
        run(ddp, sync, ALL_USED)
        with sync.micro_step(boundary=False):
            micro_step(ddp, 0, "abh", 2)
        with pytest.raises(HeldBackGradientError, match="a.weight.*inside the block"), sync.micro_step(boundary=True):
            pass
        run(ddp, sync, ALL_USED)
        with sync.micro_step(boundary=False):
            loss = ddp(batch(0, dist.get_rank()), "abh").pow(2).mean()
            loss.backward()
            loss = ddp(batch(1, dist.get_rank()), "abh").pow(2).mean()
        with pytest.raises(HeldBackGradientError, match="inside the block"), sync.micro_step(boundary=True):
            loss.backward()
        # Forward outside, where DDP synchronises, and no gradient in the boundary after validation in it: both right.
        for index in range(2):
            loss = ddp(batch(index, dist.get_rank()), "abh").pow(2).mean() / 2
            with sync.micro_step(boundary=index == 1):
                loss.backward()
                with torch.no_grad():
                    ddp(batch(9, dist.get_rank()), "abh")
        assert worst_error(gradients(ddp.module), expected_of([["abh"] * 2])[0]) < CLOSE, options


def test_boundary_without_its_own_forward_and_backward_is_refused(rank_pool: Any) -> None:
    rank_pool.run(misplaced_forward_and_backward, world_size=RANKS)


# Nothing left over


class Boom(Exception):
    pass


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise Boom("in backward")


def failing_hook(where: str) -> Any:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if where == "forward":
            raise Boom("in forward")
        return FailInBackward.apply(out)

    return hook


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
]


def exceptions() -> None:
    """Fails between the head, whose buckets are reduced by then, and the trunk."""
    after = [["abh", "abh"], ["abh"], ["abh", "abh"]]
    for options, where, healthy in itertools.product(OPTIONS, ["forward", "backward"], [0, 1, 2]):
        for trained_before, mode in [(False, "all_reduce"), (True, "all_reduce"), *[(False, "none")] * (healthy == 2)]:
            ddp = wrap(bucket_cap_mb=0.0005, **options)
            calls: list[int] = []
            ddp.register_comm_hook(calls, counting_hook)
            sync = GradSync(ddp, mode)
            if trained_before:
                run(ddp, sync, [["abh", "abh"]])
            for index in range(healthy):
                with sync.micro_step(boundary=False):
                    micro_step(ddp, 50 + index, "abh", 3)
            hook = ddp.module.trunk.register_forward_hook(failing_hook(where))
            with pytest.raises(Boom, match=f"in {where}"), sync.micro_step(boundary=healthy == 2):
                micro_step(ddp, 60, "abh", 3)
            hook.remove()
            case = (options, where, healthy, trained_before, mode)
            assert all(param.grad is None for param in ddp.parameters()), case
            assert ddp.require_backward_grad_sync and not sync.held_back()
            calls.clear()
            assert max(map(worst_error, run(ddp, sync, after), expected_of(after))) < CLOSE, case
            assert calls, case


@pytest.mark.slow
def test_model_trains_on_after_an_exception(rank_pool: Any) -> None:
    rank_pool.run(exceptions, world_size=RANKS)


def discards() -> None:
    windows = [["abh", "abh"], ["abh"]]
    for options in OPTIONS:
        ddp = wrap(**options)
        sync = GradSync(ddp)
        for uses in (["abh"], ["abh", "abh"]):
            for index, use in enumerate(uses):
                with sync.micro_step(boundary=False):
                    micro_step(ddp, 70 + index, use, 3)
            sync.discard()
            assert not sync.held_back()
            assert all(param.grad is None for param in ddp.parameters())
            assert max(map(worst_error, run(ddp, sync, windows), expected_of(windows))) < CLOSE, options
    ddp = wrap(find_unused_parameters=True)
    sync = GradSync(ddp)
    for use in ("abh", "abh"):
        with sync.micro_step(boundary=False):
            micro_step(ddp, 80, use, 3)
    sync.discard()
    unused = [["ab", "ab"], ["a", "bh"]]
    assert max(map(worst_error, run(ddp, sync, unused), expected_of(unused))) < CLOSE


def test_discarded_window_reaches_no_later_one(rank_pool: Any) -> None:
    rank_pool.run(discards, world_size=RANKS)


def set_by_hand() -> None:
    ddp = wrap()
    ddp.require_backward_grad_sync = False
    for mode, boundary in itertools.product(["all_reduce", "none"], [False, True]):
        sync = GradSync(ddp, mode)
        with sync.micro_step(boundary):
            assert not ddp.require_backward_grad_sync
            micro_step(ddp, 0, "abh", 1)
        assert ddp.require_backward_grad_sync is False
        ddp.zero_grad()
    ddp.require_backward_grad_sync = True
    with sync.micro_step(boundary=False), sync.micro_step(boundary=True):
        assert ddp.require_backward_grad_sync
    assert ddp.require_backward_grad_sync is True
    assert ddp.require_forward_param_sync in (True, False) and isinstance(ddp.require_forward_param_sync, bool)
    assert not ddp._forward_hooks and not ddp._forward_pre_hooks
    assert not any(getattr(param, "_post_accumulate_grad_hooks", None) for param in ddp.parameters())


def test_flag_set_by_hand_is_restored(rank_pool: Any) -> None:
    rank_pool.run(set_by_hand, world_size=RANKS)
