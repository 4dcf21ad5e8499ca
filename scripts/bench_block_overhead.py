#!/usr/bin/env python
# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Prints what an empty micro-step block costs, as a multiple of one walk over `model.modules()`.

    python scripts/bench_block_overhead.py --modules 250 500 1000 2000

The model has that many `fully_shard`ed transformer layers on a mesh of 2 x 2 ranks; --bare makes them single linear
layers, the hardest case, since nothing but the sharded modules is there to walk over. One process stands for all ranks:
its collectives return at once, so that only the Python of the block is measured. A figure is the median processor time
of windows of four micro-steps, divided by four. The target is 1 or less with 1,000 modules.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from cosmos_framework.utils.distributed import ddp_sync_grad
from cosmos_framework.utils.grad_sync import AccumMode

WINDOW = 4
FIXED_MODES = [mode for mode in AccumMode if mode is not AccumMode.AUTO]  # which does as one of them for each module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, nargs="+", default=[250, 500, 1000, 2000], help="FSDP modules")
    parser.add_argument("--repeats", type=int, default=30, help="windows that a median is of")
    parser.add_argument("--bare", action="store_true", help="linear layers instead of transformer layers")
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    print("modules  mode        reshard  walk (ms)  block (ms)  ratio")
    for count in args.modules:
        model = sharded_model(count, mesh, args.bare)
        for mode, reshard in itertools.product(FIXED_MODES, [True, False]):
            works = [partial(walk, model), partial(run_window, model, mode, reshard)]
            walk_s, window_s = medians_s(works, args.repeats)
            block_s = window_s / WINDOW
            numbers = f"{walk_s * 1e3:9.3f}  {block_s * 1e3:10.3f}  {block_s / walk_s:5.2f}"
            print(f"{count:7d}  {mode.value:10s}  {reshard!s:7s}  {numbers}")
    dist.destroy_process_group()


def sharded_model(count: int, mesh: DeviceMesh, bare: bool) -> nn.Module:
    layers = (nn.Linear(4, 4) if bare else nn.TransformerEncoderLayer(4, 1, 4) for _ in range(count))
    model = nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


def walk(model: nn.Module) -> None:
    for _ in model.modules():
        pass


def run_window(model: nn.Module, mode: AccumMode, reshard: bool) -> None:
    for step in range(WINDOW):
        with ddp_sync_grad(model, step == WINDOW - 1, mode, reshard):
            pass


def medians_s(works: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The median processor time of each of `works`, in seconds, taken in turns, since a machine has slow moments."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(1 + repeats):
        for work, seen in zip(works, times, strict=True):
            begin = time.process_time()
            work()
            seen.append(time.process_time() - begin)
    return [statistics.median(seen[1:]) for seen in times]  # a first call warms up


if __name__ == "__main__":
    main()
