# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Which collectives wait for the boundary of a gradient-accumulation window."""

from __future__ import annotations

from enum import Enum


class AccumMode(str, Enum):
    """What waits until a window's last micro-step.

    Attributes:
        ALL_REDUCE: HSDP's all-reduce across replicas waits; the reduce-scatter runs in each micro-step. Costs one
            sharded gradient per rank in the reduce dtype. Saves nothing where there are no replicas (1-D FSDP).
        GRAD_SYNC: reduce-scatter and all-reduce both wait. Costs one whole, unsharded gradient per rank in the
            reduce dtype, which can exceed the memory of a large model. Saves something on every mesh.
        NONE: every micro-step synchronises. Costs and saves nothing.
        AUTO: all_reduce, and within a memory budget what else saves the most time per byte held: the reduce-scatter of
            some modules waits, the parameters of some stay gathered inside a window.

    DDP has one collective, an all-reduce of what is in `grad` anyway: it waits in all of them but NONE, at no memory.
    """

    ALL_REDUCE = "all_reduce"
    GRAD_SYNC = "grad_sync"
    NONE = "none"
    AUTO = "auto"

    @classmethod
    def parse(cls, value: str | AccumMode) -> AccumMode:
        """Returns the mode that a configuration means.

        Raises:
            ValueError: `value` is no mode; the message lists those that are.
        """
        try:
            return cls(value)
        except ValueError:
            choices = ", ".join(repr(mode.value) for mode in cls)
            raise ValueError(f"fsdp_accum_mode={value!r} is unknown: choose one of {choices}") from None
