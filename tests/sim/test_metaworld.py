# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("metaworld", reason="needs the extra `sim`")

from cosmos_framework.sim.metaworld import (
    DOMAINS,
    MAX_STEPS,
    make_env,
    make_expert,
    record_expert,
    reset_env,
    try_policy,
)

pytestmark = pytest.mark.filterwarnings("ignore:Constant")

TASK = "drawer-close-v3"
KNOWN_TASKS = [
    task if task == TASK else pytest.param(task, marks=pytest.mark.slow) for tasks in DOMAINS.values() for task in tasks
]


def test_recorded_episodes_are_whole_and_finite() -> None:
    episodes = record_expert(TASK, episodes=2, seed=0)
    assert [episode.task for episode in episodes] == [TASK] * 2
    for episode in episodes:
        assert len(episode.state) == len(episode.action) <= MAX_STEPS
        assert episode.state.shape[1:] == (39,) and episode.action.shape[1:] == (4,)
        assert episode.state.dtype == episode.action.dtype == np.float32
        assert np.isfinite(episode.state).all() and np.abs(episode.action).max() <= 1


@pytest.mark.parametrize("task", KNOWN_TASKS)
def test_the_expert_succeeds_in_closed_loop(task: str) -> None:
    expert = make_expert(task)

    def policy(states: np.ndarray) -> np.ndarray:
        return np.stack([expert(history[-1].astype(float)) for history in states])[:, None].astype(np.float32)

    assert any(try_policy(policy, task, seeds=range(2), history=2, execute=1))


def test_standing_still_fails() -> None:
    def policy(states: np.ndarray) -> np.ndarray:
        return np.zeros((len(states), 8, 4), dtype=np.float32)

    assert try_policy(policy, TASK, seeds=[0, 1], history=2, execute=8) == [False, False]


def test_a_policy_sees_its_history_oldest_first() -> None:
    seen: list[np.ndarray] = []

    def policy(states: np.ndarray) -> np.ndarray:
        seen.append(states.copy())
        return np.full((len(states), 1, 4), 0.5, dtype=np.float32)

    try_policy(policy, TASK, seeds=[0], history=3, execute=1)
    assert all(np.array_equal(state, seen[0][0, -1]) for state in seen[0][0])
    for before, after in pairwise(seen):
        np.testing.assert_array_equal(after[0, :-1], before[0, 1:])


@pytest.mark.parametrize("task", KNOWN_TASKS)
def test_an_episode_depends_on_its_seed_alone(task: str) -> None:
    fresh, used = make_env(task), make_env(task)
    reset_env(used, seed=1)
    for _ in range(10):
        used.step(np.ones(4))
    first = reset_env(fresh, seed=5)
    np.testing.assert_array_equal(reset_env(used, seed=5), first)
    assert not np.array_equal(reset_env(fresh, seed=6), first)


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(ValueError, match="'fly-v3' is unknown to Meta-World; choose from"):
        make_env("fly-v3")
