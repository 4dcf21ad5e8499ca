# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Gradient clipping by the true global norm, whatever the mesh."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cosmos_framework.model._base import ImaginaireModel
from cosmos_framework.utils import distributed
from cosmos_framework.utils.callback import Callback


class GradClip(Callback):
    """Scales all gradients by one factor where their global L2 norm exceeds `clip_norm`.

    The norm before clipping is left in `trainer.metrics["grad_norm"]`.
    """

    def __init__(self, clip_norm: float = 1.0, force_finite: bool = True) -> None:
        """Takes note of the limit.

        Args:
            clip_norm: The largest norm that gradients may have.
            force_finite: Whether NaN and infinity in a gradient become 0. If not, they pass through, and a NaN
                anywhere makes every gradient NaN.
        """
        self._clip_norm = clip_norm
        self._force_finite = force_finite

    @torch.no_grad()
    def on_before_optimizer_step(
        self,
        model: ImaginaireModel,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        grad_scaler: torch.amp.GradScaler,
        iteration: int = 0,
    ) -> None:
        """Clips.

        Raises:
            HeldBackGradientError: The window is still open: the norm would miss gradients.
        """
        distributed.require_nothing_held_back(model, "gradient clipping")
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        if not parameters:
            return
        norm = global_grad_norm(parameters)
        if self._force_finite and not torch.isfinite(norm):
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            norm = global_grad_norm(parameters)
        for group in _by_mesh(parameters).values():
            torch.nn.utils.clip_grads_with_norm_(group, self._clip_norm, norm)
        self.trainer.metrics["grad_norm"] = norm.item()


def global_grad_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Computes the L2 norm of the gradients as if one process held them all.

    Args:
        parameters: All with a gradient, which is reduced over the ranks. Plain gradients are taken to be the same on
            all ranks (DDP); sharded ones are summed over their mesh, replicas counted once.

    Returns:
        A scalar, the same on all ranks.
    """
    norms = []
    for group in _by_mesh(parameters).values():
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        # get_total_norm leaves a sum over shards pending.
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return torch.linalg.vector_norm(torch.stack(norms))


def _by_mesh(parameters: Iterable[torch.nn.Parameter]) -> dict[Any, list[torch.nn.Parameter]]:
    """torch computes norms within one mesh only."""
    groups: dict[Any, list[torch.nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return groups
