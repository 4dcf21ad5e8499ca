# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Four gloo ranks, HSDP 2x2: a window's gradients equal those of mode "none", whatever each micro-step used."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cosmos_framework.utils import distributed
from cosmos_framework.utils.grad_sync import HeldBackGradientError

WORLD_SIZE = 4
# The head that each micro-step of a window uses: one all along, in turns, and one that the boundary does not use.
WINDOWS = {"same": "aaa", "in turns": "aba", "not at the boundary": "bba", "new at the boundary": "aab"}


class Heads(nn.Module):
    """Two heads of one shape in one FSDP group, of which a micro-step uses one, around a group of their own each."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.block_a = nn.Linear(4, 4)
        self.block_b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:  # [B,4] -> [B,4]
        return getattr(self, f"block_{head}")(getattr(self, head)(x))


def _sharded_heads() -> Heads:
    torch.manual_seed(0)
    model = Heads()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for module in (model.block_a, model.block_b, model):
        fully_shard(module, mesh=mesh)
    return model


def _gradients(window: str, mode: str, reshard: bool) -> dict[str, torch.Tensor | None]:
    model = _sharded_heads()
    torch.manual_seed(1 + dist.get_rank())
    for i, head in enumerate(window):
        is_boundary = i == len(window) - 1
        with distributed.ddp_sync_grad(model, is_boundary, fsdp_accum_mode=mode, fsdp_accum_reshard=reshard):
            model(torch.randn(2, 4), head).square().sum().backward()
    return {
        name: None if param.grad is None else param.grad.full_tensor()  # type: ignore[attr-defined]
        for name, param in model.named_parameters()
    }


def _check_windows_on_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
    try:
        for name, window in WINDOWS.items():
            expected = _gradients(window, "none", reshard=True)
            for mode in ("all_reduce", "grad_sync"):
                for reshard in (True, False):
                    actual = _gradients(window, mode, reshard)
                    torch.testing.assert_close(actual, expected, msg=lambda text: f"{name}, {mode}, {reshard}: {text}")  # noqa: B023
        _check_that_held_back_gradients_are_told()
    finally:
        dist.destroy_process_group()


def _check_that_held_back_gradients_are_told() -> None:
    model = _sharded_heads()
    with distributed.ddp_sync_grad(model, False, fsdp_accum_mode="all_reduce"):
        model(torch.randn(2, 4), "a").sum().backward()
    sync = distributed.grad_sync_of(model)
    assert sync is not None
    assert "a.weight" in sync.held_back()
    with pytest.raises(HeldBackGradientError, match="a.weight"):
        sync.require_nothing_held_back("an optimizer step")
    sync.discard()
    assert not sync.held_back()


@pytest.mark.L0
@pytest.mark.CPU
def test_windows_are_exact_on_four_ranks(tmp_path: Path) -> None:
    mp.spawn(_check_windows_on_rank, args=(str(tmp_path / "store"),), nprocs=WORLD_SIZE)
