# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients after a boundary equal mode "none", and a float64 process, whatever each micro-step used."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cosmos_framework.utils.collectives import CollectiveCounter
from cosmos_framework.utils.grad_sync import GradSync
from tests.utils.grad_sync.windows import (
    MESHES,
    Setup,
    build,
    gradients,
    mesh_of,
    micro_step,
    reference,
    run_windows,
    worst_error,
)

# The patterns with which torch's own setters lose, mix up or crash on gradients, and more; two windows each.
PATTERNS = {
    "all used": [["abh", "abh", "abh"], ["abh", "abh"]],
    "head unused at the boundary": [["abh", "abh", "ab"], ["abh", "ab"]],
    "head used only in the middle": [["ab", "abh", "ab"], ["ab", "abh"]],
    "a then b": [["ah", "bh"], ["bh", "ah"]],
    "a at first only": [["abh", "bh", "bh"], ["bh", "bh"]],
    "head never used": [["ab", "ab"], ["ab", "ab"]],
    "head first used at the boundary": [["ab", "abh"], ["abh", "abh"]],
    "b first used at the boundary": [["ah", "abh"], ["ah", "abh"]],
    "head twice in one forward": [["abH", "aH", "bh"], ["aH", "aH"]],
    "windows of different length": [["abh"], ["ah", "bh", "ah", "b"], ["ab"], ["a", "bh"]],
    "frozen layer in use": [["fa", "fbh"], ["fabh", "f"]],
    "root's parameters unused": [["h", "h"], ["a", ""]],
}

MODES = list(itertools.product(["all_reduce", "grad_sync"], [True, False], [False, True]))


def errors_against_none(windows: list[list[str]], setups: list[Setup]) -> list[tuple[float, list[dict[str, Any]]]]:
    """Each setup's worst error against mode "none" on the same mesh and precision, and its gradients."""
    mesh_of.cache_clear()
    without: dict[Setup, list[dict[str, Any]]] = {}
    results = []
    for setup in setups:
        none = replace(setup, mode="none", reshard=True)
        if none not in without:
            without[none], _ = run_windows(windows, none)
        found, _ = run_windows(windows, setup)
        results.append((max(map(worst_error, found, without[none])), found))
    return results


# On the other meshes the patterns that torch's setters fail at; test_any_usage_equals_none draws from all.
HARDEST = ("head unused at the boundary", "a then b", "head first used at the boundary", "windows of different length")
QUICK = [("hsdp", "head unused at the boundary"), ("hsdp", "a then b")]
CASES = [
    pytest.param(mesh, pattern, marks=() if (mesh, pattern) in QUICK else pytest.mark.slow)
    for mesh, patterns in {"hsdp": PATTERNS, "fsdp": HARDEST, "replicate": HARDEST}.items()
    for pattern in patterns
]


@pytest.mark.parametrize("mesh, pattern", CASES)
def test_every_mode_equals_none_and_float64(rank_pool: Any, mesh: str, pattern: str) -> None:
    windows = PATTERNS[pattern]
    setups = [Setup(mesh, mode, reshard, mixed) for mode, reshard, mixed in MODES]
    truth = reference(windows)
    for results in rank_pool.run(errors_against_none, windows, setups):
        for setup, (error, found) in zip(setups, results, strict=True):
            assert error < (1e-2 if setup.mixed else 1e-5), setup
            assert max(map(worst_error, found, truth)) < (4e-2 if setup.mixed else 1e-5), setup


USAGE = st.builds(
    lambda letters, head: "".join(sorted(letters)) + head,
    st.sets(st.sampled_from("abf")),
    st.sampled_from(["", "h", "H"]),
)
WINDOWS = st.lists(st.lists(USAGE, min_size=1, max_size=4), min_size=1, max_size=3)
SETUPS = st.builds(
    Setup,
    mesh=st.sampled_from(list(MESHES)),
    mode=st.sampled_from(["all_reduce", "grad_sync"]),
    reshard=st.booleans(),
    mixed=st.booleans(),
    reduce_unused=st.booleans(),
    reshard_after_forward=st.booleans(),
)


@pytest.mark.slow
@given(windows=WINDOWS, setup=SETUPS)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_usage_equals_none(rank_pool: Any, windows: list[list[str]], setup: Setup) -> None:
    for ((error, _),) in rank_pool.run(errors_against_none, windows, [setup]):
        assert error < (1e-2 if setup.mixed else 1e-5)


def errors_of_a_long_window() -> dict[str, float]:
    """Of each mode against float64, bfloat16 parameters and float32 reduction, after 64 micro-steps."""
    mesh_of.cache_clear()
    windows = [["abh"] * 64]
    (truth,) = reference(windows)
    found = {
        mode: run_windows(windows, Setup(mode=mode, mixed=True))[0] for mode in ("none", "all_reduce", "grad_sync")
    }
    return {mode: worst_error(grads, truth) for mode, (grads,) in found.items()}


@pytest.mark.slow
def test_sums_of_many_micro_steps_stay_accurate(rank_pool: Any) -> None:
    """What waits is summed in the reduce dtype, not in that of the parameters."""
    for errors in rank_pool.run(errors_of_a_long_window):
        assert errors["none"] < 1e-2
        assert max(errors.values()) < 1.2 * errors["none"]


NAMES = ("dp_replicate", "dp_shard")


def windows_over(shape: tuple[int, ...]) -> None:
    """Meshes with a dimension of one rank; where all are, no mode sends more than "none" does."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])
    windows = [*PATTERNS["a then b"], *PATTERNS["head unused at the boundary"]]
    truth, kinds_of_none = reference(windows, mesh.size()), set[str]()
    for mode, reshard in itertools.product(["none", "all_reduce", "grad_sync"], [True, False]):
        net = build()
        for part in (net.trunk, net.head, net):
            fully_shard(part, mesh=mesh)
        sync, index = GradSync(net, mode, reshard), 0
        for window, expected in zip(windows, truth, strict=True):
            with CollectiveCounter() as counter:
                for step, use in enumerate(window):
                    with sync.micro_step(boundary=step == len(window) - 1):
                        micro_step(net, index, use, len(window))
                    index += 1
            kinds = {kind for kind, _ in counter.totals()}
            kinds_of_none |= kinds if mode == "none" else set()
            assert mesh.size() > 1 or kinds <= kinds_of_none
            assert worst_error(gradients(net), expected) < 1e-5, (shape, mode, reshard)
            net.zero_grad()


@pytest.mark.slow
def test_dimensions_of_one_rank(rank_pool: Any) -> None:
    rank_pool.run(windows_over, (1,), world_size=1)
    rank_pool.run(windows_over, (1, 1), world_size=1)
    rank_pool.run(windows_over, (1, 4))
