# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Any other wrapper with a `no_sync()` context, such as torch's FSDP1: it waits while the context is open."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from .accum_mode import AccumMode
from .backend import Plan, Settings


class NoSyncBackend:
    """A module whose `no_sync()` puts its gradient synchronisation off."""

    def __init__(self, module: nn.Module, settings: Settings, name_of: Callable[[nn.Module, str], str]) -> None:
        self._ref = weakref.ref(module)
        self._settings = settings
        self._name_of = name_of
        self._is_waiting = False

    @property
    def _module(self) -> nn.Module:
        module = self._ref()
        if module is None:
            raise ReferenceError("the model of this GradSync is gone")
        return module

    @contextmanager
    def micro_step(self, boundary: bool) -> Iterator[None]:
        waits = not boundary and self._settings.mode is not AccumMode.NONE
        with ExitStack() as block:
            if waits:
                self._enter_no_sync(block)
            yield
        self._is_waiting |= waits

    def _enter_no_sync(self, block: ExitStack) -> None:
        try:
            block.enter_context(self._module.no_sync())  # type: ignore[operator]
        except Exception as error:
            raise RuntimeError(
                f"{type(self._module).__name__}.no_sync(): {error}; fsdp_accum_mode='none' works without it."
            ) from error

    def close_window(self) -> None:
        self._is_waiting = False

    def held_back(self) -> dict[str, int]:
        if not self._is_waiting:
            return {}
        return {
            self._name_of(module, name): param.grad.nbytes
            for module in self._module.modules()
            for name, param in module.named_parameters(recurse=False)
            if param.grad is not None
        }

    def discard(self, failed: bool) -> None:
        self._is_waiting = False
        self._module.zero_grad(set_to_none=True)

    def remarks(self) -> tuple[str, ...]:
        return ()

    def plans(self) -> list[Plan]:
        waits = self._settings.mode is not AccumMode.NONE
        sync = ("gradient synchronisation",)
        return [
            Plan(
                backend="no_sync",
                where=type(self._module).__name__,
                each_micro_step=() if waits else sync,
                waits=sync if waits else (),
                no_effect="" if waits else "fsdp_accum_mode='none' lets every micro-step synchronise",
            )
        ]
