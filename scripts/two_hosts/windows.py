# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Windows of a training: how long each takes, and what it weighs."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cosmos_framework.trainer.trial import Trial
from cosmos_framework.utils import distributed
from cosmos_framework.utils.accum_cost import Way
from two_hosts.cases import Case
from two_hosts.network import sent_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """One window, over all ranks.

    Attributes:
        seconds: From a barrier until the slowest rank has stepped its optimizer.
        inner_s: Mean seconds of the micro-steps between the first and the boundary, on the slowest rank, for which
            the others wait at the boundary; None if there is none between them.
        link_bytes: Bytes that both hosts sent over the link, as their interfaces count them: headers,
            acknowledgements and the closing barrier included.
    """

    seconds: float
    inner_s: float | None
    link_bytes: int


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


def parameter_bytes(trial: Trial) -> int:
    """Returns the bytes of all parameters, as one rank would hold them unsharded."""
    return sum(parameter.numel() * parameter.element_size() for parameter in trial.model.parameters())


def time_window(trial: Trial, case: Case) -> Timing:
    """Runs one window of `case` and times it.

    Args:
        trial: Of the case's parallelism.
        case: Which mode, and how many micro-steps.
    """
    _configure(trial, case)
    distributed.barrier()
    sent_before = sent_bytes()
    moments = [time.perf_counter()]
    for step in range(case.accum):
        trial.micro_step(step)
        moments.append(time.perf_counter())
    distributed.barrier()
    sent = sent_bytes() - sent_before if os.environ["LOCAL_RANK"] == "0" else 0
    inner_s = (moments[-2] - moments[1]) / (case.accum - 2) if case.accum > 2 else None
    seconds, inners_s, sents = zip(*_from_all_ranks((moments[-1] - moments[0], inner_s, sent)), strict=True)
    return Timing(max(seconds), None if inner_s is None else max(inners_s), sum(sents))


def weigh_window(trial: Trial, case: Case) -> Weight:
    """Runs one window of `case` and weighs it; looking costs time, so that it is not timed.

    Args:
        trial: Of the case's parallelism.
        case: Which mode, and how many micro-steps.
    """
    _configure(trial, case)
    distributed.barrier()
    peak_bytes = start_of_peak()
    for step in range(case.accum - 1):
        trial.micro_step(step)
    sync = distributed.grad_sync_of(trial.model)
    held_bytes = sum(sync.held_back().values()) if sync is not None else 0
    gathered_bytes = _gathered_bytes(trial)
    trial.micro_step(case.accum - 1)
    weights = _from_all_ranks((held_bytes, gathered_bytes, peak_bytes()))
    return Weight(*map(max, zip(*weights, strict=True)))


def _configure(trial: Trial, case: Case) -> None:
    trial.configure(Way(case.mode, case.reshard), case.accum, case.memory_gib or 0.0)


def _gathered_bytes(trial: Trial) -> int:
    """Counts the parameters that are not in shards at the moment, where there are shards at all."""
    if isinstance(trial.parallel_model, distributed.DistributedDataParallel):
        return 0
    gathered = [parameter for parameter in trial.model.parameters() if not isinstance(parameter, DTensor)]
    return sum(parameter.numel() * parameter.element_size() for parameter in gathered)


def start_of_peak() -> Callable[[], int]:
    """Returns a function that tells how far resident memory has risen above what it is now, in bytes."""
    _return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here, see proc(5)
    before = _status_bytes("VmRSS")

    def rise() -> int:
        risen = _status_bytes("VmHWM") - before
        keep_freed_memory()
        return risen

    return rise


# See mallopt(3).
_LIBC, _TRIM_THRESHOLD, _MMAP_THRESHOLD = ctypes.CDLL("libc.so.6"), -1, -3


def _return_freed_memory() -> None:
    """Makes malloc give tensors back to the kernel at once, or a peak inside of what it keeps would not be seen."""
    _LIBC.mallopt(_MMAP_THRESHOLD, 2**14)
    _LIBC.malloc_trim(0)


def keep_freed_memory() -> None:
    """Makes malloc as it is after some use, when it has learned that large tensors come again."""
    _LIBC.mallopt(_MMAP_THRESHOLD, 2**25)
    _LIBC.mallopt(_TRIM_THRESHOLD, 2**26)


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _from_all_ranks(value: T) -> list[T]:
    values: list[T] = [value] * distributed.get_world_size()
    dist.all_gather_object(values, value)
    return values
