# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""DDP: its one collective, an all-reduce a bucket, waits while `require_backward_grad_sync` is off.

What waits is in `grad` already; DDP's reducer averages it with the boundary's gradients (source:
torch.nn.parallel.DistributedDataParallel.no_sync).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._ref()
        if ddp is None:
            raise ReferenceError("the model of this GradSync is gone")
        return ddp

    @contextmanager
    def micro_step(self, boundary: bool) -> Iterator[None]:
        ddp = self._ddp
        synced_before = ddp.require_backward_grad_sync
        self._syncs = boundary or self._settings.mode is AccumMode.NONE or not _can_wait(ddp)
        ddp.require_backward_grad_sync = synced_before and self._syncs
        try:
            if boundary and ddp in _waiting and synced_before:
                with self._reduction_checked():
                    yield
            else:
                yield
        finally:
            ddp.require_backward_grad_sync = synced_before
        if not self._syncs:
            _waiting.add(ddp)

    @contextmanager
    def _reduction_checked(self) -> Iterator[None]:
        """Makes sure that what waits is reduced, which DDP does if its forward and each parameter took part."""
        ddp, params = self._ddp, {name: param for name, param in self._params().items() if param.requires_grad}
        reached = set()
        hooks = [
            param.register_post_accumulate_grad_hook(lambda each: reached.add(id(each))) for param in params.values()
        ]
        # Each forward overwrites this with a bool that says whether it synchronises.
        prepared_before = ddp.require_forward_param_sync
        ddp.require_forward_param_sync = int(prepared_before)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            ran_forward = type(ddp.require_forward_param_sync) is bool
            ddp.require_forward_param_sync = bool(ddp.require_forward_param_sync)
        missed = [name for name, param in params.items() if id(param) not in reached]
        waiting = self.held_back()
        if not waiting:
            return
        if not reached or not (ran_forward or prepared_before):
            raise HeldBackGradientError(
                f"DDP did not reduce the gradients of {', '.join(waiting)}: its forward and backward did not both run "
                "inside the block of the boundary. Run them there, or give the window up with GradSync.discard()."
            )
        if missed and not (ddp.find_unused_parameters or ddp.static_graph):
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

    def plan(self) -> Plan:
        ddp = self._ddp
        world = ddp.process_group.size()
        reduce = (f"all_reduce over {world} ranks",)
        waits = self._settings.mode is not AccumMode.NONE and world > 1
        notes = ("static_graph=True synchronises the very first backward.",) if waits and ddp.static_graph else ()
        return Plan(
            backend="ddp",
            where=f"{world} ranks",
            each_micro_step=() if waits else reduce,
            waits=reduce if waits else (),
            no_effect="" if waits else f"fsdp_accum_mode={self._settings.mode.value!r} saves nothing here",
            notes=notes,
        )


def _can_wait(ddp: DistributedDataParallel) -> bool:
    """A static graph is recorded by the first synchronised backward, without which torch fails."""
    return not ddp.static_graph or ddp._static_graph_delay_allreduce_enqueued


def _make_reducer_anew(ddp: DistributedDataParallel) -> None:
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
