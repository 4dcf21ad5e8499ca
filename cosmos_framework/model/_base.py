# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""The class that every trainable model derives from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from hydra.utils import instantiate

if TYPE_CHECKING:
    from cosmos_framework.utils.config import OptimizerConfig, SchedulerConfig


class ImaginaireModel(torch.nn.Module):
    """A model that computes its own losses and builds its own optimizer.

    Subclasses implement `training_step` and `validation_step`; everything else has a default. The networks are
    ordinary children. The model itself is never sharded, since `training_step` is not `forward`: `fsdp_modules` names
    the modules that are.
    """

    def training_step(self, data: dict[str, Any], iteration: int) -> tuple[dict[str, Any], torch.Tensor]:
        """Computes the loss of one micro-batch.

        Args:
            data: The micro-batch, its tensors already on the model's device.
            iteration: Number of optimizer steps done so far.

        Returns:
            What callbacks may want to see, by name, and the loss, a scalar: the mean over the micro-batch.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement training_step(data, iteration)")

    def validation_step(self, data: dict[str, Any], iteration: int) -> tuple[dict[str, Any], torch.Tensor]:
        """Computes the loss of one held-out batch; called without gradients and in evaluation mode.

        Args:
            data: The batch, its tensors already on the model's device.
            iteration: Number of optimizer steps done so far.

        Returns:
            What callbacks may want to see, by name, and the loss, a scalar.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement validation_step(data, iteration)")

    def init_optimizer_scheduler(
        self, optimizer_config: OptimizerConfig, scheduler_config: SchedulerConfig
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Builds the optimizer over all parameters, and its learning rate schedule.

        Called once the model is sharded, so that the optimizer holds the sharded parameters.

        Args:
            optimizer_config: Hydra config whose `_target_` takes the parameters as its first argument.
            scheduler_config: Hydra config whose `_target_` takes the optimizer as its first argument.

        Returns:
            The optimizer and the scheduler, which the trainer steps once a window.
        """
        # Plain lists and dicts: what the two keep goes into checkpoints.
        optimizer = instantiate(optimizer_config, self.parameters(), _convert_="all")
        return optimizer, instantiate(scheduler_config, optimizer, _convert_="all")

    def fsdp_modules(self) -> Iterator[torch.nn.Module]:
        """Names the modules that become FSDP groups, inner ones before the ones around them.

        The default takes each child network: first every entry of its outermost `ModuleList`s (its blocks), then the
        network itself, whose group holds the rest (embeddings, heads). Together they must cover every parameter.

        Yields:
            Modules for `torch.distributed.fsdp.fully_shard`, each with at least one parameter and a `forward`.
        """
        for network in self.children():
            yield from filter(_has_parameters, _blocks(network))
            # torch refuses to shard a list, which has no forward; its entries stand for it.
            if _has_parameters(network) and not isinstance(network, torch.nn.ModuleList):
                yield network

    def on_train_start(self, memory_format: torch.memory_format = torch.preserve_format) -> None:
        """Prepares the model: it is on its device, and neither wrapped nor sharded yet.

        Args:
            memory_format: The memory format that it was moved with.
        """

    def on_after_backward(self, iteration: int = 0) -> None:
        """Called after every backward, still inside the block that decides what synchronises.

        Gradients of an open window may be held back there: `p.grad` need not be what the optimizer will see.

        Args:
            iteration: Number of optimizer steps done so far.
        """

    def on_before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, iteration: int
    ) -> None:
        """Called at the boundary, after the callbacks' hook of that name; gradients are complete and unscaled.

        Args:
            optimizer: The optimizer that is about to step.
            scheduler: Its scheduler.
            iteration: Number of optimizer steps done so far.
        """

    def on_before_zero_grad(
        self, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, iteration: int
    ) -> None:
        """Called at the boundary, after the optimizer and the scheduler have stepped.

        Args:
            optimizer: The optimizer whose gradients are about to be cleared.
            scheduler: Its scheduler.
            iteration: Number of optimizer steps done before this one.
        """


def _blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields the entries of the outermost `ModuleList`s at or below `module`."""
    if isinstance(module, torch.nn.ModuleList):
        yield from module
    else:
        for child in module.children():
            yield from _blocks(child)


def _has_parameters(module: torch.nn.Module) -> bool:
    return any(True for _ in module.parameters())
