# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""DDP: its one collective, an all-reduce a bucket, waits while `require_backward_grad_sync` is off.

What waits is in `grad` already; DDP's reducer averages it with the boundary's gradients (source:
torch.nn.parallel.DistributedDataParallel.no_sync).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .accum_mode import AccumMode
from .backend import HeldBackGradientError, Plan, Settings

_waiting: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class DDPBackend:
    """One `DistributedDataParallel` wrapper, or a subclass of it."""

    def __init__(
        self, ddp: DistributedDataParallel, settings: Settings, name_of: Callable[[nn.Module, str], str]
    ) -> None:
        self._ref = weakref.ref(ddp)
        self._settings = settings
        self._name_of = name_of
        self._syncs = True
        self._forward_was_outside = False

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._ref()
        if ddp is None:
            raise ReferenceError("the model of this GradSync is gone")
        return ddp

    @contextmanager
    def micro_step(self, boundary: bool) -> Iterator[None]:
        ddp: Any = self._ddp
        synced_before = ddp.require_backward_grad_sync
        self._syncs = boundary or self._settings.mode is AccumMode.NONE or not _can_wait(ddp)
        ddp.require_backward_grad_sync = synced_before and self._syncs
        # Each forward overwrites this with a bool that says whether its backward synchronises.
        prepared_before = ddp.require_forward_param_sync
        ddp.require_forward_param_sync = int(prepared_before)
        try:
            with (
                self._params_reached() if boundary and self.held_back() and synced_before else nullcontext() as reached
            ):
                yield
        finally:
            ddp.require_backward_grad_sync = synced_before
            ran_forward = type(ddp.require_forward_param_sync) is bool
            ddp.require_forward_param_sync = bool(ddp.require_forward_param_sync)
        if reached is not None:
            self._check_reduced(reached, ran_forward or prepared_before)
        if not self._syncs:
            _waiting.add(ddp)
            self._forward_was_outside |= prepared_before and not ran_forward and bool(self.held_back())

    @contextmanager
    def _params_reached(self) -> Iterator[set[int]]:
        """Collects the ids of the parameters that the backward of the block reaches."""
        reached: set[int] = set()
        hooks = [
            param.register_post_accumulate_grad_hook(lambda each: reached.add(id(each)))
            for param in self._params().values()
            if param.requires_grad
        ]
        try:
            yield reached
        finally:
            for hook in hooks:
                hook.remove()

    def _check_reduced(self, reached: set[int], prepared: bool) -> None:
        """Makes sure that DDP reduced what waits, for which its forward and each parameter have to take part."""
        ddp, waiting = self._ddp, self.held_back()
        if waiting and not (reached and prepared):
            raise HeldBackGradientError(
                f"DDP did not reduce the gradients of {', '.join(waiting)}: its forward and backward did not both run "
                "inside the block of the boundary. Run them there, or give the window up with GradSync.discard()."
            )
        missed = [name for name, p in self._params().items() if p.requires_grad and id(p) not in reached]
        if waiting and missed and not (ddp.find_unused_parameters or ddp.static_graph):
            raise HeldBackGradientError(
                f"DDP did not reduce this window: its boundary did not use {', '.join(missed)}, and DDP waits for "
                "every parameter. Set find_unused_parameters=True, or use the parameters at the boundary."
            )

    def close_window(self) -> None:
        _waiting.discard(self._ddp)

    def held_back(self) -> dict[str, int]:
        if self._ddp not in _waiting:
            return {}
        return {name: param.grad.nbytes for name, param in self._params().items() if param.grad is not None}

    def _params(self) -> dict[str, nn.Parameter]:
        """The parameters that DDP reduces, by name: those that were there when it was made."""
        ddp = self._ddp
        managed = set(map(id, ddp._module_parameters))
        return {
            self._name_of(module, name): param
            for module in ddp.module.modules()
            for name, param in module.named_parameters(recurse=False)
            if id(param) in managed
        }

    def discard(self, failed: bool) -> None:
        ddp = self._ddp
        _waiting.discard(ddp)
        for param in ddp.parameters():
            param.grad = None
        # The reducer remembers an unfinished reduction, and which parameters were used since the last one. It is left
        # alone otherwise: this rank may be the only one that gives up, and a new one orders its buckets afresh.
        if (failed and self._syncs) or (ddp.find_unused_parameters and not ddp.static_graph):
            _make_reducer_anew(ddp)

    def remarks(self) -> tuple[str, ...]:
        if not self._forward_was_outside:
            return ()
        return ("a forward ran outside the block, where DDP decides that its backward synchronises: run it inside.",)

    def plans(self) -> list[Plan]:
        ddp = self._ddp
        world = ddp.process_group.size()
        reduce = (f"all_reduce over {world} ranks",)
        waits = self._settings.mode is not AccumMode.NONE and world > 1
        notes = ("static_graph=True synchronises the very first backward.",) if waits and ddp.static_graph else ()
        return [
            Plan(
                backend="ddp",
                where=f"{world} ranks",
                each_micro_step=() if waits else reduce,
                waits=reduce if waits else (),
                no_effect="" if waits else self._why_nothing_waits(),
                notes=notes,
            )
        ]

    def _why_nothing_waits(self) -> str:
        mode = self._settings.mode
        if mode is AccumMode.NONE:
            return "fsdp_accum_mode='none' lets every micro-step synchronise"
        return f"fsdp_accum_mode={mode.value!r} saves nothing on one rank: there is nothing to synchronise"


def _can_wait(ddp: DistributedDataParallel) -> bool:
    """A static graph is recorded by the first synchronised backward, without which torch fails."""
    return not ddp.static_graph or ddp._static_graph_delay_allreduce_enqueued


def _make_reducer_anew(ddp: Any) -> None:
    """Replaces the reducer as unpickling does (source: DistributedDataParallel.__setstate__), with its comm hooks.

    New buckets are safe from the all-reduces that the old one may still have under way. torch does not tell about the
    built-in comm hooks, which only the private `_register_builtin_comm_hook` sets; those are lost.
    """
    ddp.reducer._remove_autograd_hooks()
    parameters, expect_sparse_gradient = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse_gradient, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    for hook, state in ddp._comm_hooks:
        dist._register_comm_hook(ddp.reducer, state, hook)


def covered_params(ddp: DistributedDataParallel) -> set[int]:
    """Returns the ids of the parameters that DDP reduces."""
    return set(map(id, ddp._module_parameters))
