# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""What training sends over the network for one optimizer step."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from cosmos_framework.model._base import ImaginaireModel
from cosmos_framework.utils import distributed
from cosmos_framework.utils.callback import Callback
from cosmos_framework.utils.collectives import CollectiveCounter

logger = logging.getLogger(__name__)


class CommLedger(Callback):
    """Counts the collectives of a run's first windows, by kind and mesh dimension, as rank 0 sees them.

    Each window is counted from its first micro-step until the hooks before the optimizer step, so that the collectives
    of clipping stay out if this callback comes before it. `comm_ledger.json` in the job's folder has one entry a
    window; the first one can differ, since DDP's static graph always synchronises the very first backward.
    """

    def __init__(self, windows: int = 2) -> None:
        """Takes note of how long to count.

        Args:
            windows: Number of windows to count, from where the run starts or resumes.
        """
        self._windows = windows
        self._steps: list[dict[str, Any]] = []
        self._counter: CollectiveCounter | None = None

    def on_training_step_batch_start(self, model: ImaginaireModel, data: dict[str, Any], iteration: int = 0) -> None:
        """Starts counting with the first micro-step of a window."""
        if self._counter is None and len(self._steps) < self._windows:
            self._counter = CollectiveCounter()
            self._counter.__enter__()

    def on_before_optimizer_step(
        self,
        model: ImaginaireModel,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        grad_scaler: torch.amp.GradScaler,
        iteration: int = 0,
    ) -> None:
        """Ends the window's count, and writes the ledger after the last one."""
        if self._counter is None:
            return
        self._counter.__exit__(None, None, None)
        self._steps.append({"iteration": iteration + 1, "collectives": _entries(self._counter)})
        self._counter = None
        if len(self._steps) == self._windows:
            self._write()

    @distributed.rank0_only
    def _write(self) -> None:
        trainer = self.config.trainer
        ledger = {
            "distributed_parallelism": trainer.distributed_parallelism,
            "fsdp_accum_mode": trainer.fsdp_accum_mode,
            "fsdp_accum_reshard": trainer.fsdp_accum_reshard,
            "grad_accum_iter": trainer.grad_accum_iter,
            "ranks": distributed.get_world_size(),
            "optimizer_steps": self._steps,
        }
        (Path(self.config.job.path_local) / "comm_ledger.json").write_text(json.dumps(ledger, indent=2) + "\n")
        sent = ", ".join(
            f"{entry['calls']} {entry['collective']} over {entry['mesh_dimension']} ({entry['bytes'] / 2**20:.3g} MiB)"
            for entry in self._steps[-1]["collectives"]
        )
        logger.info("collectives per optimizer step on rank 0: %s", sent or "none")


def _entries(counter: CollectiveCounter) -> list[dict[str, Any]]:
    return [
        {"collective": kind, "mesh_dimension": dimension, "calls": traffic.calls, "bytes": traffic.bytes}
        for (kind, dimension), traffic in sorted(counter.totals().items())
    ]
