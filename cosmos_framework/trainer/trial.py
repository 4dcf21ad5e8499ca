# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""A few windows of a training, to learn what each way to accumulate takes; nothing of them lasts."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import get_object
from omegaconf import DictConfig

from cosmos_framework.trainer import ImaginaireTrainer
from cosmos_framework.utils import distributed, misc
from cosmos_framework.utils.accum_cost import DDP_WAYS, FSDP_WAYS, NOTHING_WAITS, Cost, Figures, Way
from cosmos_framework.utils.grad_sync import GradSync

MICRO_BATCHES = 8


class Trial:
    """A model, the trainer that trains it, and a few micro-batches that it sees over and over.

    Attributes:
        trainer: The trainer; its configuration follows `configure`.
        model: The model, neither wrapped nor sharded.
        parallel_model: The model as it is trained.
    """

    def __init__(self, config: DictConfig, dataloader: Iterable[dict[str, Any]]) -> None:
        """Builds them as a training does, and joins the process group. The trainer writes its configuration down.

        Args:
            config: From `load_config`, checked by `check_config`.
            dataloader: Gives this rank's micro-batches, at least one.
        """
        self.trainer = ImaginaireTrainer(config)  # type: ignore[arg-type]
        self.model = get_object(config.model._target_)(config.model, config.dataset)
        self.parallel_model, self._optimizer, self._scheduler, self._grad_scaler = self.trainer._prepare(self.model)
        # Drawn once: reading data is no part of a window here.
        self._micro_batches = list(itertools.islice(dataloader, MICRO_BATCHES))
        self._windows = 0

    @property
    def ways(self) -> Sequence[Way]:
        """The ways to accumulate that differ under the configured parallelism."""
        return DDP_WAYS if self.trainer.config.trainer.distributed_parallelism == "ddp" else FSDP_WAYS

    @property
    def samples_per_micro_step(self) -> int:
        """Samples of a micro-step, over all ranks."""
        return misc.batch_size(self._micro_batches[0]) * distributed.get_world_size()

    def configure(self, way: Way, accum: int, memory_gib: float = 0.0) -> None:
        """Makes the following windows `accum` micro-steps long, accumulated as `way` says.

        Args:
            way: The mode, and whether parameters are freed.
            accum: Number of micro-steps.
            memory_gib: Budget of mode "auto".
        """
        trainer = self.trainer.config.trainer
        trainer.fsdp_accum_memory_gib = memory_gib
        trainer.grad_accum_iter = accum
        trainer.fsdp_accum_mode = way.mode
        trainer.fsdp_accum_reshard = way.reshard

    def micro_step(self, step: int) -> None:
        """Runs the window's micro-step number `step`, from 0; the last one steps the optimizer."""
        micro_batch = misc.to(self._micro_batches[step % len(self._micro_batches)], distributed.device())
        *_, open_steps = self.trainer.training_step(
            self.parallel_model,
            self._optimizer,
            self._scheduler,
            self._grad_scaler,
            micro_batch,
            iteration=self._windows,
            grad_accum_iter=step,
        )
        self._windows += open_steps == 0

    def held_bytes(self, way: Way) -> int:
        """Returns the bytes that a rank holds inside a window: gradients that wait, parameters kept gathered."""
        plans = GradSync(self.parallel_model, way.mode, way.reshard).plan()
        return sum(plan.held_bytes + plan.gathered_bytes for plan in plans)

    def close(self) -> None:
        """Leaves the process group, if it was made for this trial."""
        if self.trainer._made_process_group:
            distributed.destroy_process_group()


WINDOW = 3


class Measurement:
    """What the micro-steps of a trial take each way, from rounds of one window each."""

    def __init__(self, trial: Trial, memory_bytes: float = math.inf) -> None:
        """Looks which ways there are.

        Args:
            trial: What to run; its model is trained on a little.
            memory_bytes: What a rank can spare; a way that holds more is not run.
        """
        self._trial = trial
        self._held_bytes = {way: trial.held_bytes(way) for way in trial.ways}
        self._too_large = {way: held for way, held in self._held_bytes.items() if held > memory_bytes}
        self._ways = [way for way in trial.ways if way not in self._too_large]
        self._seconds: dict[tuple[Way, int], list[list[float]]] = defaultdict(list)

    def add_round(self) -> None:
        """Times the micro-steps of a window of one, and of a window of three each way, in turns."""
        for way, accum in [(NOTHING_WAITS, 1), *((way, WINDOW) for way in self._ways)]:
            self._seconds[way, accum].append(_time_window(self._trial, way, accum))

    def figures(self) -> Figures:
        """Returns the same on all ranks: a micro-step's seconds are its median, in the mean over the ranks.

        The first round is a warm-up and does not count; there must be another.
        """
        medians = {
            key: [statistics.median(step) for step in zip(*windows[1:], strict=True)]
            for key, windows in self._seconds.items()
        }
        of_ranks: list[dict[tuple[Way, int], list[float]]] = [medians] * distributed.get_world_size()
        dist.all_gather_object(of_ranks, medians)
        means = {
            key: [statistics.fmean(step) for step in zip(*(each[key] for each in of_ranks), strict=True)]
            for key in medians
        }
        (alone_s,) = means[NOTHING_WAITS, 1]
        costs = {}
        for way in self._ways:
            first_s, inner_s, boundary_s = means[way, WINDOW]
            costs[way] = Cost(first_s, inner_s, boundary_s, self._held_bytes[way])
        return Figures(alone_s, costs, self._trial.samples_per_micro_step, self._too_large)


def _time_window(trial: Trial, way: Way, accum: int) -> list[float]:
    """Returns the seconds of each micro-step."""
    trial.configure(way, accum)
    distributed.barrier()
    moments = [time.perf_counter()]
    for step in range(accum):
        trial.micro_step(step)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        moments.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(moments)]
