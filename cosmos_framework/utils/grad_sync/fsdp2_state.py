# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""The only place that touches torch's private FSDP2 state, for torch 2.10 to 2.14 and what looks like them.

A `fully_shard` call makes a state with parameter groups. A group's `post_backward` reduces its gradients, its `reshard`
frees its gathered parameters. These two, the flags and the gradient buffers are the whole of what is used here (source:
torch/distributed/fsdp/_fully_shard/).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

GROUP_NEEDS = (
    "post_backward",
    "reshard",
    "fsdp_params",
    "mesh_info",
    "post_forward_mesh_info",
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "_partial_reduce_output",
    "_training_state",
    "is_unsharded",
    "finalize_backward",
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


class Window:
    """What one GradSync holds back of each of torch's groups; it is gone with the GradSync.

    Attributes:
        held: what is held of the groups that the open window has touched; empty between windows.
    """

    def __init__(self) -> None:
        self.held: defaultdict[ParamGroup, Held] = defaultdict(Held)
        self._known: weakref.WeakKeyDictionary[Any, ParamGroup] = weakref.WeakKeyDictionary()

    def adapt(self, state: Any, group: Any) -> ParamGroup:
        """Returns the adapter of a group of torch's, each time the same one."""
        if group not in self._known:
            self._known[group] = ParamGroup(state, group)
        return self._known[group]

    def find(self, group: Any) -> ParamGroup | None:
        """Returns the adapter of a group of torch's, None for a group of another model."""
        return self._known.get(group)

    @property
    def group_class(self) -> Any:
        """torch's class of the groups; there is at least one."""
        return type(next(iter(self._known)))


class ParamGroup:
    """One of torch's FSDP parameter groups, in the words that deferral needs."""

    def __init__(self, state: Any, group: Any) -> None:
        self._state: weakref.ref[Any] = weakref.ref(state)
        self._group = weakref.ref(group)
        self.mesh: dist.DeviceMesh = group.mesh_info.mesh
        self.shard_size: int = getattr(group.mesh_info, "shard_mesh_size", 1)
        self.replicate_size: int = getattr(group.mesh_info, "replicate_mesh_size", 1)

    @property
    def state(self) -> Any:
        return _alive(self._state)

    @property
    def group(self) -> Any:
        return _alive(self._group)

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
    def gathered_bytes(self) -> int:
        """Bytes of the whole parameters, in the dtype in which they are gathered."""
        dtype = self.group.mp_policy.param_dtype
        return sum(p._orig_size.numel() * (dtype or p.sharded_param.dtype).itemsize for p in self.params)

    @property
    def shard_ranks(self) -> list[int]:
        """The ranks among which the parameters are sharded; this one alone if they are not."""
        return _ranks(self.group.mesh_info)

    @property
    def gathers(self) -> list[list[int]]:
        """The ranks of each all-gather of a micro-step: one in the forward, another if torch frees the result there."""
        again = self.group.post_forward_mesh_info
        return [self.shard_ranks] + ([_ranks(again)] if again is not None else [])

    @property
    def module(self) -> nn.Module:
        """The module that the group was made for, the first if several."""
        return self.state._modules[0]

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
        """Drops every gradient of the group, wherever torch keeps it."""
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
        group = self.group
        return group.reduce_grads and group.all_reduce_grads

    @property
    def user_fills_unused(self) -> bool:
        """True where torch itself reduces unused parameters as zeros, which then are their gradients (torch 2.13)."""
        return getattr(self.group, "reduce_scatter_unused_params", False)

    def post_backward(self, partial: Tensor | None = None, all_reduce: bool = True, reshard: bool = True) -> Any:
        """Lets torch reduce what it sees, on top of `partial`; returns the new partial if the all-reduce waits.

        For use inside a block.
        """
        group = self.group
        flags = group.all_reduce_grads, group.reshard_after_backward, group._partial_reduce_output
        group.all_reduce_grads = flags[0] and all_reduce
        group.reshard_after_backward = flags[1] and reshard
        group._partial_reduce_output = partial
        try:
            _torch_methods["post_backward"](group)
            return group._partial_reduce_output
        finally:
            group.all_reduce_grads, group.reshard_after_backward, group._partial_reduce_output = flags

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward has begun and not ended; it never ends if only some of the modules of the group run."""
        return self.group._training_state.name == "FORWARD"

    def reshard(self) -> None:
        """Frees gathered parameters, unless the user wants to keep them."""
        if self.group.reshard_after_backward and self.group.is_unsharded:
            self.group.reshard()

    @property
    def root(self) -> Any:
        """The state under whose forward this group runs; None before the first forward."""
        return next((each for each in self.state._state_ctx.all_states if each._is_root), None)


@dataclass(frozen=True, eq=False)
class _Block:
    window: Window
    groups: Container[ParamGroup]
    reduce: Callable[[ParamGroup], None]
    keeps_gathered: Callable[[ParamGroup], bool]


_blocks: list[_Block] = []  # the open ones, the innermost last
_torch_methods: dict[str, Callable[..., None]] = {}  # those of torch that are replaced while a block is open


@contextmanager
def intercepted(
    window: Window,
    groups: Container[ParamGroup],
    reduce: Callable[[ParamGroup], None],
    keeps_gathered: Callable[[ParamGroup], bool] = lambda group: False,
) -> Iterator[None]:
    """Opens a block, inside which we decide what becomes of a group's gradients and gathered parameters.

    Two methods of torch's class are replaced, once for all groups, so that a block costs the same for any model; they
    are torch's own while no block is open. Blocks may close in any order.

    Args:
        window: knows the groups of a model; of several blocks that know a group the innermost decides about it.
        groups: those that are not left to torch.
        reduce: called where torch would reduce a group.
        keeps_gathered: tells whether a group's parameters stay gathered after a forward.
    """
    block, torch_class = _Block(window, groups, reduce, keeps_gathered), window.group_class
    if not _blocks:
        for method in (post_backward, reshard):
            _torch_methods[method.__name__] = getattr(torch_class, method.__name__)
            setattr(torch_class, method.__name__, method)
    _blocks.append(block)
    try:
        yield
    finally:
        _blocks.remove(block)
        if not _blocks:
            for name, torch_method in _torch_methods.items():
                setattr(torch_class, name, torch_method)
            _torch_methods.clear()


def post_backward(group: Any, *unused: Any) -> None:
    """Stands in for torch's method, which does not use its arguments either."""
    block, ours = _decider(group)
    if block is not None and ours is not None:
        block.reduce(ours)
    else:
        _torch_methods["post_backward"](group)


def reshard(group: Any) -> None:
    """Stands in for torch's method."""
    block, ours = _decider(group)
    if block is not None and ours is not None and ours.is_in_forward and block.keeps_gathered(ours):
        block.window.held[ours].gathered = True
    else:
        _torch_methods["reshard"](group)


def _decider(group: Any) -> tuple[_Block, ParamGroup] | tuple[None, None]:
    for block in reversed(_blocks):
        if ours := block.window.find(group):
            return (block, ours) if ours in block.groups else (None, None)
    return None, None


def find_groups(modules: Iterable[nn.Module], window: Window) -> list[ParamGroup]:
    """Returns the parameter groups of all `fully_shard`ed modules among `modules`, each once.

    Args:
        modules: where to look; not below them.
        window: keeps what the groups hold back.

    Raises:
        UnsupportedTorchError: torch's private state lacks something that this file needs.
    """
    states = dict.fromkeys(cast(Any, module)._get_fsdp_state() for module in modules if isinstance(module, FSDPModule))
    return [window.adapt(state, group) for state in states for group in _groups_of(state)]


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


def _ranks(mesh_info: Any) -> list[int]:
    if not hasattr(mesh_info, "shard_process_group"):
        return [dist.get_rank()]
    return dist.get_process_group_ranks(mesh_info.shard_process_group)


def _alive(ref: weakref.ref[Any]) -> Any:
    if (target := ref()) is None:
        raise ReferenceError("the model of this GradSync is gone")
    return target


def _current(param: Any) -> nn.Parameter:
    return getattr(param, "_unsharded_param", param.sharded_param)


def _groups_of(state: Any) -> list[Any]:
    # A module can have several groups since torch 2.13.
    _require(state, STATE_NEEDS)
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
