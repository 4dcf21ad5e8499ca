# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Counting what a stretch of training sends: collectives and bytes, by kind and mesh dimension."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
}


@dataclass
class Traffic:
    """How often a collective ran and how much it carried.

    Attributes:
        calls: number of collectives.
        bytes: sum of the message sizes, each the larger of a rank's input and output (the full tensor of an
            all-gather or reduce-scatter, the buffer of an all-reduce), in bytes.
    """

    calls: int = 0
    bytes: int = 0


class CollectiveCounter(TorchDispatchMode):
    """A context manager that counts the collectives issued inside it, forward and backward, gloo and NCCL.

    torch sends every collective of `torch.distributed`, FSDP2's and DDP's C++ reducer's alike, through the dispatcher
    as an operator of the namespace `c10d`; a dispatch mode sees them (source: torch.utils._python_dispatch).
    The mode costs a Python call for every operator inside it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)

    def totals(self) -> dict[tuple[str, str], Traffic]:
        """What has been counted so far, by (kind, mesh dimension), e.g. `("all_reduce", "dp_replicate")`.

        A group that belongs to no named mesh dimension is called `world`, or by its description.
        """
        return dict(self._traffic)

    def calls(self, kind: str, dimension: str) -> int:
        """The number of collectives of one kind over one mesh dimension."""
        return self.totals().get((kind, dimension), Traffic()).calls

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d" and (kind := KINDS.get(func._schema.name.split("::")[1])):
            leaves = tree_leaves((args, kwargs))
            traffic = self._traffic[kind, _dimension(leaves)]
            traffic.calls += 1
            traffic.bytes += max(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


def _dimension(leaves: list[Any]) -> str:
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            group = dist.ProcessGroup.unbox(leaf)
            if group == dist.group.WORLD:
                return "world"
            return group.group_desc.removeprefix("mesh_")
    return "world"
