# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""One model under one parallelism with the trainer that trains it; its windows, how long they take, what they weigh."""

from __future__ import annotations

import ctypes
import itertools
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from hydra.utils import get_object
from torch.distributed.tensor import DTensor

from cosmos_framework.scripts.train import build_dataloaders
from cosmos_framework.trainer import ImaginaireTrainer
from cosmos_framework.utils import distributed, misc, parallelism
from cosmos_framework.utils.config import check_config, load_config
from two_hosts.cases import Case
from two_hosts.network import sent_bytes

MICRO_BATCHES = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """One window, over all ranks.

    Attributes:
        seconds: From a barrier until the slowest rank has stepped its optimizer.
        steps_s: Seconds of each micro-step, means over the ranks: one that is ahead waits in the next sync.
        link_bytes: Bytes that both hosts sent over the link, as their interfaces count them: headers,
            acknowledgements and the closing barrier included.
    """

    seconds: float
    steps_s: tuple[float, ...]
    link_bytes: int

    @property
    def inner_s(self) -> float:
        """Mean seconds of the micro-steps between the first and the boundary, of which there must be one."""
        return statistics.mean(self.steps_s[1:-1])


@dataclass(frozen=True)
class Weight:
    """What a window adds to a rank, the rank that it adds most to.

    Attributes:
        held_bytes: Gradient that is held back just before the boundary.
        gathered_bytes: Parameters that are gathered just before the boundary.
        peak_bytes: Largest resident memory inside the window, above the one before it.
    """

    held_bytes: int
    gathered_bytes: int
    peak_bytes: int


class Trainee:
    """A model, its trainer, and micro-batches to train it with."""

    def __init__(self, overrides: Sequence[str]) -> None:
        """Builds them as `cosmos-train` does; the process group exists already.

        Args:
            overrides: Of the configuration, in Hydra's grammar.

        Raises:
            ConfigError: The configuration cannot be trained.
        """
        config = load_config(list(overrides))
        check_config(config, world_size=distributed.get_world_size())
        loader, _ = build_dataloaders(config)
        self.trainer = ImaginaireTrainer(config)  # type: ignore[arg-type]
        self.model = get_object(config.model._target_)(config.model, config.dataset)
        self.model.on_train_start()
        self._parallel = parallelism.parallelize(self.model, config)  # type: ignore[arg-type]
        self._optimizer, self._scheduler = self.model.init_optimizer_scheduler(config.optimizer, config.scheduler)
        self._grad_scaler = torch.amp.GradScaler("cpu", enabled=False)
        # Drawn once: reading data is no part of a window here.
        self._micro_batches = list(itertools.islice(loader, MICRO_BATCHES))
        self._windows = 0

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, as one rank would hold them unsharded."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    @property
    def samples_per_micro_step(self) -> int:
        """Samples of a micro-step, over all ranks."""
        return misc.batch_size(self._micro_batches[0]) * distributed.get_world_size()

    def configure(self, case: Case) -> None:
        """Makes the following windows those of `case`."""
        trainer = self.trainer.config.trainer
        trainer.grad_accum_iter = case.accum
        trainer.fsdp_accum_mode = case.mode
        trainer.fsdp_accum_reshard = case.reshard
        trainer.fsdp_accum_memory_gib = case.memory_gib or 0.0

    def time_window(self, case: Case) -> Timing:
        """Runs one window of `case` and times it."""
        self.configure(case)
        distributed.barrier()
        sent_before = sent_bytes()
        moments = [time.perf_counter()]
        for step in range(case.accum):
            self.micro_step(step)
            moments.append(time.perf_counter())
        distributed.barrier()
        sent = sent_bytes() - sent_before if distributed.get_rank() in _one_rank_a_host() else 0
        own_steps_s = [end - begin for begin, end in itertools.pairwise(moments)]
        seconds, steps_s, sents = zip(*_from_all_ranks((sum(own_steps_s), own_steps_s, sent)), strict=True)
        return Timing(max(seconds), tuple(map(statistics.mean, zip(*steps_s, strict=True))), sum(sents))

    def weigh_window(self, case: Case) -> Weight:
        """Runs one window of `case` and weighs it; looking costs time, so that it is not timed."""
        self.configure(case)
        distributed.barrier()
        peak_bytes = start_of_peak()
        for step in range(case.accum - 1):
            self.micro_step(step)
        sync = distributed.grad_sync_of(self.model)
        held_bytes = sum(sync.held_back().values()) if sync is not None else 0
        gathered_bytes = self._gathered_bytes()
        self.micro_step(case.accum - 1)
        weights = _from_all_ranks((held_bytes, gathered_bytes, peak_bytes()))
        return Weight(*map(max, zip(*weights, strict=True)))

    def micro_step(self, step: int) -> None:
        """Runs the window's micro-step number `step`, from 0; the last one steps the optimizer."""
        micro_batch = misc.to(self._micro_batches[step % MICRO_BATCHES], distributed.device())
        *_, open_steps = self.trainer.training_step(
            self._parallel, self._optimizer, self._scheduler, self._grad_scaler, micro_batch, self._windows, step
        )
        self._windows += open_steps == 0

    def _gathered_bytes(self) -> int:
        if isinstance(self._parallel, distributed.DistributedDataParallel):
            return 0
        gathered = [parameter for parameter in self.model.parameters() if not isinstance(parameter, DTensor)]
        return sum(parameter.numel() * parameter.element_size() for parameter in gathered)


def start_of_peak() -> Callable[[], int]:
    """Returns a function that tells how far resident memory has risen above what it is now, in bytes."""
    _return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here, see proc(5)
    before = _status_bytes("VmRSS")

    def rise() -> int:
        risen = _status_bytes("VmHWM") - before
        _keep_freed_memory()
        return risen

    return rise


# See mallopt(3).
_LIBC, _TRIM_THRESHOLD, _MMAP_THRESHOLD = ctypes.CDLL("libc.so.6"), -1, -3


def _return_freed_memory() -> None:
    """Makes malloc give tensors back to the kernel at once, or a peak inside of what it keeps would not be seen."""
    _LIBC.mallopt(_MMAP_THRESHOLD, 2**14)
    _LIBC.malloc_trim(0)


def _keep_freed_memory() -> None:
    """Makes malloc as it is after some use, when it has learned that large tensors come again."""
    _LIBC.mallopt(_MMAP_THRESHOLD, 2**25)
    _LIBC.mallopt(_TRIM_THRESHOLD, 2**26)


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _one_rank_a_host() -> range:
    return range(0, distributed.get_world_size(), distributed.get_world_size() // 2)


def _from_all_ranks(value: T) -> list[T]:
    values: list[T] = [value] * distributed.get_world_size()
    dist.all_gather_object(values, value)
    return values
