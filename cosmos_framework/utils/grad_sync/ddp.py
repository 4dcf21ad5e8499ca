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

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .accum_mode import AccumMode
from .backend import HeldBackGradientError, Plan, Settings

# A static graph is recorded by the first synchronised backward, without which torch fails.
_graph_recorded: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_waiting: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class DDPBackend:
    """One `DistributedDataParallel` wrapper, or a subclass of it."""

    def __init__(
        self, ddp: DistributedDataParallel, settings: Settings, name_of: Callable[[nn.Module, str], str]
    ) -> None:
        self._ref = weakref.ref(ddp)
        self._settings = settings
        self._name_of = name_of

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
        syncs = boundary or self._settings.mode is AccumMode.NONE or not self._can_wait
        ddp.require_backward_grad_sync = synced_before and syncs
        try:
            if syncs and ddp in _waiting and not (ddp.find_unused_parameters or ddp.static_graph):
                with self._all_params_used():
                    yield
            else:
                yield
        finally:
            ddp.require_backward_grad_sync = synced_before
        if not syncs:
            _waiting.add(ddp)
        elif any(param.grad is not None for param in self._params().values()):
            _graph_recorded.add(ddp)

    @property
    def _can_wait(self) -> bool:
        return not self._ddp.static_graph or self._ddp in _graph_recorded

    @contextmanager
    def _all_params_used(self) -> Iterator[None]:
        """Checks that the boundary's backward reached each parameter, without which DDP leaves its bucket alone."""
        params = self._params()
        reached = set()
        hooks = [
            param.register_post_accumulate_grad_hook(lambda each: reached.add(id(each))) for param in params.values()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        missed = [name for name, param in params.items() if id(param) not in reached]
        if missed and reached:
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
        _waiting.discard(self._ddp)
        for param in self._ddp.parameters():
            param.grad = None

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


def covered_params(ddp: DistributedDataParallel) -> set[int]:
    """Returns the ids of the parameters that DDP reduces."""
    return set(map(id, ddp._module_parameters))
