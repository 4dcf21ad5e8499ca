# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""The process group of one process, and the DDP wrapper."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cosmos_framework.utils import distributed


@pytest.fixture
def alone() -> Iterator[None]:
    distributed.init()
    yield
    distributed.destroy_process_group()


def test_one_process_needs_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert (distributed.get_rank(), distributed.get_world_size(), distributed.is_rank0()) == (0, 1, True)
    assert distributed.init(timeout=timedelta(seconds=10))
    try:
        assert not distributed.init(), "the existing process group is kept"
        assert dist.get_backend() == ("nccl" if torch.cuda.is_available() else "gloo")
        assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
    distributed.destroy_process_group()
    distributed.barrier()


def ranks_that_run() -> tuple[int, int, int | None]:
    return distributed.get_rank(), distributed.get_world_size(), distributed.rank0_only(lambda: 5)()


def test_rank0_only(rank_pool: Any) -> None:
    assert rank_pool.run(ranks_that_run, world_size=2) == [(0, 2, 5), (1, 2, None)]


class Model(torch.nn.Module):
    """Its training step calls its forward, as a user's may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # (B, 1)

    def training_step(self, data: dict[str, torch.Tensor], iteration: int) -> tuple[dict[str, Any], torch.Tensor]:
        if self.fails:
            raise ZeroDivisionError("in the training step")
        return {"iteration": iteration}, self(data["x"]).sum()


@pytest.mark.usefixtures("alone")
def test_training_step_goes_through_the_forward_of_ddp() -> None:
    model = Model()
    wrapper = distributed.DistributedDataParallel(model)
    assert wrapper.module is model
    forwards = []
    wrapper.register_forward_pre_hook(lambda *_: forwards.append("ddp"))
    x = torch.ones(3, 2)
    output, loss = wrapper.training_step({"x": x}, iteration=4)
    assert (output, forwards) == ({"iteration": 4}, ["ddp"])
    torch.testing.assert_close(loss, model(x).sum())
    torch.testing.assert_close(wrapper(x), model(x))


@pytest.mark.usefixtures("alone")
def test_training_step_that_raises_leaves_forward_alone() -> None:
    wrapper = distributed.DistributedDataParallel(Model())
    wrapper.module.fails = True
    with pytest.raises(ZeroDivisionError):
        wrapper.training_step({"x": torch.ones(3, 2)}, 0)
    assert "forward" not in vars(wrapper.module)
    wrapper.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wrapper.training_step({"x": torch.ones(3, 2)}, 0)
    assert "forward" not in vars(wrapper.module)


@pytest.mark.usefixtures("alone")
def test_forward_that_a_user_has_replaced_is_kept() -> None:
    wrapper = distributed.DistributedDataParallel(Model())
    original = wrapper.module.forward
    wrapper.module.forward = lambda x: original(x) + 1
    replaced = vars(wrapper.module)["forward"]
    x = torch.ones(3, 2)
    _, loss = wrapper.training_step({"x": x}, 0)
    torch.testing.assert_close(loss, (original(x) + 1).sum())
    assert vars(wrapper.module)["forward"] is replaced


@pytest.mark.usefixtures("alone")
def test_model_can_be_copied_after_a_training_step() -> None:
    wrapper = distributed.DistributedDataParallel(Model())
    wrapper.training_step({"x": torch.ones(3, 2)}, 0)
    copied = copy.deepcopy(wrapper.module)
    torch.nn.init.zeros_(copied.layer.weight)
    assert copied(torch.ones(1, 2)).item() == copied.layer.bias.item()
