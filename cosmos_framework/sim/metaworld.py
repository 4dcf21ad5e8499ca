# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Meta-World's simulated tasks: scripted experts to record, and closed-loop trials of a policy.

Source: Yu et al., "Meta-World", arXiv:1910.10897; Meta-World+, arXiv:2505.11289. Needs the extra `sim`.
The observation is the simulator's whole state of 39 numbers, the goal included: it is what the experts see.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from cosmos_framework.data.lerobot import Episode

# Before MuJoCo is imported: nothing is drawn, so no GL library is needed.
os.environ.setdefault("MUJOCO_GL", "disable")

# Tasks that one part of the scene makes alike share a domain.
DOMAINS = {
    "buttons": ["button-press-topdown-v3", "button-press-v3"],
    "drawers": ["drawer-close-v3", "drawer-open-v3"],
    "windows": ["window-open-v3", "window-close-v3"],
}
FPS = 80
MAX_STEPS = 160
STEPS_AFTER_SUCCESS = 5

Policy = Callable[[np.ndarray], np.ndarray]


def make_env(task: str):
    """Makes a task's simulation; `reset_env` places its objects and its goal.

    Raises:
        ValueError: there is no such task.
    """
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    if task not in ALL_V3_ENVIRONMENTS:
        raise ValueError(f"task {task!r} is unknown to Meta-World; choose from {', '.join(ALL_V3_ENVIRONMENTS)}")
    env = ALL_V3_ENVIRONMENTS[task]()
    env._partially_observable = False  # else the goal's three numbers are zeros
    env._freeze_rand_vec = False
    env.seeded_rand_vec = True  # else goals come from numpy's global random numbers
    env._set_task_called = True
    env.max_path_length = MAX_STEPS + STEPS_AFTER_SUCCESS
    return env


def reset_env(env, seed: int) -> np.ndarray:
    """Places objects and goal as the seed says; returns the first observation, (39,)."""
    env.seed(seed)  # Meta-World's reset ignores its own argument
    return env.reset()[0]


def make_expert(task: str) -> Policy:
    """Returns Meta-World's scripted expert: observation (39,) to action (4,)."""
    from metaworld import policies

    name = "Sawyer" + "".join(part.capitalize() for part in task.split("-")) + "Policy"
    return getattr(policies, name)().get_action


def record_expert(task: str, episodes: int, seed: int) -> list[Episode]:
    """Records an expert's successful episodes.

    Args:
        task: Meta-World's name of the task.
        episodes: how many.
        seed: of the goals; the same seed gives the same episodes.

    Raises:
        RuntimeError: the expert fails too often to give that many.
    """
    env, expert = make_env(task), make_expert(task)
    attempts = np.random.SeedSequence(seed).generate_state(4 * episodes)
    recorded: list[Episode] = []
    for attempt in attempts:
        if len(recorded) == episodes:
            return recorded
        if (episode := _record(env, expert, task, int(attempt))) is not None:
            recorded.append(episode)
    if len(recorded) < episodes:
        raise RuntimeError(f"the expert of {task} succeeded {len(recorded)} times in {len(attempts)} tries")
    return recorded


def _record(env, expert: Policy, task: str, seed: int) -> Episode | None:
    states, actions = [], []
    observation = reset_env(env, seed)
    steps_left = MAX_STEPS
    succeeded = False
    while steps_left:
        action = np.clip(expert(observation), -1, 1).astype(np.float32)
        states.append(observation.astype(np.float32))
        actions.append(action)
        observation, _, _, _, info = env.step(action)
        steps_left -= 1
        if info["success"] and not succeeded:
            # The policy should learn to stay where it succeeded.
            succeeded, steps_left = True, STEPS_AFTER_SUCCESS
    return Episode(np.stack(states), np.stack(actions), task) if succeeded else None


def try_policy(
    policy: Callable[[np.ndarray], np.ndarray], task: str, seeds: Sequence[int], history: int, execute: int
) -> list[bool]:
    """Runs a policy in closed loop, one simulation a seed, all in lock-step so that it sees them as one batch.

    Args:
        policy: state histories (trials, history, 39) to chunks of actions (trials, chunk, 4), oldest first.
        task: Meta-World's name of the task.
        seeds: of the goals, one a trial.
        history: states that the policy sees; before there are that many the first one is repeated.
        execute: actions of each chunk that are carried out before the policy is asked again.

    Returns:
        Whether each trial succeeded within `MAX_STEPS` steps.
    """
    envs = [make_env(task) for _ in seeds]
    resets = [reset_env(env, seed) for env, seed in zip(envs, seeds, strict=True)]
    states = np.stack([np.stack([observation] * history) for observation in resets]).astype(np.float32)
    succeeded = [False] * len(envs)
    for step in range(MAX_STEPS):
        if step % execute == 0:
            chunk = np.clip(policy(states), -1, 1)
        states = np.roll(states, -1, axis=1)
        for trial, env in enumerate(envs):
            if not succeeded[trial]:
                observation, _, _, _, info = env.step(chunk[trial, step % execute])
                states[trial, -1] = observation
                succeeded[trial] = bool(info["success"])
        if all(succeeded):
            break
    return succeeded
