# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""A network whose usage a test chooses, run over windows in a mode and on a mesh, for comparing gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cosmos_framework.utils.collectives import CollectiveCounter, Traffic
from cosmos_framework.utils.grad_sync import GradSync

DIM, SAMPLES = 12, 4

MESHES = {"fsdp": (1, 4), "hsdp": (2, 2), "replicate": (4, 1)}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    """`a`, `b` and the frozen `f` share the root's group; `trunk` and `head` are groups of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, DIM, bias=False)
        self.b = nn.Linear(DIM, DIM, bias=False)
        self.f = nn.Linear(DIM, DIM, bias=False).requires_grad_(False)
        self.trunk = nn.Linear(DIM, DIM + 2)
        self.head = nn.Linear(DIM + 2, DIM)

    def forward(self, x: Tensor, use: str) -> Tensor:
        """Applies the layers that `use` names, a letter each: a, b, f, h(ead), H (head twice)."""
        for letter in "abf":
            if letter in use:
                x = getattr(self, letter)(x)
        x = torch.tanh(self.trunk(x))
        for _ in range({"h": 1, "H": 2}.get(use[-1:], 0)):
            x = torch.cat([self.head(x), x[:, :2]], dim=1)
        return x


@dataclass(frozen=True)
class Setup:
    """How windows run: the mesh, the core's settings, the precision."""

    mesh: str = "hsdp"
    mode: str = "all_reduce"
    reshard: bool = True
    mixed: bool = False
    reduce_unused: bool = False
    reshard_after_forward: bool | int = True
    memory_bytes: float = 0.0


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(index: int, rank: int) -> Tensor:
    return torch.randn(SAMPLES, DIM, generator=torch.Generator().manual_seed(1000 * index + rank))


@functools.cache
def mesh_of(kind: str) -> DeviceMesh:
    """The mesh of one process group; whoever runs in a fresh one clears the cache first."""
    replicate, shard = MESHES[kind]
    if replicate == 1:
        return init_device_mesh("cpu", (shard,), mesh_dim_names=("dp_shard",))
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))


def shard(net: Net, setup: Setup) -> Net:
    options: dict[str, Any] = {"mesh": mesh_of(setup.mesh), "reshard_after_forward": setup.reshard_after_forward}
    if setup.mixed:
        options["mp_policy"] = MIXED
    for part in (net.trunk, net.head, net):
        fully_shard(part, **options)
    return net


def gradients(net: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient as one process would hold it; every rank calls."""
    return {name: None if p.grad is None else whole(p.grad).clone() for name, p in net.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def micro_step(net: nn.Module, index: int, use: str, length: int) -> None:
    (net(batch(index, dist.get_rank()), use).float().pow(2).mean() / length).backward()


def sync_of(net: nn.Module, setup: Setup) -> GradSync:
    return GradSync(net, setup.mode, setup.reshard, setup.reduce_unused, setup.memory_bytes)


def run_windows(windows: list[list[str]], setup: Setup) -> tuple[list[dict[str, Tensor | None]], dict[Any, Traffic]]:
    """Runs windows of micro-steps that use what the strings name; returns each window's gradients, and the traffic."""
    net = shard(build(), setup)
    sync = sync_of(net, setup)
    seen, index = [], 0
    with CollectiveCounter() as counter:
        for window in windows:
            for step, use in enumerate(window):
                with sync.micro_step(boundary=step == len(window) - 1):
                    micro_step(net, index, use, len(window))
                index += 1
            totals = {key: Traffic(t.calls, t.bytes) for key, t in counter.totals().items()}
            seen.append(gradients(net))
            net.zero_grad()
    return seen, totals


def reference(windows: list[list[str]], world: int = 4) -> list[dict[str, Tensor | None]]:
    """The same windows in one process, in float64."""
    net, seen, index = build().double(), [], 0
    for window in windows:
        for use in window:
            for rank in range(world):
                (net(batch(index, rank).double(), use).pow(2).mean() / len(window) / world).backward()
            index += 1
        seen.append(gradients(net))
        net.zero_grad()
    return seen


def worst_error(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> float:
    """The largest error relative to a gradient's largest element; infinite where one is None and the other not."""
    errors = [0.0]
    for name, want in wanted.items():
        have = found[name]
        if (have is None) != (want is None):
            return float("inf")
        if have is not None and want is not None:
            scale = max(want.double().abs().max().item(), 1e-12)
            errors.append((have.double() - want.double()).abs().max().item() / scale)
    return max(errors)
