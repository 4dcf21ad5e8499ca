# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""The only place that touches torch's private FSDP2 state, for torch 2.10 to 2.14 and what looks like them.

A `fully_shard` call makes a state with parameter groups; a group's `post_backward` reduces its gradients. Its name,
its flags and its gradient buffers are the whole of what is used here (source: torch/distributed/fsdp/_fully_shard/).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

GROUP_NEEDS = (
    "post_backward",
    "fsdp_params",
    "mesh_info",
    "post_forward_mesh_info",
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "_partial_reduce_output",
    "_training_state",
    "is_unsharded",
    "is_sharded_post_forward",
    "reshard",
    "finalize_backward",
    "_post_forward_indices",
)
PARAM_NEEDS = ("sharded_param", "unsharded_accumulated_grad", "_module_info", "_orig_size", "padded_sharded_param_size")
STATE_NEEDS = ("_state_ctx", "_comm_ctx", "_is_root", "_modules", "_root_post_backward_final_callback")


class UnsupportedTorchError(RuntimeError):
    """This torch keeps its FSDP2 state in a way that this module does not know."""


@dataclass
class Held:
    """What a group holds back since its window opened. We keep it, not torch, so nothing else can touch or leak it.

    Parameters are named by their position in the group.

    Attributes:
        used: the parameters that received a gradient on this rank.
        filled: the parameters reduced from zeros alone on this rank, and whether each had no sharded gradient before.
        unsharded: whole local gradients in the reduce dtype, of what waits before the reduce-scatter.
        partial: flat sharded gradients in the reduce dtype, of what waits before the all-reduce.
        layout: the parameters in `partial`, in its order.
        gathered: whether the group's parameters were kept gathered.
    """

    used: set[int] = field(default_factory=set)
    filled: dict[int, bool] = field(default_factory=dict)
    unsharded: dict[int, Tensor] = field(default_factory=dict)
    partial: Tensor | None = None
    layout: tuple[int, ...] = ()
    gathered: bool = False

    @property
    def is_waiting(self) -> bool:
        return bool(self.unsharded) or self.partial is not None

    def clear(self) -> None:
        """Makes this a window that has just opened."""
        self.used.clear()
        self.filled.clear()
        self.unsharded.clear()
        self.partial = None
        self.layout = ()
        self.gathered = False


class Window:
    """What one GradSync holds back of each of torch's groups; it is gone with the GradSync, or with the group."""

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()
        self._groups: weakref.WeakKeyDictionary[Any, list[ParamGroup]] = weakref.WeakKeyDictionary()

    def groups_of(self, state: Any) -> list[ParamGroup]:
        """Returns the parameter groups of what one `fully_shard` call made, each time the same objects."""
        if state not in self._groups:
            _require(state, STATE_NEEDS)
            self._groups[state] = [
                ParamGroup(state, group, self._held.setdefault(group, Held())) for group in _groups_of(state)
            ]
        return self._groups[state]

    def __len__(self) -> int:
        return len(self._groups)


class ParamGroup:
    """One of torch's FSDP parameter groups, in the words that deferral needs."""

    def __init__(self, state: Any, group: Any, held: Held) -> None:
        self._state: weakref.ref[Any] = weakref.ref(state)
        self._group = weakref.ref(group)
        self.held = held
        self.forwards_before = 0  # forwards that wait for their backward when a block begins
        self.mesh: dist.DeviceMesh = group.mesh_info.mesh
        self.shard_size: int = getattr(group.mesh_info, "shard_mesh_size", 1)
        self.replicate_size: int = getattr(group.mesh_info, "replicate_mesh_size", 1)

    @property
    def state(self) -> Any:
        return self._state()

    @property
    def group(self) -> Any:
        group = self._group()
        if group is None:
            raise ReferenceError("the model of this GradSync is gone")
        return group

    @property
    def params(self) -> list[Any]:
        return self.group.fsdp_params

    # What the group is

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of the reduction, None if that of the parameters."""
        return self.group.mp_policy.reduce_dtype or self.group.mp_policy.param_dtype

    def trainable(self) -> list[int]:
        return [i for i, param in enumerate(self.params) if _current(param).requires_grad]

    @property
    def reduce_itemsize(self) -> int:
        """Bytes per element of what is reduced."""
        return (self.reduce_dtype or self.params[0].sharded_param.dtype).itemsize

    @property
    def device(self) -> torch.device:
        return self.group.device

    def numel(self, position: int) -> int:
        """The number of elements of a whole parameter."""
        return self.params[position]._orig_size.numel()

    def sharded_numel(self, position: int) -> int:
        """The number of elements of a rank's shard, with torch's padding."""
        return self.params[position].padded_sharded_param_size.numel()

    def location(self, position: int) -> tuple[nn.Module, str]:
        """The module that has the parameter, and its name there."""
        info = self.params[position]._module_info
        return info.module, info.param_name

    # Gradients

    @property
    def has_run(self) -> bool:
        return all(hasattr(param, "_unsharded_param") for param in self.params)

    def fresh(self) -> list[int]:
        """The parameters with a gradient that autograd left since the group was last reduced."""
        unsharded = (getattr(param, "_unsharded_param", None) for param in self.params)
        return [i for i, param in enumerate(unsharded) if param is not None and param.grad is not None]

    def take(self, position: int) -> Tensor:
        """Removes the fresh gradient from torch's sight and returns it, in the reduce dtype."""
        param = self.params[position]
        grad = param._unsharded_param.grad
        param._unsharded_param.grad = None
        return grad.to(param.reduce_dtype or grad.dtype)

    def give(self, position: int, grad: Tensor) -> None:
        """Hands a held gradient to torch, which adds the fresh one and reduces the sum."""
        self.params[position].unsharded_accumulated_grad = grad

    def zeros(self, position: int) -> Tensor:
        param = self.params[position]
        return torch.zeros_like(param._unsharded_param, dtype=param.reduce_dtype, requires_grad=False)

    def fill(self, position: int) -> None:
        """Gives a parameter without a gradient one of zeros."""
        param = self.params[position]._unsharded_param
        param.grad = torch.zeros_like(param, requires_grad=False)

    def lacks_sharded_grad(self, position: int) -> bool:
        return self.params[position].sharded_param.grad is None

    def drop_sharded_grad(self, position: int) -> None:
        self.params[position].sharded_param.grad = None

    @contextmanager
    def hooks_silent(self, positions: Iterable[int]) -> Iterator[None]:
        """Hides the post-accumulate-grad hooks, which torch runs for whatever it reduces, zeros included."""
        hooks = [hooks for position in positions if (hooks := self._grad_hooks(position))]
        hidden = [dict(each) for each in hooks]
        for each in hooks:
            each.clear()
        try:
            yield
        finally:
            for each, was in zip(hooks, hidden, strict=True):
                each.update(was)

    def run_hooks(self, position: int) -> None:
        for hook in self._grad_hooks(position).values():
            hook(self.params[position].sharded_param)

    def _grad_hooks(self, position: int) -> dict[int, Callable[[Tensor], None]]:
        return getattr(self.params[position].sharded_param, "_post_accumulate_grad_hooks", None) or {}

    def clear_grads(self) -> None:
        """Drops every gradient of the group, wherever torch or we keep it."""
        self.held.clear()
        self.group._partial_reduce_output = None
        for param in self.params:
            param.sharded_param.grad = None
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None

    # torch's own work

    @property
    def user_lets_reduce(self) -> bool:
        """False where the user has switched a collective off by hand, which is then none of our business."""
        return self.group.reduce_grads and self.group.all_reduce_grads

    @property
    def is_replaced(self) -> bool:
        """Whether a block around this one decides what the group's post-backward does."""
        return "post_backward" in vars(self.group)

    def post_backward(self, partial: Tensor | None = None, all_reduce: bool = True, reshard: bool = True) -> Any:
        """Lets torch reduce what it sees, on top of `partial`; returns the new partial if the all-reduce waits."""
        group = self.group
        flags = group.all_reduce_grads, group.reshard_after_backward, group._partial_reduce_output
        group.all_reduce_grads = flags[0] and all_reduce
        group.reshard_after_backward = flags[1] and reshard
        group._partial_reduce_output = partial
        try:
            type(group).post_backward(group)
            return group._partial_reduce_output
        finally:
            group.all_reduce_grads, group.reshard_after_backward, group._partial_reduce_output = flags

    def ran_before_block(self) -> bool:
        """Whether the block's first backward is that of a forward before the block; asked when that backward ends."""
        before, self.forwards_before = self.forwards_before, 0
        return len(self.group._post_forward_indices) < before

    def reshard(self) -> None:
        """Frees gathered parameters, unless the user wants to keep them."""
        if self.group.reshard_after_backward and self.group.is_unsharded:
            self.group.reshard()

    @property
    def root(self) -> Any:
        """The state under whose forward this group runs; None before the first forward."""
        return next((each for each in self.state._state_ctx.all_states if each._is_root), None)


@contextmanager
def kept_gathered(groups: Iterable[ParamGroup]) -> Iterator[None]:
    """Keeps the parameters gathered after a forward."""
    before = []
    try:
        for each in groups:
            group, state = each.group, each.state
            each.held.gathered = True
            if group.is_sharded_post_forward:  # gathers with the policy that goes away here
                group.reshard()
            each.forwards_before = len(group._post_forward_indices)
            before.append((group, state, group.post_forward_mesh_info, state._is_root is None))
            group.post_forward_mesh_info = None
        yield
    finally:
        for group, state, mesh_info, was_lazy in before:
            # torch itself decides for None when the first forward finds out which state is the root.
            became_root = was_lazy and state._is_root and state._auto_reshard_after_forward
            group.post_forward_mesh_info = None if became_root else mesh_info


@contextmanager
def post_backward_replaced(groups: list[ParamGroup], rule: Callable[[ParamGroup], None]) -> Iterator[None]:
    """Runs `rule(group)` inside the block wherever torch would reduce a group; the innermost block's rule holds."""
    attributes = [vars(group.group) for group in groups]
    before = [each.get("post_backward") for each in attributes]
    for each, group in zip(attributes, groups, strict=True):
        each["post_backward"] = _Replacement(rule, group)
    try:
        yield
    finally:
        for each, replaced in zip(attributes, before, strict=True):
            if replaced is None:
                del each["post_backward"]
            else:
                each["post_backward"] = replaced


class _Replacement:
    """Stands in for the bound method; torch passes arguments that it does not use."""

    __slots__ = ("group", "rule")

    def __init__(self, rule: Callable[[ParamGroup], None], group: ParamGroup) -> None:
        self.rule, self.group = rule, group

    def __call__(self, *unused: Any) -> None:
        self.rule(self.group)


def find_groups(modules: Iterable[nn.Module], window: Window) -> list[ParamGroup]:
    """Returns the parameter groups of all `fully_shard`ed modules among `modules`, each once.

    Args:
        modules: where to look; not below them.
        window: keeps what the groups hold back.

    Raises:
        UnsupportedTorchError: torch's private state lacks something that this file needs.
    """
    states = dict.fromkeys(cast(Any, module)._get_fsdp_state() for module in modules if isinstance(module, FSDPModule))
    return [group for state in states for group in window.groups_of(state)]


def covered_params(modules: Iterable[nn.Module]) -> set[tuple[int, str]]:
    """Returns (module id, name) of every parameter that a group manages, tied ones under each of their names."""
    covered = set()
    for group in find_groups(modules, Window()):
        for info in (param._module_info for param in group.params):
            covered.add((id(info.module), info.param_name))
            covered.update(zip(map(id, info.shared_modules), info.shared_param_names, strict=True))
    return covered


def finish_backward(groups: Iterable[ParamGroup]) -> None:
    """Runs the end of a backward for the roots of `groups`: each group's post-backward, then waiting for streams."""
    for root in {id(root): root for group in groups if (root := group.root)}.values():
        root._root_post_backward_final_callback()


def reset_after_failure(groups: Iterable[ParamGroup]) -> None:
    """Makes torch forget a forward or backward that an exception cut short."""
    for root in {id(root): root for group in groups if (root := group.root)}.values():
        module = root._modules[0]
        if hasattr(module, "reset_iter_state"):  # public since torch 2.13
            module.reset_iter_state()
        else:
            _reset_iter_state(root)


def _reset_iter_state(root: Any) -> None:
    idle = type(root._training_state).IDLE
    for state in root._state_ctx.all_states:
        state._training_state = idle
        state._modules_to_run_forward.clear()
        for group in _groups_of(state):
            group.finalize_backward()
            group._reshard_after_forward_event = None
            group._training_state = idle
            group.reshard()
    root._comm_ctx.all_gather_state = None
    root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _current(param: Any) -> nn.Parameter:
    return getattr(param, "_unsharded_param", param.sharded_param)


def _groups_of(state: Any) -> list[Any]:
    # A module can have several groups since torch 2.13.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    groups = [group for group in groups if group is not None]
    for group in groups:
        _require(group, GROUP_NEEDS)
        for param in group.fsdp_params[:1]:
            _require(param, PARAM_NEEDS)
    return groups


def _require(obj: Any, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not hasattr(obj, name)]
    if missing:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} keeps FSDP2's state in a layout unknown here: {type(obj).__name__} has no "
            f"{', '.join(missing)}. fsdp_accum_mode='none' works without it."
        )
