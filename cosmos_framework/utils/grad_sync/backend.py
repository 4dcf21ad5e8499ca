# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""What each kind of data parallelism promises to a window, and the words for telling people about it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from .accum_mode import AccumMode


class HeldBackGradientError(RuntimeError):
    """The optimizer would miss, or mix up, gradients that have not reached every rank."""


@dataclass(frozen=True)
class Settings:
    """What a window is asked to do; see `GradSync`.

    Raises:
        ValueError: the memory budget and the mode do not go together, or the budget is none.
    """

    mode: AccumMode = AccumMode.ALL_REDUCE
    reshard: bool = True
    reduce_unused_params: bool = False
    memory_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.memory_bytes >= 0:
            raise ValueError(
                f"fsdp_accum_memory_gib={self.memory_bytes / 2**30:g} is no budget: give GiB per rank, 0 or more "
                "(inf: as much as it takes)"
            )
        if self.memory_bytes and self.mode is not AccumMode.AUTO:
            raise ValueError(
                f"fsdp_accum_memory_gib={self.memory_bytes / 2**30:g} has no effect with "
                f"fsdp_accum_mode={self.mode.value!r}: set fsdp_accum_mode='auto', or leave the budget at 0"
            )
        if self.mode is AccumMode.AUTO and not self.reshard:
            raise ValueError(
                "fsdp_accum_reshard=False has no effect with fsdp_accum_mode='auto', which decides for each module: "
                "leave it at True, or set fsdp_accum_mode='grad_sync'"
            )


@dataclass(frozen=True)
class Plan:
    """What one backend does with a window, for people.

    Attributes:
        backend: "ddp", "fsdp2" or "no_sync".
        where: the modules and the mesh that this is about.
        each_micro_step: the collectives that run in every micro-step.
        waits: the collectives that run once a window, at its boundary.
        gathered_once: whether parameters are gathered by a window's first micro-step alone.
        no_effect: why the mode saves nothing here and what would; empty if it does save something.
        held_bytes: bytes of gradient that each rank holds from the first micro-step to the boundary, beyond what mode
            "none" holds.
        regathers: by mesh dimension, number and bytes of the all-gathers that each backward would run if parameters
            did not stay gathered.
        gathered_bytes: bytes of parameters that each rank keeps gathered from the first micro-step to the boundary.
        notes: what else whoever runs this should know, each a sentence with its remedy.
    """

    backend: str
    where: str
    each_micro_step: tuple[str, ...]
    waits: tuple[str, ...]
    gathered_once: bool = False
    no_effect: str = ""
    held_bytes: int = 0
    gathered_bytes: int = 0
    regathers: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        runs = " and ".join(self.each_micro_step) or "nothing"
        line = f"{self.backend} ({self.where}): {runs} in each micro-step"
        if self.waits:
            line += f"; once a window {' and '.join(self.waits)}, holding {self.held_bytes / 2**20:.1f} MiB per rank"
        if self.gathered_once:
            line += f"; parameters stay gathered inside a window, {self.gathered_bytes / 2**20:.1f} MiB per rank"
        return line + (f"; {self.no_effect}" if self.no_effect else "")


class Backend(Protocol):
    """The part of a model that one kind of parallelism synchronises, for the time of one window.

    A backend keeps no module alive: it may outlive the model in a window that nobody ends.
    """

    def micro_step(self, boundary: bool) -> AbstractContextManager[None]:
        """Lets the collectives of a forward and backward wait, or run at the boundary; restores every flag."""
        ...

    def close_window(self) -> None:
        """Sends what the boundary's backward left behind.

        Raises:
            HeldBackGradientError: the gradients are not what mode "none" would have left.
        """
        ...

    def held_back(self) -> dict[str, int]:
        """Names the parameters whose gradient has not reached every rank, with the bytes held on this rank."""
        ...

    def discard(self, failed: bool) -> None:
        """Forgets what is held back; `failed` says that an exception cut a micro-step short."""
        ...

    def remarks(self) -> tuple[str, ...]:
        """Says what was amiss in the blocks so far, each a sentence with its remedy."""
        ...

    def plans(self) -> list[Plan]:
        """Says what runs in each micro-step, what waits, and what has no effect and why, for each part apart."""
        ...
