# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""The lines of metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_framework.trainer import ImaginaireTrainer
from tests.tiny import TinyBatches, TinyModel, tiny_config


class FixedModel(TinyModel):
    """Its loss does not depend on what it has learnt."""

    def training_step(self, data: dict[str, Any], iteration: int) -> tuple[dict[str, Any], torch.Tensor]:
        output, loss = super().training_step(data, iteration)
        return output, 0 * loss + data["x"].mean()

    validation_step = training_step


def train(folder: str) -> None:
    callbacks = (
        "trainer.callbacks={clip: {_target_: cosmos_framework.callbacks.grad_clip.GradClip},"
        "metrics: {_target_: cosmos_framework.callbacks.jsonl_metrics.JsonlMetrics}}"
    )
    overrides = [
        "trainer.max_iter=4",
        "trainer.logging_iter=2",
        "trainer.run_validation=true",
        "trainer.validation_iter=4",
    ]
    ImaginaireTrainer(tiny_config(folder, callbacks, *overrides)).train(FixedModel(), TinyBatches(), TinyBatches())


def test_loss_is_the_mean_over_ranks_and_micro_steps(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(train, str(tmp_path), world_size=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    data = TinyBatches()

    def mean_of(indices: range) -> float:
        return (
            torch.stack([data.batch(index, rank)["x"].mean() for index in indices for rank in range(2)]).mean().item()
        )

    assert [line["iteration"] for line in lines] == [2, 4, 4]
    assert lines[0]["loss"] == pytest.approx(mean_of(range(4)), rel=1e-5)
    assert lines[1]["loss"] == pytest.approx(mean_of(range(4, 8)), rel=1e-5)
    assert lines[2] == {"iteration": 4, "validation_loss": pytest.approx(mean_of(range(2)), rel=1e-5)}
    assert [line["lr"] for line in lines[:2]] == [0.005, 0.00125]
    assert lines[0]["grad_norm"] == 0
    samples = 2 * 2 * 2 * 2  # ranks, windows, micro-steps, samples in a micro-batch
    seconds = 2 * lines[0]["seconds_per_iteration"]
    assert lines[0]["samples_per_second"] == pytest.approx(samples / seconds)
