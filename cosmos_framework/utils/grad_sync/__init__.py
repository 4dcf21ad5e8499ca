# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation that synchronises once a window, exactly, under DDP and FSDP2.

Read in this order: `accum_mode` (what may wait), `grad_sync` (the window), `backend` (what each kind of parallelism
promises), `fsdp2` (the one rule that keeps FSDP2 exact), `choice` (what a memory budget is spent on) and `ddp`. Needs
torch and the standard library alone.
"""

from .accum_mode import AccumMode
from .backend import HeldBackGradientError, Plan, Settings
from .fsdp2_state import UnsupportedTorchError
from .grad_sync import GradSync

__all__ = ["AccumMode", "GradSync", "HeldBackGradientError", "Plan", "Settings", "UnsupportedTorchError"]
