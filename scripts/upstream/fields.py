# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""The settings that the pull request adds to upstream's `[trainer]`: one entry here is one field there, everywhere."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """One setting of the trainer.

    Attributes:
        name: its name, which is `ddp_sync_grad`'s keyword as well.
        default: its default, as Python source; its type is the field's.
        choices: the values that it may have, if it is a string. A number is 0 or more.
        summary: what it does, in one line of a list.
        details: what each value costs and when to choose it, in full sentences.
    """

    name: str
    default: str
    choices: tuple[str, ...]
    summary: str
    details: str

    @property
    def toml_default(self) -> str:
        """The default as TOML writes it."""
        return self.default.lower()

    @property
    def type(self) -> str:
        """The name of the default's type."""
        return type(ast.literal_eval(self.default)).__name__


FIELDS = (
    Field(
        name="fsdp_accum_mode",
        default='"all_reduce"',
        choices=("all_reduce", "grad_sync", "none", "auto"),
        summary="Which gradient collectives wait for the last micro-batch of an accumulation window.",
        details=(
            '"all_reduce": the all-reduce between HSDP replicas waits, which saves nothing without replicas. '
            '"grad_sync": the reduce-scatter waits too, which saves on every mesh and holds one unsharded gradient per '
            'rank. "auto": "all_reduce", and more of it for as many FSDP2 modules as fsdp_accum_memory_gib allows. '
            '"none": every micro-batch synchronizes. DDP has one all-reduce, which waits unless the mode is "none".'
        ),
    ),
    Field(
        name="fsdp_accum_reshard",
        default="True",
        choices=(),
        summary="Whether FSDP2 reshards the parameters after each micro-batch of a window.",
        details=(
            "False keeps them gathered until the last micro-batch: the other ones gather nothing, for the memory of "
            "one unsharded copy of the parameters."
        ),
    ),
    Field(
        name="fsdp_reduce_unused_params",
        default="False",
        choices=(),
        summary="Whether the ranks may use different parameters of one FSDP2 module in a micro-batch.",
        details=(
            "True reduces the parameters that a rank did not use as zeros, as find_unused_parameters does for DDP; "
            "their gradient stays None where no rank used them."
        ),
    ),
    Field(
        name="fsdp_accum_memory_gib",
        default="0.0",
        choices=(),
        summary='What fsdp_accum_mode "auto" may hold on each rank beyond "all_reduce", in GiB.',
        details=(
            "It goes to the FSDP2 modules whose deferred reduce-scatter, or whose gathered parameters, save the most "
            "time per byte."
        ),
    ),
)
