# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""What a callback may do, and the group that calls them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from hydra.utils import instantiate

if TYPE_CHECKING:
    from cosmos_framework.model._base import ImaginaireModel
    from cosmos_framework.trainer import ImaginaireTrainer
    from cosmos_framework.utils.config import Config


class Callback:
    """Base of all callbacks; every hook does nothing until a subclass overrides it.

    In all hooks `iteration` is the number of optimizer steps done so far, `model` the model without a DDP wrapper and
    `loss` that of one micro-batch, not divided by `trainer.grad_accum_iter`.

    Attributes:
        config: The whole configuration; set before the first hook is called.
        trainer: The trainer that calls; set before the first hook is called.
    """

    config: Config
    trainer: ImaginaireTrainer

    def on_optimizer_init_start(self) -> None:
        """Called once, before the model builds its optimizer and scheduler."""

    def on_optimizer_init_end(self) -> None:
        """Called once, after optimizer, scheduler and gradient scaler are built."""

    def on_load_checkpoint_start(self, model: ImaginaireModel) -> None:
        """Called before a checkpoint is looked for."""

    def on_load_checkpoint(self, model: ImaginaireModel, state_dict: dict[str, Any]) -> None:
        """Called before a checkpoint is read: what a callback adds to `state_dict` is filled in place.

        Args:
            model: The model that is about to be filled.
            state_dict: As in `on_save_checkpoint`; add tensors or `Stateful` objects under the same names as there.
        """

    def on_load_checkpoint_end(
        self, model: ImaginaireModel, iteration: int = 0, checkpoint_path: str | None = None
    ) -> None:
        """Called when a checkpoint has been read, or none was found: `checkpoint_path` is None then."""

    def on_train_start(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Called once, when everything is loaded and before the first micro-batch is."""

    def on_before_dataloading(self, iteration: int = 0) -> None:
        """Called before each micro-batch is fetched."""

    def on_after_dataloading(self, iteration: int = 0) -> None:
        """Called after each micro-batch is fetched, or could not be."""

    def on_training_step_start(self, model: ImaginaireModel, data: dict[str, Any], iteration: int = 0) -> None:
        """Called before every micro-step (not once a window, though `on_training_step_end` is)."""

    def on_training_step_batch_start(self, model: ImaginaireModel, data: dict[str, Any], iteration: int = 0) -> None:
        """Called before every micro-step, right after `on_training_step_start`."""

    def on_before_forward(self, iteration: int = 0) -> None:
        """Called before every forward, inside the block that decides what synchronises."""

    def on_after_forward(self, iteration: int = 0) -> None:
        """Called after every forward, inside that block."""

    def on_before_backward(self, model: ImaginaireModel, loss: torch.Tensor, iteration: int = 0) -> None:
        """Called before every backward, inside that block."""

    def on_after_backward(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Called after every backward and the model's own hook, inside that block."""

    def on_before_optimizer_step(
        self,
        model: ImaginaireModel,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        grad_scaler: torch.amp.GradScaler,
        iteration: int = 0,
    ) -> None:
        """Called at the boundary: gradients are reduced over the ranks and unscaled."""

    def on_before_zero_grad(
        self,
        model: ImaginaireModel,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        iteration: int = 0,
    ) -> None:
        """Called at the boundary, after optimizer and scheduler have stepped."""

    def on_training_step_batch_end(
        self,
        model: ImaginaireModel,
        data_batch: dict[str, Any],
        output_batch: dict[str, Any],
        loss: torch.Tensor,
        iteration: int = 0,
    ) -> None:
        """Called after every micro-step; at the boundary the optimizer has stepped, but `iteration` counts it later."""

    def on_training_step_end(
        self,
        model: ImaginaireModel,
        data_batch: dict[str, Any],
        output_batch: dict[str, Any],
        loss: torch.Tensor,
        iteration: int = 0,
    ) -> None:
        """Called once a window, after the checkpoint if one is due; `iteration` counts the step just done.

        Args:
            model: The model.
            data_batch: The window's last micro-batch.
            output_batch: What the model gave for it.
            loss: Its loss.
            iteration: Number of optimizer steps done.
        """

    def on_validation_start(
        self, model: ImaginaireModel, dataloader_val: Iterable[dict[str, Any]], iteration: int = 0
    ) -> None:
        """Called before each validation."""

    def on_validation_step_start(self, model: ImaginaireModel, data: dict[str, Any], iteration: int = 0) -> None:
        """Called before each batch of a validation."""

    def on_validation_step_end(
        self,
        model: ImaginaireModel,
        data_batch: dict[str, Any],
        output_batch: dict[str, Any],
        loss: torch.Tensor,
        iteration: int = 0,
    ) -> None:
        """Called after each batch of a validation."""

    def on_validation_end(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Called after each validation."""

    def on_save_checkpoint_start(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Called before a checkpoint is written."""

    def on_save_checkpoint(self, model: ImaginaireModel, state_dict: dict[str, Any]) -> None:
        """Called when a checkpoint is put together: what a callback adds to `state_dict` is written with it.

        Args:
            model: The model that is written.
            state_dict: Parts of the checkpoint by name; values are whatever torch.distributed.checkpoint takes.
        """

    def on_save_checkpoint_end(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Called when training may go on after a checkpoint."""

    def on_save_checkpoint_success(self, iteration: int = 0, elapsed_time: float = 0) -> None:
        """Called when a checkpoint is complete on disk; `elapsed_time` in seconds."""

    def on_train_end(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Called once, after the last step and its checkpoint."""

    def on_app_end(self) -> None:
        """Called once, when every rank is done."""


class CallBackGroup:
    """The configured callbacks: `group.on_x(...)` calls `on_x(...)` of each, in the order of the configuration."""

    def __init__(self, config: Config, trainer: ImaginaireTrainer) -> None:
        """Builds the callbacks of `trainer.callbacks`.

        Args:
            config: The whole configuration; an entry of `trainer.callbacks` that is null is left out.
            trainer: The trainer that will call.

        Raises:
            TypeError: An entry builds something that is no `Callback`.
        """
        self._callbacks: list[Callback] = []
        for name, callback_config in config.trainer.callbacks.items():
            if callback_config is None:
                continue
            callback = instantiate(callback_config)
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"trainer.callbacks.{name} builds a {type(callback).__name__}, which is no "
                    "cosmos_framework.utils.callback.Callback; set its _target_ to a subclass."
                )
            callback.config = config
            callback.trainer = trainer
            self._callbacks.append(callback)

    def __getattr__(self, hook: str) -> Callable[..., None]:
        if not hasattr(Callback, hook):
            raise AttributeError(f"Callback has no hook {hook!r}")

        def call_each(*args: Any, **kwargs: Any) -> None:
            for callback in self._callbacks:
                getattr(callback, hook)(*args, **kwargs)

        return call_each
