# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""The window: which micro-step may wait, who is asked to, and what happens when one goes wrong."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from . import ddp, fsdp2_state
from .accum_mode import AccumMode
from .backend import Backend, HeldBackGradientError, Plan, Settings
from .fsdp2 import FSDP2Backend
from .no_sync import NoSyncBackend

logger = logging.getLogger(__name__)

_open_blocks: list[GradSync] = []  # those that have something to put off

WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")


class GradSync:
    """Gradient accumulation over a model that synchronises once a window.

    After a boundary every gradient equals what mode "none" would have left: the value to rounding, and `None` where it
    would have been `None`, whichever parameters each micro-step used. It keeps no model alive.

    Example::

        sync = GradSync(model, mode="all_reduce")
        for i, batch in enumerate(window):
            with sync.micro_step(boundary=i == len(window) - 1):
                (loss(model, batch) / len(window)).backward()
        optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        mode: str | AccumMode = AccumMode.ALL_REDUCE,
        reshard: bool = True,
        reduce_unused_params: bool = False,
        memory_bytes: float = 0.0,
    ) -> None:
        """Remembers what to do; finds the parallel parts of the model when a window opens.

        Args:
            model: any module, or several: DDP wrappers, `fully_shard`ed modules anywhere below, or none of these.
            mode: what waits for the boundary; see `AccumMode`.
            reshard: False keeps FSDP2's parameters gathered from a window's first micro-step to its boundary, which
                saves the other micro-steps' all-gathers and costs one unsharded copy of the parameters.
            reduce_unused_params: the ranks may use different parameters of one FSDP2 group in a micro-step (as DDP's
                `find_unused_parameters`); unused ones are reduced as zeros, in every mode.
            memory_bytes: what mode "auto" may hold per rank beyond mode "all_reduce"; inf for as much as it takes.

        Raises:
            ValueError: `mode` is unknown, or does not go together with `reshard` or `memory_bytes`.
        """
        models = [model] if isinstance(model, nn.Module) else list(model)
        self._models = [weakref.ref(each) for each in models]
        self._settings = Settings(AccumMode.parse(mode), reshard, reduce_unused_params, memory_bytes)
        self._window = fsdp2_state.Window()
        self._found: _Found | None = None
        self._backends: list[Backend] | None = None  # of the open window
        self._is_open = False
        self._prefixes: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._told_about: _Found | None = None
        self._told: set[str] = set()
        self._blocks_without_gradient: int | None = 0  # None: no need to count any more

    @property
    def settings(self) -> Settings:
        """What windows are asked to do; may change between micro-steps."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        if settings != self._settings:
            self._settings = settings
            if self._backends is not None:
                self._backends = self._find_backends()

    def watches(self, models: Iterable[nn.Module]) -> bool:
        """Whether this is the GradSync of exactly these models."""
        return [ref() for ref in self._models] == list(models)

    @contextmanager
    def micro_step(self, boundary: bool) -> Iterator[None]:
        """Runs one forward and backward, which synchronise at the boundary alone.

        Every flag has its former value when the block ends, however it ends. An exception gives the window up, as
        `discard` does, and leaves the model trainable.

        Args:
            boundary: whether this is the window's last micro-step.

        Raises:
            HeldBackGradientError: at the boundary, if the gradients are not what mode "none" would have left; the
                window is given up.
        """
        try:
            with ExitStack() as block:
                backends = self._taking_part(boundary)
                self._is_open = True
                for backend in backends:
                    block.enter_context(backend.micro_step(boundary))
                if backends:
                    _open_blocks.append(self)
                    block.callback(_open_blocks.pop)
                yield
            self._is_open = not boundary
            if backends and not boundary:
                self._tell_misuse(backends)
            if boundary:
                for backend in self._backends or backends:  # a block inside may have had other settings
                    backend.close_window()
                self._backends = None
            elif backends and self._backends is None:  # a boundary inside this block has closed its window
                self._backends = self._find_backends()
        except BaseException:
            self._give_up(failed=True)
            raise

    def _taking_part(self, boundary: bool) -> list[Backend]:
        """Returns nobody, at no cost, where this block has nothing to put off and nothing was."""
        settings = self._settings
        if self._backends is None and not settings.reduce_unused_params and not _open_blocks:
            if settings.mode is AccumMode.NONE and settings.reshard:
                return []
            if boundary and not self._is_open:
                self._tell("a window of one micro-step has nothing to wait for: grad_accum_iter above 1 would save.")
                return []
        if self._backends is None:
            self._backends = self._find_backends()
            self._tell_about_model()
        return self._backends

    def held_back(self) -> dict[str, int]:
        """Returns the parameters whose gradient has not reached every rank, with the bytes held on this rank.

        Empty outside a window. While it is not, `grad` is incomplete or None: clipping, stepping or saving would
        silently miss gradients.
        """
        backends = self._backends if self._backends is not None and self._modules() else ()
        return {name: nbytes for backend in backends for name, nbytes in backend.held_back().items()}

    def require_nothing_held_back(self, action: str) -> None:
        """Stops `action` (for the message: "an optimizer step", "a checkpoint") inside a window.

        Raises:
            HeldBackGradientError: gradients are held back; the message names their parameters.
        """
        if names := self.held_back():
            raise HeldBackGradientError(
                f"{action} in mid-window would miss the gradients of {', '.join(names)}, which are held back on this "
                "rank: run the window's boundary first, or give the window up with GradSync.discard()."
            )

    def discard(self) -> None:
        """Gives up the open window: its gradients are dropped, wherever they are. Does nothing outside a window."""
        if self._is_open:
            self._give_up(failed=False)

    def plan(self) -> list[Plan]:
        """Says, for each backend of the model, what runs each micro-step, what waits, and what has no effect."""
        backends = self._find_backends() if self._backends is None else self._backends
        return [plan for backend in backends for plan in backend.plans()]

    def _give_up(self, failed: bool) -> None:
        for backend in self._backends_to_clean():
            backend.discard(failed)
        for module in self._modules():
            for param in module.parameters(recurse=False):
                param.grad = None
        self._backends, self._is_open = None, False

    def _backends_to_clean(self) -> list[Backend]:
        try:
            return self._find_backends() if self._backends is None or not self._modules() else self._backends
        except fsdp2_state.UnsupportedTorchError:
            return []  # nothing was held back then; the exception that brought us here matters more

    # The model

    def _modules(self) -> list[nn.Module]:
        models = [model for ref in self._models if (model := ref()) is not None]
        return [module for model in models for module in model.modules()]

    def _find_backends(self) -> list[Backend]:
        """Returns those of the model as it is now; the same ones while nothing about it has changed."""
        modules = self._modules()
        if self._found is None or not self._found.still_holds(modules, self._settings):
            self._found = _Found(modules, self._settings, self._search(modules))
        return self._found.backends

    def _search(self, modules: list[nn.Module]) -> list[Backend]:
        backends: list[Backend] = []
        below_no_sync: set[nn.Module] = set()
        for module in modules:
            if not hasattr(type(module), "no_sync"):
                continue
            if isinstance(module, DistributedDataParallel):
                backends.append(ddp.DDPBackend(module, self._settings, self._name_of))
            elif module not in below_no_sync:
                backends.append(NoSyncBackend(module, self._settings, self._name_of))
                below_no_sync.update(module.modules())
        if groups := fsdp2_state.find_groups(modules, self._window):
            backends.append(FSDP2Backend(groups, self._window, self._settings, self._name_of))
        return backends

    def _name_of(self, module: nn.Module, param_name: str) -> str:
        if module not in self._prefixes:
            self._prefixes.update(_module_prefixes(ref() for ref in self._models))
        return self._prefixes.get(module, "") + param_name

    # Telling people

    def _tell_about_model(self) -> None:
        """Says what happens to the model, at its first window and whenever it has changed since."""
        if self._told_about is self._found:
            return
        self._told_about = self._found
        for plan in self.plan():
            is_vain = plan.no_effect and self._settings.mode is not AccumMode.NONE
            self._tell(str(plan), logging.WARNING if is_vain else logging.INFO)
            for note in plan.notes:
                self._tell(note, logging.WARNING)
        if self._backends:
            self._tell_uncovered(self._modules())

    def _tell_misuse(self, backends: list[Backend]) -> None:
        """Warns of a forward or backward outside of the blocks, which then synchronises in every micro-step."""
        for remark in [remark for backend in backends for remark in backend.remarks()]:
            self._tell(remark, logging.WARNING)
        if self._blocks_without_gradient is None:
            return
        if not any(plan.waits for plan in self.plan()):
            self._blocks_without_gradient = None
            return
        # The very first backward of a static graph leaves nothing behind, for it synchronises.
        self._blocks_without_gradient = None if self.held_back() else self._blocks_without_gradient + 1
        if self._blocks_without_gradient == 2:
            self._tell(
                "no gradient arrived in two blocks that should hold some back: run loss.backward() inside the block, "
                "or every micro-step synchronises.",
                logging.WARNING,
            )
            self._blocks_without_gradient = None

    def _tell_uncovered(self, modules: list[nn.Module]) -> None:
        covered = fsdp2_state.covered_params(modules)
        in_ddp = {
            i for module in modules if isinstance(module, DistributedDataParallel) for i in ddp.covered_params(module)
        }
        uncovered = [
            self._name_of(module, name)
            for module in modules
            for name, param in module.named_parameters(recurse=False)
            if param.requires_grad
            and (id(module), name) not in covered
            and id(param) not in in_ddp
            and not isinstance(param, DTensor)
        ]
        if uncovered:
            self._tell(
                f"trainable parameters outside of DDP and FSDP2 are never synchronised: {', '.join(uncovered)}. Add "
                "them before the model is wrapped, or freeze them.",
                logging.WARNING,
            )

    def _tell(self, line: str, level: int = logging.INFO) -> None:
        if line not in self._told:
            self._told.add(line)
            if not dist.is_initialized() or dist.get_rank() == 0:
                logger.log(level, line)


class _Found:
    """The backends of a model with certain modules and settings, none of which it keeps alive."""

    def __init__(self, modules: list[nn.Module], settings: Settings, backends: list[Backend]) -> None:
        self.backends = backends
        self._settings = settings
        self._modules = [weakref.ref(module) for module in modules]
        self._signature = _signature(modules)

    def still_holds(self, modules: list[nn.Module], settings: Settings) -> bool:
        """Whether another search would find the same: `fully_shard` changes a module's type, LoRA adds parameters."""
        return (
            settings == self._settings
            and [ref() for ref in self._modules] == modules
            and _signature(modules) == self._signature
        )


def _signature(modules: list[nn.Module]) -> tuple[list[type], list[int]]:
    return list(map(type, modules)), list(map(len, map(operator.attrgetter("_parameters"), modules)))


def _module_prefixes(models: Iterable[nn.Module | None]) -> dict[nn.Module, str]:
    """Returns what the names of each module's parameters start with, without what wrappers add to them."""
    prefixes = {}
    for model in models:
        for name, module in model.named_modules() if model is not None else ():
            prefix = f"{name}." if name else ""
            if isinstance(model, DistributedDataParallel):
                prefix = prefix.removeprefix("module.")
            for wrapper in WRAPPER_NAMES:
                prefix = prefix.replace(wrapper, "")
            prefixes[module] = prefix
    return prefixes
