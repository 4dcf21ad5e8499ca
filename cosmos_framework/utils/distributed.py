# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""The process group, who this process is in it, and the DDP wrapper."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from cosmos_framework.utils.grad_sync import AccumMode, GradSync, Settings

P = ParamSpec("P")
R = TypeVar("R")


def init(timeout: timedelta | None = None) -> bool:
    """Joins the process group that torchrun describes, or makes one of this process alone.

    The backend is NCCL where CUDA is available, with one device a local rank, and gloo elsewhere. An existing process
    group is kept as it is.

    Args:
        timeout: How long a collective may wait for the other ranks; torch's default if None.

    Returns:
        Whether this call made the process group; whoever made it destroys it.

    Raises:
        RuntimeError: This host has fewer CUDA devices than processes.
    """
    if dist.is_initialized():
        return False
    if torch.cuda.is_available():
        _claim_cuda_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend, bound_device = "nccl", device()
    else:
        backend, bound_device = "gloo", None
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=bound_device)
    else:
        alone = dist.HashStore()
        dist.init_process_group(backend, timeout=timeout, device_id=bound_device, store=alone, rank=0, world_size=1)
    return True


def _claim_cuda_device(local_rank: int) -> None:
    devices = torch.cuda.device_count()
    if local_rank >= devices:
        raise RuntimeError(
            f"local rank {local_rank} has no CUDA device: this host has {devices}. Start at most {devices} processes "
            "here (torchrun --nproc_per_node), or set CUDA_VISIBLE_DEVICES to nothing to run on CPU."
        )
    torch.cuda.set_device(local_rank)


def destroy_process_group() -> None:
    """Leaves the process group; does nothing where there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Returns this process's rank in `group` (None: in the world); 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Returns the number of ranks in `group` (None: in the world); 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def is_rank0() -> bool:
    """Tells whether this process is the one that prints and writes."""
    return get_rank() == 0


def rank0_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Makes `func` run on rank 0 only; on the other ranks it returns None at once."""

    @functools.wraps(func)
    def on_rank0(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return func(*args, **kwargs) if is_rank0() else None

    return on_rank0


def barrier() -> None:
    """Waits until every rank is here; does nothing without a process group."""
    if dist.is_initialized():
        dist.barrier()


def device() -> torch.device:
    """Returns the device that this process trains on: its CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's DDP around a model whose `training_step` is trained, not its `forward`.

    DDP prepares its reducer in `forward`, so `training_step` has to pass through there. As in torch the wrapped model
    is `module`.
    """

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped model's `training_step` by way of DDP's `forward`.

        Args:
            *args: Arguments of the wrapped model's `training_step`.
            **kwargs: Its keyword arguments.

        Returns:
            What that returns; DDP finds the tensors in it to which gradients will flow.
        """
        with _forward_replaced(self.module) as restore_forward:

            def call_training_step(*args: Any, **kwargs: Any) -> Any:
                # training_step may call the model's own forward.
                restore_forward()
                return self.module.training_step(*args, **kwargs)

            self.module.forward = call_training_step
            return self(*args, **kwargs)


@contextmanager
def _forward_replaced(module: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Lets the block set `module.forward`; the function that it gets, and its end, undo that."""
    undisturbed = {name: value for name, value in vars(module).items() if name == "forward"}

    def restore() -> None:
        vars(module).pop("forward", None)
        vars(module).update(undisturbed)

    try:
        yield restore
    finally:
        restore()


_syncs: weakref.WeakKeyDictionary[torch.nn.Module, GradSync] = weakref.WeakKeyDictionary()


def ddp_sync_grad(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    enabled: bool,
    fsdp_accum_mode: str | AccumMode = AccumMode.ALL_REDUCE,
    fsdp_accum_reshard: bool = True,
    fsdp_reduce_unused_params: bool = False,
    fsdp_accum_memory_gib: float = 0.0,
) -> AbstractContextManager[None]:
    """Runs one micro-step, forward and backward; gradients are synchronised if `enabled`.

    Args:
        model: The model as it is trained: a DDP wrapper, a module with `fully_shard`ed modules anywhere below, several
            of both as a list, or a module that is not parallel at all.
        enabled: Whether this is the window's boundary.
        fsdp_accum_mode: What waits for the boundary, "all_reduce", "grad_sync", "none" or "auto"; see `AccumMode`.
        fsdp_accum_reshard: False keeps FSDP2's parameters gathered inside the window.
        fsdp_reduce_unused_params: The ranks may use different parameters of one FSDP2 group.
        fsdp_accum_memory_gib: GiB that mode "auto" may hold per rank beyond mode "all_reduce".

    Returns:
        A context manager for the micro-step; see `GradSync.micro_step`, also for what it raises.

    Raises:
        ValueError: `fsdp_accum_mode` is unknown, or does not go together with the other settings.
        HeldBackGradientError: A window is open in which the first model was accompanied by others.
    """
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    sync = grad_sync_of(models[0])
    if sync is None or not sync.watches(models):
        if sync is not None:
            sync.require_nothing_held_back("a micro-step of other models")
        sync = GradSync(models)
        # Hooks get the model without its DDP wrapper, and ask for its GradSync all the same.
        _syncs.update({each: sync for model in models for each in (model, getattr(model, "module", model))})
    sync.settings = Settings(
        AccumMode.parse(fsdp_accum_mode),
        fsdp_accum_reshard,
        fsdp_reduce_unused_params,
        fsdp_accum_memory_gib * 2**30,
    )
    return sync.micro_step(enabled)


def grad_sync_of(model: torch.nn.Module) -> GradSync | None:
    """Returns the `GradSync` that `ddp_sync_grad` keeps for a model, with or without its DDP wrapper."""
    return _syncs.get(model)


def require_nothing_held_back(model: torch.nn.Module, action: str) -> None:
    """Makes sure that no window is open, in which gradients are not where `action` would look for them.

    Args:
        model: The model, with or without its DDP wrapper.
        action: What is about to happen, for the message.

    Raises:
        HeldBackGradientError: Gradients are held back; the message names their parameters.
    """
    sync = grad_sync_of(model)
    if sync is not None:
        sync.require_nothing_held_back(action)
