# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""The norm over mixed meshes, and gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from cosmos_framework.callbacks.grad_clip import global_grad_norm
from cosmos_framework.trainer import ImaginaireTrainer
from cosmos_framework.utils import distributed
from cosmos_framework.utils.parallelism import Degrees, build_mesh
from tests.tiny import TinyBatches, TinyModel, full_gradients, tiny_config


def norm_over_mixed_meshes() -> tuple[float, float]:
    """One layer on a 1-D mesh, one on a 2-D mesh, one replicated only, one plain; all ranks see the same data."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    for layer, degrees in zip(layers, (Degrees(1, 4), Degrees(2, 2), Degrees(4, 1)), strict=False):
        fully_shard(layer, mesh=build_mesh(degrees, "cpu"))
    layers(torch.ones(2, 3)).square().sum().backward()
    whole = [gradient for gradient in full_gradients(layers).values() if gradient is not None]
    return global_grad_norm(layers.parameters()).item(), torch.nn.utils.get_total_norm(whole).item()


def test_norm_counts_each_gradient_once_on_any_mix_of_meshes(rank_pool: Any) -> None:
    for found, expected in rank_pool.run(norm_over_mixed_meshes):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    distributed.destroy_process_group()


class Overflowing(TinyModel):
    """One of its parameters gets a gradient of NaN."""

    def on_after_backward(self, iteration: int = 0) -> None:
        gradient = self.net.embed.bias.grad
        assert gradient is not None
        gradient.fill_(math.nan)


class NormOfStep(ImaginaireTrainer):
    norms: list[tuple[float, float]] = []

    def _optimizer_step(self, model: Any, *args: Any, **kwargs: Any) -> None:
        gradients = [gradient for gradient in full_gradients(model).values() if gradient is not None]
        self.norms.append((self.metrics["grad_norm"], torch.nn.utils.get_total_norm(gradients).item()))
        super()._optimizer_step(model, *args, **kwargs)


def norms_with(folder: Path, clip: str) -> tuple[float, float]:
    clip = f"{{_target_: cosmos_framework.callbacks.grad_clip.GradClip, {clip}}}"
    config = tiny_config(
        folder, "trainer.max_iter=1", "trainer.grad_accum_iter=1", f"trainer.callbacks={{clip: {clip}}}"
    )
    NormOfStep.norms.clear()
    NormOfStep(config).train(Overflowing(), TinyBatches(), None)
    return NormOfStep.norms[0]


def test_nonfinite_gradients_become_zero(tmp_path: Path) -> None:
    before, after = norms_with(tmp_path, "clip_norm: 0.01")
    assert math.isfinite(before) and before > 0.01
    assert after == pytest.approx(0.01, rel=1e-3)


def test_nonfinite_gradients_pass_if_asked_to(tmp_path: Path) -> None:
    before, after = norms_with(tmp_path, "force_finite: false")
    assert math.isnan(before) and math.isnan(after)


def test_small_gradients_are_left_alone(tmp_path: Path) -> None:
    before, after = norms_with(tmp_path, "clip_norm: 1000.0")
    assert after == pytest.approx(before, rel=1e-6)
