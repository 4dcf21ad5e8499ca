# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""From the configured degrees to a device mesh, and from a model to its parallel form: DDP, FSDP or HSDP."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from cosmos_framework.utils import distributed

if TYPE_CHECKING:
    from cosmos_framework.model._base import ImaginaireModel
    from cosmos_framework.utils.config import Config, DDPConfig, ModelConfig

_SHARD_FIELD = "model.parallelism.data_parallel_shard_degree"
_REPLICATE_FIELD = "model.parallelism.data_parallel_replicate_degree"


class Degrees(NamedTuple):
    """How the ranks are laid out: `replicate` copies of a model that `shard` ranks hold together."""

    replicate: int
    shard: int


def resolve_degrees(shard: int, replicate: int, world_size: int) -> Degrees:
    """Fits the configured degrees to the number of ranks.

    Args:
        shard: `data_parallel_shard_degree`; -1 takes what `replicate` leaves of the ranks.
        replicate: `data_parallel_replicate_degree`.
        world_size: Number of ranks.

    Returns:
        Degrees whose product is `world_size`.

    Raises:
        ValueError: No such degrees exist; the message names the field, its value and what would work.
    """
    if replicate < 1:
        raise ValueError(f"{_REPLICATE_FIELD}={replicate} must be at least 1.")
    if shard < 1 and shard != -1:
        raise ValueError(f"{_SHARD_FIELD}={shard} must be at least 1, or -1 to fit the number of ranks.")
    if shard == -1:
        if world_size % replicate:
            raise ValueError(
                f"{_REPLICATE_FIELD}={replicate} does not divide the {world_size} ranks; "
                f"choose one of {', '.join(map(str, _divisors(world_size)))}."
            )
        return Degrees(replicate, world_size // replicate)
    if replicate * shard != world_size:
        raise ValueError(
            f"{_REPLICATE_FIELD}={replicate} times {_SHARD_FIELD}={shard} is {replicate * shard}, but there are "
            f"{world_size} ranks; set the shard degree to -1 to fit them, or start {replicate * shard} ranks."
        )
    return Degrees(replicate, shard)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def build_mesh(degrees: Degrees, device_type: str) -> DeviceMesh:
    """Builds the mesh that `fully_shard` takes.

    Args:
        degrees: As `resolve_degrees` gives them.
        device_type: "cpu" or "cuda".

    Returns:
        For a replicate degree of 1 the one-dimensional mesh (dp_shard,): FSDP. Else (dp_replicate, dp_shard): HSDP, or
        replication alone if dp_shard has size 1.
    """
    if degrees.replicate == 1:
        return init_device_mesh(device_type, (degrees.shard,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device_type, degrees, mesh_dim_names=("dp_replicate", "dp_shard"))


def parallelize(model: ImaginaireModel, config: Config) -> ImaginaireModel | distributed.DistributedDataParallel:
    """Makes `model` train on all ranks, as `trainer.distributed_parallelism` says.

    Every rank starts from the parameters and buffers of rank 0, however it initialised its own. Parameters are stored
    in `model.fsdp_master_dtype`, in which FSDP also reduces gradients; computation runs in `model.precision`.

    Args:
        model: On its device; its optimizer does not exist yet.
        config: The whole configuration.

    Returns:
        A DDP wrapper for "ddp"; for "fsdp" the same model, whose `fsdp_modules` are FSDP modules now.

    Raises:
        ValueError: Degrees that do not fit the ranks, parameters in no FSDP module, or an unknown parallelism.
    """
    _store_parameters_as(model, _dtype(config.model.fsdp_master_dtype))
    if config.trainer.distributed_parallelism == "ddp":
        return _wrap_ddp(model, config.trainer.ddp)
    if config.trainer.distributed_parallelism == "fsdp":
        _shard(model, config.model)
        return model
    raise ValueError(
        f"trainer.distributed_parallelism={config.trainer.distributed_parallelism!r} must be 'ddp' or 'fsdp'."
    )


def forward_precision(config: Config, device_type: str) -> AbstractContextManager[Any]:
    """Returns the context in which a forward computes in `model.precision`.

    FSDP casts the parameters that it gathers, so there is nothing left to do. DDP's parameters stay in
    `model.fsdp_master_dtype`; autocast chooses the operations that run in the narrow dtype.

    Args:
        config: The whole configuration.
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: DDP with a precision that autocast cannot give.
    """
    precision, master = _dtype(config.model.precision), _dtype(config.model.fsdp_master_dtype)
    if config.trainer.distributed_parallelism == "fsdp" or precision == master:
        return nullcontext()
    if precision.itemsize > 2:
        raise ValueError(
            f"model.precision={config.model.precision} under DDP needs parameters stored in it: "
            f"set model.fsdp_master_dtype={config.model.precision}."
        )
    return torch.autocast(device_type, dtype=precision)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _store_parameters_as(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _wrap_ddp(model: ImaginaireModel, config: DDPConfig) -> distributed.DistributedDataParallel:
    # torch >= 2.13 warns whoever names broadcast_buffers, though True is still its default.
    rank_local_buffers: dict[str, Any] = {} if config.broadcast_buffers else {"broadcast_buffers": False}
    return distributed.DistributedDataParallel(
        model,
        find_unused_parameters=config.find_unused_parameters,
        static_graph=config.static_graph,
        **rank_local_buffers,
    )


def _shard(model: ImaginaireModel, config: ModelConfig) -> None:
    degrees = resolve_degrees(
        shard=config.parallelism.data_parallel_shard_degree,
        replicate=config.parallelism.data_parallel_replicate_degree,
        world_size=distributed.get_world_size(),
    )
    modules = list(model.fsdp_modules())
    _require_all_parameters_in(modules, model)
    _broadcast_from_rank0(model)
    mesh = build_mesh(degrees, distributed.device().type)
    policy = MixedPrecisionPolicy(param_dtype=_dtype(config.precision), reduce_dtype=_dtype(config.fsdp_master_dtype))
    for module in modules:
        # A block that two networks share is named by both.
        if not isinstance(module, FSDPModule):
            fully_shard(module, mesh=mesh, mp_policy=policy)


def _require_all_parameters_in(modules: list[torch.nn.Module], model: torch.nn.Module) -> None:
    covered = set(itertools.chain.from_iterable(module.parameters() for module in modules))
    missed = [name for name, parameter in model.named_parameters() if parameter not in covered]
    if missed:
        raise ValueError(
            f"parameters in no FSDP module, whose gradients would never be reduced: {', '.join(missed)}. Yield a "
            f"module that holds them from {type(model).__name__}.fsdp_modules()."
        )


@torch.no_grad()
def _broadcast_from_rank0(model: torch.nn.Module) -> None:
    """Replicas of a two-dimensional mesh must start equal, and fully_shard does not see to it."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        value = tensor.contiguous()
        dist.broadcast(value, src=0)
        tensor.copy_(value)
