# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Loss scaling: torch's scaler for CPU stands for CUDA's, which float16 needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from cosmos_framework.trainer import ImaginaireTrainer
from cosmos_framework.utils import distributed
from tests.tiny import TinyBatches, TinyModel, full_tensors, tiny_config

CLIP = "trainer.callbacks={clip: {_target_: cosmos_framework.callbacks.grad_clip.GradClip, clip_norm: 0.1}}"


class ScalingTrainer(ImaginaireTrainer):
    def _init_grad_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=1024.0)


class OverflowingShard(TinyModel):
    """An infinity in one of the two shards of one parameter; both replicas have it, as after an all-reduce."""

    def on_after_backward(self, iteration: int = 0) -> None:
        gradient = self.net.embed.weight.grad
        if isinstance(gradient, DTensor) and distributed.get_rank() % 2 == 1:
            gradient.to_local().fill_(torch.inf)


def parameters_after_training(folder: Path, trainer: type[ImaginaireTrainer], layout: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = TinyModel()
    trainer(tiny_config(folder, CLIP, layout)).train(model, TinyBatches("left"), None)
    return full_tensors(model)


@pytest.mark.parametrize(
    "layout", ["trainer.distributed_parallelism=ddp", "model.parallelism.data_parallel_replicate_degree=2"]
)
def test_scaling_changes_nothing_that_the_optimizer_sees(rank_pool: Any, tmp_path: Path, layout: str) -> None:
    plain = rank_pool.run(parameters_after_training, tmp_path / "plain", ImaginaireTrainer, layout)
    scaled = rank_pool.run(parameters_after_training, tmp_path / "scaled", ScalingTrainer, layout)
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-7)


def parameters_after_overflow(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = OverflowingShard()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = tiny_config(folder, "model.parallelism.data_parallel_replicate_degree=2", "trainer.max_iter=1")
    ScalingTrainer(config).train(model, TinyBatches("left"), None)
    return before, full_tensors(model)


def test_overflow_in_one_shard_skips_the_step_on_all(rank_pool: Any, tmp_path: Path) -> None:
    results = rank_pool.run(parameters_after_overflow, tmp_path)
    for _, after in results:
        torch.testing.assert_close(after, results[0][0], rtol=0, atol=0)


def test_scaler_is_off_on_cpu_whatever_is_asked_for(tmp_path: Path) -> None:
    trainer = ImaginaireTrainer(
        tiny_config(tmp_path, "trainer.grad_scaler_args={enabled: true, init_scale: 8.0}", "model.precision=float16")
    )
    try:
        assert trainer._init_grad_scaler().is_enabled() == torch.cuda.is_available()
    finally:
        distributed.destroy_process_group()
