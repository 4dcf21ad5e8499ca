# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""torch's own setters, called by hand: they keep their effect, and every mode leaves what "none" leaves with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from cosmos_framework.utils.grad_sync import HeldBackGradientError
from tests.utils.grad_sync.test_window import SETUPS, assert_nothing_left, run_open, run_window, sharded, start, wanted
from tests.utils.grad_sync.windows import Setup, build, gradients, micro_step, run_windows, shard, sync_of, worst_error

WINDOWS = [["abh", "ah", "bh"], ["ah", "b"], ["ab", "ab"]]

# Called before each micro-step with the model and whether it is the window's last.
SETTERS: dict[str, Callable[[Any, bool], object]] = {
    "is_last_backward": lambda net, boundary: net.set_is_last_backward(boundary),
    "gradient_divide_factor": lambda net, boundary: [
        part.set_gradient_divide_factor(2.0) for part in (net, net.trunk, net.head)
    ],
    "reshard_after_forward": lambda net, boundary: net.set_reshard_after_forward(False),
    "reshard_after_backward": lambda net, boundary: net.set_reshard_after_backward(boundary),
    "modules_to_forward_prefetch": lambda net, boundary: net.set_modules_to_forward_prefetch([net.trunk, net.head]),
    "modules_to_backward_prefetch": lambda net, boundary: net.head.set_modules_to_backward_prefetch([net.trunk, net]),
}
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # since torch 2.13
    SETTERS["reduce_scatter_unused_params"] = lambda net, boundary: net.set_reduce_scatter_unused_params(True)


def windows_with(name: str, setup: Setup) -> list[dict[str, Tensor | None]]:
    net = shard(build(), setup)
    sync, seen, index = sync_of(net, setup), [], 0
    for window in WINDOWS:
        for step, use in enumerate(window):
            boundary = step == len(window) - 1
            SETTERS[name](net, boundary)
            with sync.micro_step(boundary):
                micro_step(net, index, use, len(window))
            index += 1
        seen.append(gradients(net))
        net.zero_grad()
    return seen


def every_mode_with(names: list[str]) -> dict[str, list[dict[str, Tensor | None]]]:
    """Compares each mode with "none" under the same setter; returns what "none" leaves, and without any setter."""
    start()
    left = {"": run_windows(WINDOWS, SETUPS[0])[0]}
    for name in names:
        left[name] = windows_with(name, SETUPS[0])
        for setup in SETUPS:
            worst = max(map(worst_error, windows_with(name, setup), left[name]))
            assert worst < 1e-5, (name, setup)
    return left


@pytest.mark.slow
def test_every_mode_leaves_what_none_leaves(rank_pool: Any) -> None:
    for left in rank_pool.run(every_mode_with, list(SETTERS)):
        for found, plain in zip(left["gradient_divide_factor"], left[""], strict=True):
            assert worst_error(found, {name: None if grad is None else 2 * grad for name, grad in plain.items()}) < 1e-5
        assert left[""][2]["head.weight"] is None
        if zeroed := left.get("reduce_scatter_unused_params"):
            assert torch.equal(zeroed[2]["head.weight"], torch.zeros_like(zeroed[0]["head.weight"]))


def switched_off_inside() -> None:
    start()
    for mesh, mode, reshard in itertools.product(["fsdp", "hsdp"], ["all_reduce", "grad_sync"], [True, False]):
        net, sync = sharded(Setup(mesh, mode, reshard))
        net_fsdp: Any = net
        run_open(net, sync, ["abh"])
        if sync.held_back():
            net_fsdp.set_requires_gradient_sync(False)
            with pytest.raises(HeldBackGradientError, match="switched off by hand"), sync.micro_step(boundary=True):
                micro_step(net, 1, "abh", 2)
            net_fsdp.set_requires_gradient_sync(True)
            assert_nothing_left(net, sync)
            assert worst_error(run_window(net, sync), wanted(mesh)) < 1e-5, (mesh, mode, reshard)


@pytest.mark.slow
def test_sync_switched_off_inside_a_window_is_refused(rank_pool: Any) -> None:
    rank_pool.run(switched_off_inside)


def off_all_along() -> None:
    """A loop that has always called torch's setter, with a GradSync around it: torch defers, as it did before."""
    start()
    for setup in SETUPS:
        net, sync = sharded(setup)
        net_fsdp: Any = net
        for index, boundary in enumerate([False, False, True]):
            net_fsdp.set_requires_gradient_sync(boundary)
            with sync.micro_step(boundary):
                micro_step(net, index, "abh", 3)
            assert not sync.held_back()
            assert (net_fsdp.trunk.weight.grad is None) is not boundary
        (expected,), _ = run_windows([["abh"] * 3], SETUPS[0])
        assert worst_error(gradients(net), expected) < 1e-5, setup


@pytest.mark.slow
def test_sync_switched_off_by_hand_stays_torchs_business(rank_pool: Any) -> None:
    rank_pool.run(off_all_along)


def reset_inside() -> None:
    start()
    for setup in SETUPS:
        net, sync = sharded(setup)
        net_fsdp: Any = net
        for _ in range(2):
            run_open(net, sync, ["abh"])
            net_fsdp.reset_iter_state()
            sync.discard()
            assert_nothing_left(net, sync)
        for index, use in enumerate(["abh", "ah", "bh"]):
            net_fsdp.reset_iter_state()
            with sync.micro_step(boundary=index == 2):
                micro_step(net, index, use, 3)
        assert worst_error(gradients(net), wanted()) < 1e-5, setup


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="public since torch 2.13")
def test_reset_iter_state_loses_nothing_and_discard_leaves_nothing(rank_pool: Any) -> None:
    """torch's reset alone drops what its own all_reduce deferral holds, and keeps what its grad_sync holds."""
    rank_pool.run(reset_inside)
