# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""A progress bar in the console."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from tqdm import tqdm

from cosmos_framework.model._base import ImaginaireModel
from cosmos_framework.utils import distributed, misc
from cosmos_framework.utils.callback import Callback

# A file keeps what a terminal overwrites.
TERMINAL_INTERVAL_S, LOG_INTERVAL_S = 0.1, 10.0


class ProgressBar(Callback):
    """Shows on rank 0 one step a window, with its loss, its time, samples a second, and what waits for the boundary.

    The loss is rank 0's, the mean over the window's micro-steps; samples are those of all ranks, taken to have
    batches of the same size.
    """

    @distributed.rank0_only
    def on_train_start(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Draws the bar."""
        self._bar = tqdm(
            total=self.config.trainer.max_iter,
            initial=iteration,
            desc="training",
            unit="iter",
            mininterval=TERMINAL_INTERVAL_S if sys.stderr.isatty() else LOG_INTERVAL_S,
        )
        self._waits: str | None = None
        self._start_window()

    def _start_window(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._samples = 0
        self._since = time.perf_counter()

    @distributed.rank0_only
    def on_training_step_batch_end(
        self,
        model: ImaginaireModel,
        data_batch: dict[str, Any],
        output_batch: dict[str, Any],
        loss: torch.Tensor,
        iteration: int = 0,
    ) -> None:
        """Adds up the micro-step."""
        self._losses.append(loss.detach())
        self._samples += misc.batch_size(data_batch)

    @distributed.rank0_only
    def on_training_step_end(
        self,
        model: ImaginaireModel,
        data_batch: dict[str, Any],
        output_batch: dict[str, Any],
        loss: torch.Tensor,
        iteration: int = 0,
    ) -> None:
        """Moves the bar on."""
        loss_mean = torch.stack(self._losses).mean().item()
        seconds = time.perf_counter() - self._since
        # What waits is settled by the first window.
        self._waits = self._waits or _what_waits(model)
        figures = {
            "loss": f"{loss_mean:.4g}",
            "s/iter": f"{seconds:.3g}",
            "samples/s": f"{self._samples * distributed.get_world_size() / seconds:.3g}",
            "waits": self._waits,
        }
        self._bar.set_postfix(figures, refresh=False)
        self._bar.update()
        self._start_window()

    @distributed.rank0_only
    def on_train_end(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Leaves the bar as it is."""
        self._bar.close()


def _what_waits(model: ImaginaireModel) -> str:
    """Names the collectives that wait for the boundary, over all backends of the model."""
    sync = distributed.grad_sync_of(model)
    waiting = [collective for backend in sync.plan() for collective in backend.waits] if sync is not None else []
    return "+".join(dict.fromkeys(waiting)) or "nothing"
