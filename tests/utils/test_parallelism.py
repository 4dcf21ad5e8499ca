# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Degrees, meshes and what wrapping does to a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cosmos_framework.utils import distributed
from cosmos_framework.utils.parallelism import Degrees, build_mesh, forward_precision, parallelize, resolve_degrees
from tests.tiny import TinyModel, full_tensors, tiny_config


@pytest.mark.parametrize(
    ("shard", "replicate", "world_size", "expected"),
    [
        (-1, 1, 4, Degrees(replicate=1, shard=4)),
        (-1, 2, 4, Degrees(replicate=2, shard=2)),
        (-1, 4, 4, Degrees(replicate=4, shard=1)),
        (1, 4, 4, Degrees(replicate=4, shard=1)),
        (2, 2, 4, Degrees(replicate=2, shard=2)),
        (-1, 1, 1, Degrees(replicate=1, shard=1)),
    ],
)
def test_degrees_fit_the_ranks(shard: int, replicate: int, world_size: int, expected: Degrees) -> None:
    assert resolve_degrees(shard, replicate, world_size) == expected


@given(st.integers(-3, 9), st.integers(-3, 9), st.integers(1, 9))
def test_degrees_multiply_to_the_ranks_or_are_refused(shard: int, replicate: int, world_size: int) -> None:
    possible = [
        Degrees(replicate, divisor)
        for divisor in range(1, world_size + 1)
        if replicate * divisor == world_size and shard in (-1, divisor)
    ]
    if possible:
        assert resolve_degrees(shard, replicate, world_size) == possible[0]
    else:
        with pytest.raises(ValueError, match=r"model\.parallelism\.data_parallel_\w+="):
            resolve_degrees(shard, replicate, world_size)


@pytest.mark.parametrize(
    ("shard", "replicate", "message"),
    [
        (-1, 3, "data_parallel_replicate_degree=3 does not divide the 4 ranks; choose one of 1, 2, 4"),
        (4, 2, "is 8, but there are 4 ranks; set the shard degree to -1"),
        (0, 1, "data_parallel_shard_degree=0 must be at least 1, or -1"),
        (-1, 0, "data_parallel_replicate_degree=0 must be at least 1"),
    ],
)
def test_degrees_that_do_not_fit_are_named(shard: int, replicate: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_degrees(shard, replicate, world_size=4)


def mesh_of(replicate: int) -> tuple[tuple[str, ...] | None, tuple[int, ...]]:
    mesh = build_mesh(resolve_degrees(-1, replicate, distributed.get_world_size()), "cpu")
    return mesh.mesh_dim_names, tuple(mesh.shape)


def test_mesh_has_a_replicate_dimension_only_if_there_are_replicas(rank_pool: Any) -> None:
    assert rank_pool.run(mesh_of, 1)[0] == (("dp_shard",), (4,))
    assert rank_pool.run(mesh_of, 2)[0] == (("dp_replicate", "dp_shard"), (2, 2))
    assert rank_pool.run(mesh_of, 4)[0] == (("dp_replicate", "dp_shard"), (4, 1))


def parallel_tiny(*overrides: str) -> dict[str, Any]:
    """Every rank starts from other parameters; tells what became of them."""
    torch.manual_seed(distributed.get_rank())
    model = TinyModel()
    model.scale.fill_(distributed.get_rank())
    wrapped = parallelize(model, tiny_config("unused", *overrides))
    return {
        "type": type(wrapped).__name__,
        "groups": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
        "parameters": full_tensors(model),
        "scale": model.scale.item(),
    }


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp 1", "fsdp 2", "fsdp 4"])
def test_all_ranks_start_from_rank_0(rank_pool: Any, parallelism: str) -> None:
    kind, _, replicate = parallelism.partition(" ")
    results = rank_pool.run(
        parallel_tiny,
        f"trainer.distributed_parallelism={kind}",
        f"model.parallelism.data_parallel_replicate_degree={replicate or 1}",
    )
    torch.manual_seed(0)
    expected = dict(TinyModel().named_parameters())
    for result in results:
        assert result["scale"] == 0
        assert result["type"] == ("DistributedDataParallel" if kind == "ddp" else "TinyModel")
        assert result["groups"] == ([] if kind == "ddp" else ["net", "net.blocks.0", "net.blocks.1"])
        for name, value in result["parameters"].items():
            assert torch.equal(value, expected[name]), name


class WithStrayParameter(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(()))


def config_of(*overrides: str) -> DictConfig:
    return tiny_config("unused", *overrides)


@pytest.fixture
def alone() -> Any:
    distributed.init()
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_parameter_in_no_group_is_named_before_anything_is_sharded() -> None:
    model = WithStrayParameter()
    with pytest.raises(ValueError, match=r"temperature\. Yield a module .* WithStrayParameter\.fsdp_modules"):
        parallelize(model, config_of())
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.usefixtures("alone")
def test_precision_and_master_dtype() -> None:
    model = TinyModel()
    parallelize(model, config_of("model.precision=bfloat16"))
    output, loss = model.training_step({"x": torch.ones(1, 4), "y": torch.ones(1, 3), "domain": "left"}, 0)
    loss.backward()
    assert output["prediction"].dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.net.embed.weight.grad is not None and model.net.embed.weight.grad.dtype == torch.float32


def test_ddp_computes_in_the_precision_too() -> None:
    ddp = "trainer.distributed_parallelism=ddp"
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with forward_precision(config_of(ddp, "model.precision=bfloat16"), "cpu"):
        assert layer(x).dtype == torch.bfloat16
    with forward_precision(config_of(ddp), "cpu"):
        assert layer(x).dtype == torch.float32
    with pytest.raises(ValueError, match="set model.fsdp_master_dtype=float64"):
        forward_precision(config_of(ddp, "model.precision=float64"), "cpu")


@pytest.mark.usefixtures("alone")
def test_unknown_parallelism_is_named() -> None:
    with pytest.raises(ValueError, match="trainer.distributed_parallelism='zero' must be 'ddp' or 'fsdp'"):
        parallelize(TinyModel(), config_of("trainer.distributed_parallelism=zero"))
