# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosmos_framework.data.action_chunks import ActionChunkDatasetConfig, ActionChunks, TrainLoader, ValidationLoader
from cosmos_framework.data.lerobot import LeRobotDataset, read_dataset
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("data") / "demos")


@pytest.fixture(scope="module")
def dataset(root: Path) -> LeRobotDataset:
    return read_dataset(root)


@given(history=st.integers(1, 6), chunk=st.integers(1, 25), split=st.sampled_from(["train", "val"]), data=st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_samples_are_windows_of_one_episode(
    dataset: LeRobotDataset, history: int, chunk: int, split: str, data: Any
) -> None:
    chunks = ActionChunks(dataset, split, history, chunk)
    domain = data.draw(st.sampled_from(list(chunks.frames)))
    frame = int(data.draw(st.sampled_from(chunks.frames[domain].tolist())))
    batch = chunks.batch(domain, torch.tensor([frame]))
    episode = next(i for i, (first, end) in enumerate(dataset.episode_bounds) if first <= frame < end)
    first, end = dataset.episode_bounds[episode]
    assert dataset.splits[split][0] <= episode < dataset.splits[split][1]
    assert int(batch["task_index"]) in list(dataset.domains.values())[domain]
    wanted = [dataset.state[max(first, frame + back)].tolist() for back in range(1 - history, 1)]
    assert batch["observation.state"][0].tolist() == wanted
    for ahead in range(chunk):
        assert bool(batch["action_is_pad"][0, ahead]) == (frame + ahead >= end)
        assert batch["action"][0, ahead].tolist() == dataset.action[min(end - 1, frame + ahead)].tolist()


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(torch.equal(torch.as_tensor(left[key]), torch.as_tensor(right[key])) for key in left)


@given(seed=st.integers(0, 2**31 - 1), start=st.integers(0, 50))
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_resumed_loader_goes_on_where_it_was(root: Path, seed: int, start: int) -> None:
    config = ActionChunkDatasetConfig(root=str(root), history=2, chunk=4)
    from_start = list(itertools.islice(TrainLoader(config, batch_size=3, seed=seed), start + 3))
    resumed = TrainLoader(config, batch_size=3, seed=seed)
    resumed.set_start_iteration(start)
    assert all(map(equal, from_start[start:], resumed))


def test_every_domain_has_its_turn(root: Path) -> None:
    loader = TrainLoader(ActionChunkDatasetConfig(root=str(root)), batch_size=1, seed=0)
    drawn = [loader.domain_of(index) for index in range(400)]
    assert 160 < sum(drawn) < 240


def what_a_rank_sees(root: str) -> tuple[list[Any], list[Any]]:
    config = ActionChunkDatasetConfig(root=root, history=1, chunk=1)
    train = list(itertools.islice(TrainLoader(config, batch_size=4, seed=3), 8))
    return train, list(ValidationLoader(config, batch_size=4))


def test_ranks_share_domains_and_not_samples(rank_pool: Any, root: Path, dataset: LeRobotDataset) -> None:
    by_rank = rank_pool.run(what_a_rank_sees, str(root))
    trains, validations = zip(*by_rank, strict=True)
    for batches in zip(*trains, strict=True):
        assert len({batch["domain"] for batch in batches}) == 1
        assert not any(equal(left, right) for left, right in itertools.combinations(batches, 2))
    for batches in zip(*validations, strict=True):
        assert len({batch["domain"] for batch in batches}) == 1
    seen = {
        tuple(state.flatten().tolist())
        for rank in validations
        for batch in rank
        for state in batch["observation.state"]
    }
    first, _ = dataset.episode_bounds[dataset.splits["val"][0]]
    assert seen == {tuple(state.tolist()) for state in dataset.state[first:]}
    assert not dist.is_initialized()
