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

from tests.utils.grad_sync.windows import MESHES, Setup, mesh_of, reference, run_windows, worst_error

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
QUICK = [("hsdp", "head unused at the boundary"), ("hsdp", "a then b"), ("hsdp", "windows of different length")]
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
