# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Samples for action policies: a history of states, and the chunk of actions that followed it.

A micro-batch comes from one domain. Which one is drawn from (seed, micro-batch), so that all ranks agree without
talking; which samples is drawn from the rank as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosmos_framework.utils import distributed
from cosmos_framework.utils.config import DataLoaderConfig, DatasetConfig, within

if TYPE_CHECKING:
    from cosmos_framework.data.lerobot import LeRobotDataset


@dataclass
class ActionChunkDatasetConfig(DatasetConfig):
    """A LeRobot data set, cut into histories and chunks.

    Attributes:
        history: Number of states that a sample has, the present one included.
        chunk: Number of actions that a sample has, the present one first.
    """

    history: int = within(1, default=2)
    chunk: int = within(1, default=16)


@dataclass
class TrainLoaderConfig(DataLoaderConfig):
    """Endless random micro-batches of the split "train".

    Attributes:
        batch_size: Samples of a micro-batch on each rank.
        seed: Of the samples and of the schedule of domains.
    """

    _target_: str = "cosmos_framework.data.action_chunks.TrainLoader"
    batch_size: int = within(1, default=32)
    seed: int = within(0, 2**31 - 1, default="${trainer.seed}")


@dataclass
class ValidationLoaderConfig(DataLoaderConfig):
    """One pass over the split "val".

    Attributes:
        batch_size: Samples of a batch on each rank.
    """

    _target_: str = "cosmos_framework.data.action_chunks.ValidationLoader"
    batch_size: int = within(1, default=64)


class ActionChunks:
    """All samples of one split, in memory."""

    def __init__(self, dataset: LeRobotDataset, split: str, history: int, chunk: int) -> None:
        """Finds each domain's frames.

        Args:
            dataset: as read from disk.
            split: "train" or "val".
            history: states of a sample.
            chunk: actions of a sample.
        """
        self._state = torch.from_numpy(dataset.state)  # (frames, S)
        self._action = torch.from_numpy(dataset.action)  # (frames, A)
        self._task = torch.from_numpy(dataset.task_index)  # (frames,)
        self._back = torch.arange(1 - history, 1)  # (H,)
        self._ahead = torch.arange(chunk)  # (T,)
        bounds = torch.from_numpy(dataset.episode_bounds)  # (episodes, 2)
        lengths = bounds[:, 1] - bounds[:, 0]
        self._first = torch.repeat_interleave(bounds[:, 0], lengths)  # (frames,), of each frame's episode
        self._last = torch.repeat_interleave(bounds[:, 1], lengths) - 1
        first_episode, end_episode = dataset.splits[split]
        frames = torch.arange(int(bounds[first_episode, 0]), int(bounds[end_episode - 1, 1]))
        of_domain = [frames[torch.isin(self._task[frames], torch.tensor(tasks))] for tasks in dataset.domains.values()]
        self.frames = {domain: found for domain, found in enumerate(of_domain) if len(found)}

    def batch(self, domain: int, frames: Tensor) -> dict[str, Any]:
        """Cuts samples out.

        Args:
            domain: the frames' domain.
            frames: the present frame of each sample, (B,).

        Returns:
            `observation.state` (B, H, S), the first state repeated before an episode starts; `action` (B, T, A), the
            last one repeated after it ends, where `action_is_pad` (B, T) is true; `task_index` (B,); `domain`.
        """
        history = torch.maximum(frames[:, None] + self._back, self._first[frames][:, None])  # (B, H)
        ahead = frames[:, None] + self._ahead  # (B, T)
        last = self._last[frames][:, None]
        return {
            "observation.state": self._state[history],
            "action": self._action[torch.minimum(ahead, last)],
            "action_is_pad": ahead > last,
            "task_index": self._task[frames],
            "domain": domain,
        }


class TrainLoader:
    """Gives this rank's micro-batches for ever; the i-th depends on the seed, i and the rank alone."""

    def __init__(self, dataset: ActionChunkDatasetConfig, batch_size: int, seed: int) -> None:
        """Reads the data set.

        Args:
            dataset: which one, and how to cut it.
            batch_size: samples of a micro-batch.
            seed: of samples and domains.

        Raises:
            DatasetError: the data set cannot be used.
        """
        self._chunks = _read(dataset, "train")
        self._batch_size, self._seed, self._start = batch_size, seed, 0

    def set_start_iteration(self, micro_batches: int) -> None:
        """Lets the next iteration start after that many micro-batches."""
        self._start = micro_batches

    def domain_of(self, index: int) -> int:
        """Returns the domain of the `index`-th micro-batch: the same on every rank."""
        domains = list(self._chunks.frames)
        return domains[int(torch.randint(len(domains), (), generator=_generator(self._seed, index)))]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        index, rank = self._start, distributed.get_rank()
        while True:
            domain = self.domain_of(index)
            frames = self._chunks.frames[domain]
            drawn = torch.randint(len(frames), (self._batch_size,), generator=_generator(self._seed, index, rank + 1))
            yield self._chunks.batch(domain, frames[drawn])
            index += 1


class ValidationLoader:
    """Gives every held-out sample once, shared out among the ranks, each of which gets equally many batches.

    The last batches start over at a domain's first samples, since FSDP needs all ranks to run alike.
    """

    def __init__(self, dataset: ActionChunkDatasetConfig, batch_size: int) -> None:
        """Reads the data set.

        Args:
            dataset: which one, and how to cut it.
            batch_size: samples of a batch.

        Raises:
            DatasetError: the data set cannot be used.
        """
        self._chunks = _read(dataset, "val")
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        for domain, frames in self._chunks.frames.items():
            batches = -(-len(frames) // (world_size * self._batch_size))
            for batch in range(batches):
                first = (batch * world_size + rank) * self._batch_size
                yield self._chunks.batch(domain, frames[torch.arange(first, first + self._batch_size) % len(frames)])


def _read(config: ActionChunkDatasetConfig, split: str) -> ActionChunks:
    # Needs the extra `data`, which those who train something else do not.
    from cosmos_framework.data.lerobot import DatasetError, read_dataset

    dataset = read_dataset(config.root)
    if split not in dataset.splits:
        raise DatasetError(f"{config.root} has no split {split!r}; it has {', '.join(dataset.splits)}")
    return ActionChunks(dataset, split, config.history, config.chunk)


def _generator(*seeds: int) -> torch.Generator:
    """Mixes the numbers into one seed, so that neighbours give unrelated streams."""
    mixed = 0
    for seed in seeds:
        # splitmix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014)
        mixed = (mixed + seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return torch.Generator().manual_seed(mixed >> 1)
