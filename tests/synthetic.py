# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Small data sets that look like demonstrations."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cosmos_framework.data.lerobot import Episode, write_dataset

DOMAINS = {"reach": ["reach left", "reach right"], "lift": ["lift"]}


def synthetic_episodes(episodes: int = 12, frames: int = 20) -> list[Episode]:
    """Returns episodes of all tasks in turn, whose action is a linear function of the state."""
    tasks = [task for members in DOMAINS.values() for task in members]
    random = np.random.default_rng(0)
    gain = random.normal(size=(5, 3)).astype(np.float32)
    states = random.normal(size=(episodes, frames, 5)).astype(np.float32)
    return [Episode(state, state @ gain, tasks[index % len(tasks)]) for index, state in enumerate(states)]


def write_synthetic(root: Path) -> Path:
    """Writes them as a data set with domains and a held-out split; returns its folder."""
    write_dataset(root, synthetic_episodes(), fps=10, domains=DOMAINS, validation_episodes=3)
    return root
