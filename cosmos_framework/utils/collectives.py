# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Counting and timing what a stretch of training sends, by kind of collective and mesh dimension."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
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


@dataclass(frozen=True)
class Collective:
    """One collective, as this rank saw it.

    Attributes:
        kind: what it was, e.g. "all_reduce".
        dimension: the mesh dimension over which it ran, e.g. "dp_replicate".
        bytes: size of the message, the larger of this rank's input and output (the full tensor of an all-gather or
            reduce-scatter, the buffer of an all-reduce).
        start_s: when it was issued, in seconds since its counter was made.
        end_s: when its result was there.
    """

    kind: str
    dimension: str
    bytes: int
    start_s: float
    end_s: float

    @property
    def key(self) -> tuple[str, str]:
        """(kind, mesh dimension), e.g. `("all_reduce", "dp_replicate")`."""
        return self.kind, self.dimension


@dataclass
class Traffic:
    """How often a collective ran and how much it carried.

    Attributes:
        calls: number of collectives.
        bytes: sum of the message sizes; see `Collective`.
    """

    calls: int = 0
    bytes: int = 0


Totals = dict[tuple[str, str], Traffic]


def totals_of(collectives: Iterable[Collective]) -> Totals:
    """Adds up collectives by (kind, mesh dimension)."""
    totals: Totals = defaultdict(Traffic)
    for each in collectives:
        traffic = totals[each.key]
        traffic.calls += 1
        traffic.bytes += each.bytes
    return dict(totals)


def in_flight_s(collectives: Iterable[Collective]) -> float:
    """Returns for how many seconds at least one of the collectives was in flight.

    This is the union of their intervals: those that overlap, or queue behind one another for the same link, do not
    count twice. It includes waiting for slower ranks, and computation that went on meanwhile is not subtracted.
    """
    total_s, reached_s = 0.0, float("-inf")
    for start_s, end_s in sorted((each.start_s, each.end_s) for each in collectives):
        total_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total_s


def mesh_dimensions(model: torch.nn.Module) -> dict[str, str]:
    """Returns the names of the mesh dimensions over which a model is laid out, by the name of the process group.

    A group alone does not tell: torch gives a mesh of one dimension over all ranks the world's.
    """
    meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
    return {
        mesh.get_group(dim).group_name: name for mesh in meshes for dim, name in enumerate(mesh.mesh_dim_names or ())
    }


class CollectiveCounter:
    """A context manager that counts and times the collectives issued inside it, forward and backward, gloo and NCCL.

    torch sends every collective of `torch.distributed`, FSDP2's and DDP's C++ reducer's alike, through the dispatcher
    as an operator of the namespace `c10d`. Inside the block these have a kernel of ours above the backend's (source:
    torch.library.Library.impl), from whatever thread they are called; other operators cost what they cost outside, and
    compiled code stays compiled. A collective ends when the future of the `Work` that it returns is done. On CUDA both
    ends are taken by events on the streams, since the host is ahead of them there.

    Blocks may be nested; each counts. What runs in inference mode passes by.
    """

    def __init__(self, dimensions: Mapping[str, str] | None = None) -> None:
        """Starts the clock.

        Args:
            dimensions: names of process groups' mesh dimensions, by the name of the group. A group that is not among
                them is called `world`, or by its description.
        """
        self._dimensions = dimensions or {}
        self._issued: list[_Issued] = []
        self._clock = _Clock()

    def __enter__(self) -> CollectiveCounter:
        _open_counters.append(self)
        _kernels.install()
        return self

    def __exit__(self, *exception: object) -> None:
        _open_counters.remove(self)
        if not _open_counters:
            _kernels.remove()

    @property
    def count(self) -> int:
        """The number of collectives issued so far."""
        return len(self._issued)

    def elapsed_s(self) -> float:
        """Waits until the device is idle, and returns the seconds since this counter was made."""
        return self._clock.elapsed_s()

    def collectives(self) -> list[Collective]:
        """Returns what was issued so far, in order; what is still in flight ends now. Waits for the device."""
        now_s = self.elapsed_s()
        return [
            Collective(
                kind=each.kind,
                dimension=each.dimension,
                bytes=each.bytes,
                start_s=self._clock.seconds(each.start),
                end_s=now_s if each.end is None else self._clock.seconds(each.end),
            )
            for each in self._issued
        ]

    def totals(self) -> Totals:
        """What has been counted so far, by (kind, mesh dimension)."""
        return totals_of(self.collectives())

    def calls(self, kind: str, dimension: str) -> int:
        """The number of collectives of one kind over one mesh dimension."""
        return self.totals().get((kind, dimension), Traffic()).calls

    def begin(self, kind: str, arguments: list[Any]) -> Callable[[], None]:
        """Notes a collective that is about to be issued; returns what is to be called at its end."""
        message = max((each for each in arguments if isinstance(each, torch.Tensor)), key=lambda tensor: tensor.nbytes)
        now = self._clock.now_on_stream if message.is_cuda else self._clock.now
        issued = _Issued(kind, self._dimension(arguments), message.nbytes, start=now())
        self._issued.append(issued)
        return lambda: issued.end_at(now())

    def _dimension(self, arguments: list[Any]) -> str:
        for each in arguments:
            if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
                group = dist.ProcessGroup.unbox(each)
                is_world = group == dist.group.WORLD
                return self._dimensions.get(
                    group.group_name, "world" if is_world else group.group_desc.removeprefix("mesh_")
                )
        return "world"


Instant = float | torch.cuda.Event


@dataclass
class _Issued:
    """A collective whose times may not be known yet."""

    kind: str
    dimension: str
    bytes: int
    start: Instant
    end: Instant | None = None

    def end_at(self, end: Instant) -> None:
        self.end = end


_open_counters: list[CollectiveCounter] = []


class _Kernels:
    """Kernels of the collectives' operators that tell the open counters, while there are any."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = None

    def install(self) -> None:
        if self._library is None:
            self._library = torch.library.Library("c10d", "IMPL")
            for name, kind in KINDS.items():
                operator = getattr(torch.ops.c10d, name).default
                self._library.impl(name, functools.partial(_observe, kind, operator), "Autograd", with_keyset=True)

    def remove(self) -> None:
        self._library = None


_kernels = _Kernels()


def _observe(kind: str, operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    arguments = tree_leaves((args, kwargs))
    ends = [counter.begin(kind, arguments) for counter in _open_counters]
    result = operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
    work = dist.Work.unbox(tree_leaves(result)[-1])
    for end in ends:
        _call_when_done(work, end)
    return result


def _call_when_done(work: Any, callback: Callable[[], None]) -> None:
    """Calls back when a collective is done, on CUDA with a current stream that waits for it (source: Future.then)."""
    try:
        future = work.get_future()
    except RuntimeError:
        # gloo's reduce-scatter has none: it ends where it is waited for, which FSDP2 does at once.
        work.wait()
        callback()
    else:
        future.add_done_callback(lambda _: callback())


class _Clock:
    """Seconds since it was made, by the host and by CUDA's streams."""

    def __init__(self) -> None:
        self._uses_cuda = torch.cuda.is_available()
        if self._uses_cuda:
            torch.cuda.synchronize()
            self._stream_zero = self.now_on_stream()
        self._zero = self.now()

    @staticmethod
    def now() -> float:
        return time.perf_counter()

    @staticmethod
    def now_on_stream() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, instant: Instant) -> float:
        """The device must have passed the instant."""
        if isinstance(instant, float):
            return instant - self._zero
        return self._stream_zero.elapsed_time(instant) / 1e3

    def elapsed_s(self) -> float:
        if self._uses_cuda:
            torch.cuda.synchronize()
        return self.now() - self._zero
