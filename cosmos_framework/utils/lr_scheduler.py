# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Learning rate schedules that torch has no class for."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(
    optimizer: torch.optim.Optimizer, warmup_iter: int, max_iter: int, min_factor: float = 0.0
) -> LambdaLR:
    """Raises the learning rate linearly, then lowers it along half a cosine.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without restarts.

    Args:
        optimizer: The optimizer; its learning rate is the highest that is reached.
        warmup_iter: Optimizer steps of the warm-up; step i of it has (i + 1) / `warmup_iter` of the learning rate.
        max_iter: Optimizer step at which the cosine ends. From there on the learning rate stays.
        min_factor: The learning rate there, as a fraction of the highest.
    """

    def factor(iteration: int) -> float:
        if iteration < warmup_iter:
            return (iteration + 1) / warmup_iter
        progress = min((iteration - warmup_iter) / max(max_iter - warmup_iter, 1), 1.0)
        return min_factor + (1 - min_factor) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, factor)
