# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""The training loop.

A *micro-step* is one forward and backward; `trainer.grad_accum_iter` of them and one optimizer step are a *window*; the
*boundary* is the window's last micro-step, at which the ranks' gradients are synchronised.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf

from cosmos_framework.checkpoint.dcp import DistributedCheckpointer, TrainingProgress
from cosmos_framework.model._base import ImaginaireModel
from cosmos_framework.utils import distributed, misc, parallelism
from cosmos_framework.utils.callback import CallBackGroup

if TYPE_CHECKING:
    from cosmos_framework.utils.config import Config


class ImaginaireTrainer:
    """Trains a model on all ranks of the process group, with callbacks, validation and checkpoints.

    Attributes:
        config: The whole configuration.
        callbacks: The configured callbacks; each hook is a method.
        checkpointer: Writes and reads the checkpoints in the job's folder.
        progress: What this run has done so far, over all its restarts.
        metrics: Figures of the current window by name, such as "grad_norm", for callbacks to share.
    """

    def __init__(self, config: Config) -> None:
        """Joins the process group, makes the job's output folder and seeds the random numbers.

        A model that is built after this is initialised from `trainer.seed`.

        Args:
            config: The whole configuration, checked (`cosmos_framework.utils.config.check_config`).
        """
        self.config = config
        self._made_process_group = distributed.init(timeout=timedelta(seconds=config.trainer.timeout_period))
        self._write_config()
        misc.set_random_seed(config.trainer.seed, by_rank=True)
        self.metrics: dict[str, float] = {}
        self.progress = TrainingProgress()
        self.callbacks = CallBackGroup(config, self)
        self.checkpointer = DistributedCheckpointer(config.checkpoint, config.job, self.callbacks, self.progress)

    @distributed.rank0_only
    def _write_config(self) -> None:
        os.makedirs(self.config.job.path_local, exist_ok=True)
        OmegaConf.save(self.config, os.path.join(self.config.job.path_local, "config.yaml"))

    def train(
        self,
        model: ImaginaireModel,
        dataloader_train: Iterable[dict[str, Any]],
        dataloader_val: Iterable[dict[str, Any]] | None,
    ) -> None:
        """Trains until `trainer.max_iter` optimizer steps are done, from the job's latest checkpoint if there is one.

        Args:
            model: The model, neither wrapped nor sharded.
            dataloader_train: Gives this rank's micro-batches. When it ends it is started over and an open window goes
                on, so that every window has `trainer.grad_accum_iter` micro-steps. If it has `set_start_iteration`,
                that is told how many micro-batches this run has consumed before.
            dataloader_val: Gives this rank's validation batches, equally many on each rank; may be None if
                `trainer.run_validation` is false.

        Raises:
            ValueError: The configuration cannot be trained, or a loader is missing or empty.
            CheckpointError: The job's folder, or `checkpoint.load_path`, has a checkpoint that this run cannot load.
            TimeoutError: A window took longer than `trainer.timeout_period` seconds.
        """
        if self.config.trainer.run_validation and dataloader_val is None:
            raise ValueError("trainer.run_validation=true needs a dataloader_val; give one, or set it to false.")
        with misc.repeatable_cpu_numerics(), _Watchdog(self.config.trainer.timeout_period) as watchdog:
            self._train(model, dataloader_train, dataloader_val, watchdog)
        distributed.barrier()
        self.callbacks.on_app_end()
        if self._made_process_group:
            distributed.destroy_process_group()

    def _train(
        self,
        model: ImaginaireModel,
        dataloader_train: Iterable[dict[str, Any]],
        dataloader_val: Iterable[dict[str, Any]] | None,
        watchdog: _Watchdog,
    ) -> None:
        trainer = self.config.trainer
        model_ddp, optimizer, scheduler, grad_scaler = self._prepare(model)
        iteration = self.checkpointer.load(model, optimizer, scheduler, grad_scaler)
        if hasattr(dataloader_train, "set_start_iteration"):
            dataloader_train.set_start_iteration(self.progress.micro_batches)
        self.callbacks.on_train_start(model, iteration=iteration)

        last_saved = iteration
        grad_accum_iter = 0
        micro_batches = _endless(dataloader_train)
        watchdog.restart()
        while iteration < trainer.max_iter:
            data_batch = self._fetch(micro_batches, iteration)
            self.callbacks.on_training_step_start(model, data_batch, iteration=iteration)
            self.callbacks.on_training_step_batch_start(model, data_batch, iteration=iteration)
            if not model.training:
                model_ddp.train()
            output_batch, loss, grad_accum_iter = self.training_step(
                model_ddp, optimizer, scheduler, grad_scaler, data_batch, iteration, grad_accum_iter
            )
            self.progress.micro_batches += 1
            self.callbacks.on_training_step_batch_end(model, data_batch, output_batch, loss, iteration=iteration)
            if grad_accum_iter != 0:
                continue
            iteration += 1
            if iteration % self.config.checkpoint.save_iter == 0:
                self.checkpointer.save(model, optimizer, scheduler, grad_scaler, iteration)
                last_saved = iteration
            self.callbacks.on_training_step_end(model, data_batch, output_batch, loss, iteration=iteration)
            if trainer.run_validation and iteration % trainer.validation_iter == 0:
                assert dataloader_val is not None
                self.validate(model, dataloader_val, iteration=iteration)
            self.metrics.clear()
            watchdog.restart()
        if last_saved != iteration:
            self.checkpointer.save(model, optimizer, scheduler, grad_scaler, iteration)
        self.callbacks.on_train_end(model, iteration=iteration)
        self.checkpointer.finalize()

    def _prepare(
        self, model: ImaginaireModel
    ) -> tuple[
        ImaginaireModel | distributed.DistributedDataParallel,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.amp.GradScaler,
    ]:
        """Returns the model as it is trained, its optimizer over the sharded parameters, scheduler and scaler."""
        memory_format = getattr(torch, self.config.trainer.memory_format)
        model.to(distributed.device(), memory_format=memory_format)  # type: ignore[call-overload]
        model.on_train_start(memory_format)
        model_ddp = parallelism.parallelize(model, self.config)
        self.callbacks.on_optimizer_init_start()
        optimizer, scheduler = model.init_optimizer_scheduler(self.config.optimizer, self.config.scheduler)
        grad_scaler = self._init_grad_scaler()
        self.callbacks.on_optimizer_init_end()
        # Models draw differently many random numbers before they are here; training must not depend on that.
        misc.set_random_seed(self.config.trainer.seed, by_rank=True)
        return model_ddp, optimizer, scheduler, grad_scaler

    def _init_grad_scaler(self) -> torch.amp.GradScaler:
        """Only float16 gradients underflow, and only CUDA computes in it; elsewhere the scaler passes all through."""
        device_type = distributed.device().type
        args = dict(self.config.trainer.grad_scaler_args)
        needed = device_type == "cuda" and self.config.model.precision == "float16"
        return torch.amp.GradScaler(device_type, **{**args, "enabled": needed and args.get("enabled", True)})

    def _fetch(self, micro_batches: Iterator[dict[str, Any]], iteration: int) -> dict[str, Any]:
        self.callbacks.on_before_dataloading(iteration)
        try:
            data_batch = next(micro_batches)
        finally:
            self.callbacks.on_after_dataloading(iteration)
        return misc.to(data_batch, distributed.device())

    def training_step(
        self,
        model_ddp: ImaginaireModel | distributed.DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        grad_scaler: torch.amp.GradScaler,
        data: dict[str, Any],
        iteration: int = 0,
        grad_accum_iter: int = 0,
    ) -> tuple[dict[str, Any], torch.Tensor, int]:
        """Does one micro-step, and at the boundary the optimizer step.

        Args:
            model_ddp: What `parallelism.parallelize` returned.
            optimizer: The model's optimizer.
            scheduler: Its scheduler.
            grad_scaler: Scales the loss, where float16 needs that.
            data: The micro-batch, on the model's device.
            iteration: Number of optimizer steps done so far.
            grad_accum_iter: Number of micro-steps of this window done so far.

        Returns:
            What the model gave, its loss (a scalar, not divided by `trainer.grad_accum_iter`), and the number of
            micro-steps of the open window: 0 after a boundary.
        """
        trainer = self.config.trainer
        is_boundary = grad_accum_iter == trainer.grad_accum_iter - 1
        model = model_ddp.module if isinstance(model_ddp, distributed.DistributedDataParallel) else model_ddp
        with distributed.ddp_sync_grad(
            model_ddp,
            is_boundary,
            fsdp_accum_mode=trainer.fsdp_accum_mode,
            fsdp_accum_reshard=trainer.fsdp_accum_reshard,
            fsdp_reduce_unused_params=trainer.fsdp_reduce_unused_params,
            fsdp_accum_memory_gib=trainer.fsdp_accum_memory_gib,
        ):
            self.callbacks.on_before_forward(iteration=iteration)
            with parallelism.forward_precision(self.config, distributed.device().type):
                output_batch, loss = model_ddp.training_step(data, iteration)
            self.callbacks.on_after_forward(iteration=iteration)
            self.callbacks.on_before_backward(model, loss, iteration=iteration)
            grad_scaler.scale(loss / trainer.grad_accum_iter).backward()
            model.on_after_backward(iteration=iteration)
            self.callbacks.on_after_backward(model, iteration=iteration)
        if not is_boundary:
            return output_batch, loss, grad_accum_iter + 1
        # Whoever clips or logs in the hooks below must see the true gradients.
        grad_scaler.unscale_(optimizer)
        self.callbacks.on_before_optimizer_step(model, optimizer, scheduler, grad_scaler, iteration=iteration)
        model.on_before_optimizer_step(optimizer, scheduler, iteration=iteration)
        self._optimizer_step(model, optimizer, scheduler, grad_scaler, iteration=iteration)
        self.callbacks.on_before_zero_grad(model, optimizer, scheduler, iteration=iteration)
        model.on_before_zero_grad(optimizer, scheduler, iteration=iteration)
        self._zero_grad(model, optimizer, iteration)
        return output_batch, loss, 0

    def _optimizer_step(
        self,
        model: ImaginaireModel,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        grad_scaler: torch.amp.GradScaler,
        iteration: int,
    ) -> None:
        """Steps the optimizer and the scheduler; override to step them differently.

        Raises:
            HeldBackGradientError: The window is still open: the step would miss gradients.
        """
        distributed.require_nothing_held_back(model, "an optimizer step")
        grad_scaler.step(optimizer)
        grad_scaler.update()
        scheduler.step()

    def _zero_grad(self, model: ImaginaireModel, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        """Clears the gradients, and with them an open window; override to keep some."""
        sync = distributed.grad_sync_of(model)
        if sync is not None:
            sync.discard()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def validate(self, model: ImaginaireModel, dataloader_val: Iterable[dict[str, Any]], iteration: int = 0) -> None:
        """Runs the model's validation on at most `trainer.max_val_iter` batches.

        Args:
            model: The model without a DDP wrapper; it is left in evaluation mode.
            dataloader_val: Gives this rank's batches, equally many on each rank, since FSDP gathers parameters.
            iteration: Number of optimizer steps done so far.
        """
        self.callbacks.on_validation_start(model, dataloader_val, iteration=iteration)
        model.eval()
        for data_batch in itertools.islice(dataloader_val, self.config.trainer.max_val_iter):
            data_batch = misc.to(data_batch, distributed.device())
            self.callbacks.on_validation_step_start(model, data_batch, iteration=iteration)
            with parallelism.forward_precision(self.config, distributed.device().type):
                output_batch, loss = model.validation_step(data_batch, iteration)
            self.callbacks.on_validation_step_end(model, data_batch, output_batch, loss, iteration=iteration)
        self.callbacks.on_validation_end(model, iteration=iteration)


def _endless(dataloader: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields from `dataloader`, started over whenever it ends."""
    while True:
        is_empty = True
        for micro_batch in dataloader:
            is_empty = False
            yield micro_batch
        if is_empty:
            raise ValueError("dataloader_train gave no micro-batch; give each rank at least one.")


class _Watchdog:
    """Raises TimeoutError in the main thread when nobody restarts it for too long.

    It interrupts Python code, such as a loader that hangs. A collective that hangs in C++ is ended by the timeout of
    the process group, which is the same.
    """

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        # Python delivers signals to the main thread only.
        self._can_alarm = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> _Watchdog:
        if self._can_alarm:
            self._handler_before = signal.signal(signal.SIGALRM, self._on_alarm)
            self.restart()
        return self

    def restart(self) -> None:
        """Counts from the start again."""
        if self._can_alarm:
            signal.alarm(self._seconds)

    def __exit__(self, *exception: object) -> None:
        if self._can_alarm:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, self._handler_before)

    def _on_alarm(self, signal_number: int, frame: object) -> None:
        raise TimeoutError(
            f"no window finished within trainer.timeout_period={self._seconds} s; raise it if that is normal here."
        )
