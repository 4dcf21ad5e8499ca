# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_framework.data.action_chunks import ActionChunkDatasetConfig, TrainLoader
from cosmos_framework.model.action_policy import ActionPolicyConfig, ActionPolicyModel, build_action_policy
from cosmos_framework.scripts.train import main
from tests.synthetic import write_synthetic

SMALL = ActionPolicyConfig(depth=1, heads=2, head_width=8)


@pytest.fixture
def dataset(tmp_path: Path) -> ActionChunkDatasetConfig:
    return ActionChunkDatasetConfig(root=str(write_synthetic(tmp_path / "demos")), history=2, chunk=4)


@pytest.fixture
def model(dataset: ActionChunkDatasetConfig) -> ActionPolicyModel:
    torch.manual_seed(0)
    return build_action_policy(SMALL, dataset)


@pytest.fixture
def batch(dataset: ActionChunkDatasetConfig) -> dict[str, Any]:
    return next(iter(TrainLoader(dataset, batch_size=8, seed=0)))


def test_only_the_heads_of_the_domain_get_gradients(model: ActionPolicyModel, batch: dict[str, Any]) -> None:
    model.training_step(batch, 0)[1].backward()
    for name, param in model.named_parameters():
        head = name.split(".")[1] in ("state_in", "action_in", "action_out")
        is_used = not head or name.split(".")[2] == str(batch["domain"])
        assert (param.grad is not None) == is_used, name


def test_padding_does_not_count(model: ActionPolicyModel, batch: dict[str, Any]) -> None:
    batch["action_is_pad"][:, 2:] = True
    _, loss = model.validation_step(batch, 0)
    batch["action"][:, 2:] += 100
    # Tokens see each other, so what is padded may change the prediction, never the target.
    output, changed = model.validation_step(batch, 0)
    assert output["velocity"].shape == batch["action"].shape
    assert abs(changed.item() - loss.item()) < 10


def test_validation_repeats_and_training_does_not(model: ActionPolicyModel, batch: dict[str, Any]) -> None:
    assert model.validation_step(batch, 0)[1] == model.validation_step(batch, 1)[1]
    assert model.training_step(batch, 0)[1] != model.training_step(batch, 1)[1]


def test_the_flow_reaches_the_actions(dataset: ActionChunkDatasetConfig, model: ActionPolicyModel) -> None:
    """With one sample the best velocity field is known, and integrating what was learnt gives the action."""
    sample = next(iter(TrainLoader(dataset, batch_size=1, seed=0)))
    sample["action_is_pad"][:] = False
    batch = {
        key: value.repeat(64, *[1] * (value.ndim - 1)) if isinstance(value, torch.Tensor) else value
        for key, value in sample.items()
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(200):
        optimizer.zero_grad()
        model.training_step(batch, step)[1].backward()
        optimizer.step()
    actions = model.sample_actions(batch)
    error = ((actions - batch["action"]) / model.action_std).abs().mean()
    assert error < 0.2


HSDP = ("parallelism=hsdp", "trainer.fsdp_accum_mode=all_reduce")
DDP = ("parallelism=ddp", "trainer.fsdp_accum_mode=all_reduce")


def train_recipe(root: str, output: str, name: str, *overrides: str) -> list[float]:
    """Runs the recipe on the pool's ranks as torchrun would; returns the losses."""
    os.environ["IMAGINAIRE_OUTPUT_ROOT"] = output
    os.environ["WORLD_SIZE"] = "4"
    small = ["model.head_width=8", "model.depth=1", "model.heads=2", "trainer.grad_accum_iter=4"]
    short = ["trainer.max_iter=10", "trainer.logging_iter=1", "optimizer.lr=1e-2", "scheduler.warmup_iter=2"]
    assert main([f"dataset.root={root}", f"job.name={name}", *small, *short, *overrides]) == 0
    metrics = Path(output) / "cosmos_framework/action_policy" / name / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def losses(rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """Gives the losses of the recipe with some overrides, which is trained once for all tests."""
    folder = tmp_path_factory.mktemp("recipe")
    root = str(write_synthetic(folder / "demos"))
    names = itertools.count()

    @functools.cache
    def losses_with(*overrides: str, run: str = "first") -> list[float]:
        return rank_pool.run(train_recipe, root, str(folder), f"{run}-{next(names)}", *overrides)[0]

    return losses_with


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["all_reduce", "grad_sync"])
def test_the_recipe_learns_and_repeats_bit_for_bit(losses: Callable[..., list[float]], mode: str) -> None:
    hsdp = ("parallelism=hsdp", f"trainer.fsdp_accum_mode={mode}")
    first, second = losses(*hsdp), losses(*hsdp, run="second")
    assert first == second
    assert sum(first[-3:]) < 0.9 * sum(first[:3])


@pytest.mark.slow
def test_the_recipes_losses_do_not_depend_on_what_waits(losses: Callable[..., list[float]]) -> None:
    none = losses("parallelism=hsdp", "trainer.fsdp_accum_mode=none")
    deferred = ("parallelism=hsdp", "trainer.fsdp_accum_mode=grad_sync", "trainer.fsdp_accum_reshard=false")
    assert losses(*deferred) == pytest.approx(none, rel=1e-3)
    assert losses(*DDP) == pytest.approx(none, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [HSDP, DDP], ids=["hsdp", "ddp"])
def test_the_recipe_learns_in_bfloat16_as_in_float32(
    losses: Callable[..., list[float]], parallelism: tuple[str, ...]
) -> None:
    full, half = losses(*parallelism), losses(*parallelism, "model.precision=bfloat16")
    assert half != full
    assert half == pytest.approx(full, rel=3e-2)


@pytest.mark.parametrize("missing", ["meta/stats.json", "data/chunk-000/file-000.parquet"])
def test_a_data_set_that_cannot_be_used_leaves_nothing_behind(
    tmp_path: Path, missing: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path / "outputs"))
    root = write_synthetic(tmp_path / "demos")
    (root / missing).unlink()
    assert main([f"dataset.root={root}"]) == 2
    assert "has no" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()
