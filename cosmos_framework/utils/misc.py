# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Batches and random numbers: what trainer, checkpoint and callbacks all need."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from cosmos_framework.utils import distributed


def to(data: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Moves the tensors of a batch.

    Args:
        data: The batch.
        device: Where to.

    Returns:
        A new dict; values that are no tensors are the same objects as before.
    """
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in data.items()
    }


def batch_size(data: Mapping[str, Any]) -> int:
    """Returns the number of samples in a batch: the length of its first tensor that has a dimension; 0 without one."""
    return next((len(value) for value in data.values() if isinstance(value, torch.Tensor) and value.ndim), 0)


def set_random_seed(seed: int, by_rank: bool = False) -> None:
    """Seeds the generators of Python and torch (CPU and CUDA).

    Args:
        seed: The seed.
        by_rank: Whether each rank gets a seed of its own: `seed` plus its rank.
    """
    seed += distributed.get_rank() if by_rank else 0
    random.seed(seed)
    torch.manual_seed(seed)


def get_random_state() -> dict[str, Any]:
    """Returns the state of the generators that `set_random_seed` seeds, those of this process's device."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts the generators where `get_random_state` found them.

    Args:
        state: What that returned, in a process with the same kind of device.
    """
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def repeatable_cpu_numerics() -> Iterator[None]:
    """Within the block a CPU run gives the same bits each time; on CUDA, where that costs speed, nothing changes.

    Operations that have no such implementation warn.
    """
    if torch.cuda.is_available():
        yield
        return
    mode: Any = torch.utils.deterministic
    level_before, fill_before = torch.get_deterministic_debug_mode(), mode.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    # A debugging aid of that mode would write NaN into every new buffer, and FSDP makes many.
    mode.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(level_before)
        mode.fill_uninitialized_memory = fill_before
