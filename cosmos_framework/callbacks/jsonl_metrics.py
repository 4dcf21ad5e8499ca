# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Figures of the run, one JSON object a line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cosmos_framework.model._base import ImaginaireModel
from cosmos_framework.utils import distributed, misc
from cosmos_framework.utils.callback import Callback


class JsonlMetrics(Callback):
    """Appends to `metrics.jsonl` in the job's folder, on rank 0.

    Every `trainer.logging_iter` windows: `iteration`; `loss`, the mean over ranks and micro-steps since the line
    before; `lr`, of the first parameter group; `seconds_per_iteration`; `samples_per_second` over all ranks; and what
    other callbacks left in `trainer.metrics` for this window, such as `grad_norm`. After each validation: `iteration`
    and `validation_loss`, the mean over ranks and batches.
    """

    def on_train_start(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Starts counting."""
        self._lr = float("nan")
        self._start_period()

    def _start_period(self) -> None:
        self._losses = _Sums()
        self._windows = 0
        self._since = time.perf_counter()

    def on_before_optimizer_step(
        self,
        model: ImaginaireModel,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        grad_scaler: torch.amp.GradScaler,
        iteration: int = 0,
    ) -> None:
        """Notes the rate of this step."""
        self._lr = float(optimizer.param_groups[0]["lr"])

    def on_training_step_batch_end(
        self,
        model: ImaginaireModel,
        data_batch: dict[str, Any],
        output_batch: dict[str, Any],
        loss: torch.Tensor,
        iteration: int = 0,
    ) -> None:
        """Adds up the micro-step."""
        self._losses.add(loss, misc.batch_size(data_batch))

    def on_training_step_end(
        self,
        model: ImaginaireModel,
        data_batch: dict[str, Any],
        output_batch: dict[str, Any],
        loss: torch.Tensor,
        iteration: int = 0,
    ) -> None:
        """Writes a line if one is due."""
        self._windows += 1
        if iteration % self.config.trainer.logging_iter:
            return
        loss_mean, samples = self._losses.over_ranks()
        seconds = time.perf_counter() - self._since
        self._write(
            {
                "iteration": iteration,
                "loss": loss_mean,
                "lr": self._lr,
                **self.trainer.metrics,
                "seconds_per_iteration": seconds / self._windows,
                "samples_per_second": samples / seconds,
            }
        )
        self._start_period()

    def on_validation_start(
        self, model: ImaginaireModel, dataloader_val: Iterable[dict[str, Any]], iteration: int = 0
    ) -> None:
        """Starts counting the validation."""
        self._validation = _Sums()

    def on_validation_step_end(
        self,
        model: ImaginaireModel,
        data_batch: dict[str, Any],
        output_batch: dict[str, Any],
        loss: torch.Tensor,
        iteration: int = 0,
    ) -> None:
        """Adds up the batch."""
        self._validation.add(loss, misc.batch_size(data_batch))

    def on_validation_end(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Writes the validation's line."""
        loss_mean, _ = self._validation.over_ranks()
        self._write({"iteration": iteration, "validation_loss": loss_mean})

    @distributed.rank0_only
    def _write(self, line: dict[str, float]) -> None:
        with open(Path(self.config.job.path_local) / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


class _Sums:
    """Sum of losses, number of losses and number of samples; on the device, so that adding waits for nothing."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=distributed.device())

    def add(self, loss: torch.Tensor, samples: int) -> None:
        self._sums[0] += loss.detach()
        self._sums[1:] += torch.tensor([1.0, samples], dtype=torch.float64, device=self._sums.device)

    def over_ranks(self) -> tuple[float, float]:
        """Returns the mean loss and the number of samples of all ranks; every rank calls."""
        dist.all_reduce(self._sums)
        loss_sum, losses, samples = self._sums.tolist()
        return loss_sum / max(losses, 1), samples
