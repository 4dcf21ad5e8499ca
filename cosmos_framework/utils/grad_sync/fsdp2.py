# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""FSDP2: a window's gradients, held by us and handed back to torch so that it reduces the right sum.

torch adds up what it holds back by position, wants one dtype in a group, and drops or leaks what no later backward
picks up. One rule avoids all of that: *every reduction of a group inside a window covers all its trainable parameters,
with zeros for those that have no gradient, and what waits is out of torch's sight until then*. The rule stands in for
the group's post-backward, the one place through which each of its reductions goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from .accum_mode import AccumMode
from .backend import HeldBackGradientError, Plan, Settings
from .choice import Choice, choose, sharded_grad_bytes, whole_grad_bytes
from .fsdp2_state import Held, ParamGroup, Window, finish_backward, intercepted, reset_after_failure

NARROW = (torch.float16, torch.bfloat16)


class FSDP2Backend:
    """All parameter groups of the `fully_shard`ed modules of a model, whatever their meshes."""

    def __init__(
        self, groups: list[ParamGroup], window: Window, settings: Settings, name_of: Callable[[nn.Module, str], str]
    ) -> None:
        self._groups = groups
        self._window = window
        self._held = window.held
        self._settings = settings
        self._name_of = name_of
        self._choices = choose(groups, settings)
        self._usages = [_Usage(mesh, on_mesh) for mesh, on_mesh in _by_mesh(groups).items()]
        self._taking_part: set[ParamGroup] = set()
        self._is_open = False
        self._forward_was_outside = False

    @contextmanager
    def micro_step(self, boundary: bool) -> Iterator[None]:
        if not self._is_open:
            self._taking_part = {group for group in self._groups if self._takes_part(group)}
            self._is_open = True
        reduce = self._at_boundary if boundary else self._before_boundary
        with intercepted(self._window, self._taking_part, reduce, self._keeps_gathered):
            yield

    def _takes_part(self, group: ParamGroup) -> bool:
        """Whether this window has to do with a group; if its user has switched a collective off it is torch's alone.

        In every mode but "none" that is so even if nothing waits: ranks that use different parameters are found out.
        """
        return group.user_lets_reduce and (
            (self._settings.mode is not AccumMode.NONE and group.shard_size * group.replicate_size > 1)
            or self._choices[group].keeps_gathered
            or self._fills_unused(group)
            or self._waits(group)
        )

    def _fills_unused(self, group: ParamGroup) -> bool:
        """Whether parameters that this rank does not use are reduced as zeros, for another rank may use them."""
        return self._settings.reduce_unused_params or group.user_fills_unused

    def _waits(self, group: ParamGroup) -> bool:
        return group in self._held and self._held[group].is_waiting

    def _keeps_gathered(self, group: ParamGroup) -> bool:
        return self._choices[group].keeps_gathered

    def _before_boundary(self, group: ParamGroup) -> None:
        choice, fresh = self._choices[group], group.fresh()
        if choice.keeps_gathered and fresh and not (self._held[group].gathered or group.is_in_forward):
            self._forward_was_outside = True
        if choice.waits is AccumMode.GRAD_SYNC:
            self._hold(group, fresh)
            group.post_backward(reshard=not choice.keeps_gathered)  # sees no gradient
        else:
            self._reduce_if_run(group, all_reduce=choice.waits is None, reshard=not choice.keeps_gathered)

    def _at_boundary(self, group: ParamGroup) -> None:
        self._reduce_if_run(group, all_reduce=True, reshard=True)

    def _hold(self, group: ParamGroup, fresh: list[int]) -> None:
        held = self._held[group]
        held.used.update(fresh)
        for position in fresh:
            grad = group.take(position)
            if position in held.unsharded:
                held.unsharded[position] += grad
            else:
                held.unsharded[position] = grad

    def _reduce_if_run(self, group: ParamGroup, all_reduce: bool, reshard: bool) -> None:
        # What is held of a group without a fresh gradient waits on: autograd may still be on its way to the group, and
        # torch calls here for every group whenever a backward ends, that of a reentrant checkpoint included.
        if group.fresh() or (self._fills_unused(group) and group.has_run):
            self._reduce(group, all_reduce, reshard)
        else:
            group.post_backward(reshard=reshard)

    def _reduce(self, group: ParamGroup, all_reduce: bool, reshard: bool = True) -> None:
        held, fresh, trainable = self._held[group], group.fresh(), group.trainable()
        held.used.update(fresh)
        covered = tuple(sorted({*trainable, *fresh, *held.unsharded}))
        if held.partial is not None and covered != held.layout:
            self._refuse_thaw(group, set(covered) ^ set(held.layout))
        zeros = set(covered).difference(fresh, held.unsharded, held.used if held.partial is not None else ())
        if all_reduce:
            for position in zeros.difference(held.used):
                held.filled.setdefault(position, group.lacks_sharded_grad(position))
        if held.unsharded:
            # torch reduces one dtype at a time: all go the way of the held ones, which are in the reduce dtype.
            for position in covered:
                grad = held.unsharded.pop(position, None)
                group.give(position, group.zeros(position) if grad is None else grad)
        else:
            for position in set(covered).difference(fresh):
                group.fill(position)
        # Hooks run where a gradient is. Whether another rank has one is known at the window's end; what is reduced in
        # each micro-step cannot wait for that, so that all ranks run all hooks there, as torch does.
        knows = self._choices[group].waits or not self._fills_unused(group)
        with group.hooks_silent(zeros if knows else ()):
            held.partial = group.post_backward(held.partial, all_reduce, reshard)
        held.layout = covered

    def _refuse_thaw(self, group: ParamGroup, changed: set[int]) -> None:
        raise HeldBackGradientError(
            f"requires_grad of {', '.join(self._names(group, changed))} changed inside a window whose gradients are "
            "held back: change it between windows, or give the window up with GradSync.discard() first."
        )

    def close_window(self) -> None:
        if waiting := [group for group, held in self._touched() if held.is_waiting]:
            with intercepted(self._window, waiting, lambda group: self._reduce(group, all_reduce=True)):
                finish_backward(waiting)
        if stuck := [(group, held) for group, held in self._touched() if held.is_waiting or not group.user_lets_reduce]:
            names = [name for group, held in stuck for name in self._names(group, held.used)]
            raise HeldBackGradientError(
                f"gradients of {', '.join(names)} are still held back after the boundary, since gradient sync was "
                "switched off by hand inside the window: switch it on again before the boundary."
            )
        used = self._used_by_any_rank()
        for group, held in self._touched():
            for position, was_none in held.filled.items():
                if (group, position) in used or group.user_fills_unused:
                    if position not in held.used and self._choices[group].waits:
                        group.run_hooks(position)
                elif was_none:
                    group.drop_sharded_grad(position)
            if held.gathered:
                group.reshard()
        self._forget()

    def _touched(self) -> list[tuple[ParamGroup, Held]]:
        """The groups that ran in the open window, in an order that the ranks share."""
        return [(group, self._held[group]) for group in self._groups if group in self._held]

    def _forget(self) -> None:
        self._held.clear()
        self._is_open = False

    def _used_by_any_rank(self) -> set[tuple[ParamGroup, int]]:
        """Returns the parameters with a gradient in this window, after a small all-reduce.

        Raises:
            HeldBackGradientError: the ranks used different parameters and nobody said that they would.
        """
        used: set[tuple[ParamGroup, int]] = set()
        mixed: list[tuple[ParamGroup, int]] = []
        for usage in self._usages:
            if not self._taking_part.isdisjoint(usage.groups):
                anywhere, in_part = usage.over_ranks(self._held)
                used.update(anywhere)
                mixed += [(group, position) for group, position in in_part if not self._fills_unused(group)]
        if mixed:
            names = [name for group, position in mixed for name in self._names(group, {position})]
            raise HeldBackGradientError(
                f"some ranks used {', '.join(names)} in this window and some did not. If that is meant, set "
                "fsdp_reduce_unused_params=True; otherwise let every rank use the same parameters."
            )
        return used

    def held_back(self) -> dict[str, int]:
        bytes_of = {}
        for group, held in self._touched():
            for position in sorted(held.used) if held.is_waiting else ():
                nbytes = held.unsharded[position].nbytes if position in held.unsharded else 0
                if held.partial is not None and position in held.layout:
                    nbytes += group.sharded_numel(position) * held.partial.element_size()
                bytes_of.update(dict.fromkeys(self._names(group, {position}), nbytes))
        return bytes_of

    def _names(self, group: ParamGroup, positions: set[int]) -> list[str]:
        return [self._name_of(*group.location(position)) for position in sorted(positions)]

    def discard(self, failed: bool) -> None:
        if failed:
            reset_after_failure(self._groups)
        for group in self._groups:
            group.clear_grads()
            group.reshard()
        self._forget()

    def remarks(self) -> tuple[str, ...]:
        if not self._forward_was_outside:
            return ()
        return ("a forward ran outside the block, where FSDP2 frees the parameters after it: run it inside.",)

    def plans(self) -> list[Plan]:
        parts: dict[Choice, list[ParamGroup]] = {}
        for group, choice in self._choices.items():
            parts.setdefault(choice, []).append(group)
        return [self._plan_of(choice, groups, apart=len(parts) > 1) for choice, groups in parts.items()]

    def _plan_of(self, choice: Choice, groups: list[ParamGroup], apart: bool) -> Plan:
        each: set[str] = set()
        once: set[str] = set()
        for group in groups:
            reductions = _reductions(group)
            later = {AccumMode.GRAD_SYNC: reductions, AccumMode.ALL_REDUCE: reductions[-1:], None: ()}[choice.waits]
            once.update(later)
            each.update(set(reductions).difference(later))
        if not choice.keeps_gathered:
            each.update(f"all_gather over {_dims(group)[-1]}" for group in groups if group.shard_size > 1)
        bytes_held = {AccumMode.GRAD_SYNC: whole_grad_bytes, AccumMode.ALL_REDUCE: sharded_grad_bytes}
        where = f"{len(groups)} groups over {' and '.join(sorted({_mesh_text(group) for group in groups}))}"
        names = dict.fromkeys(self._name_of(group.module, "").removesuffix(".") or "the root" for group in groups)
        return Plan(
            backend="fsdp2",
            where=f"{where}: {', '.join(names)}" if apart else where,
            each_micro_step=tuple(sorted(each)),
            waits=tuple(sorted(once)),
            gathered_once=choice.keeps_gathered,
            no_effect="" if once else self._why_nothing_waits(choice, groups),
            held_bytes=sum(map(bytes_held[choice.waits], groups)) if choice.waits else 0,
            gathered_bytes=sum(group.gathered_bytes for group in groups) if choice.keeps_gathered else 0,
            regathers=_regathers(groups) if choice.keeps_gathered else {},
            notes=self._notes(groups) if choice.waits else (),
        )

    def _why_nothing_waits(self, choice: Choice, groups: list[ParamGroup]) -> str:
        mode = self._settings.mode
        if mode is AccumMode.NONE:
            return "fsdp_accum_mode='none' lets every micro-step synchronise"
        if all(group.shard_size * group.replicate_size == 1 for group in groups):
            return f"fsdp_accum_mode={mode.value!r} saves nothing on one rank: there is nothing to synchronise"
        if mode is AccumMode.AUTO:
            return "" if choice.keeps_gathered else "nothing waits within the budget: raise fsdp_accum_memory_gib"
        return (
            f"fsdp_accum_mode={mode.value!r} saves nothing on a mesh without replicas: set "
            "fsdp_accum_mode='grad_sync', or data_parallel_replicate_degree above 1"
        )

    def _notes(self, groups: list[ParamGroup]) -> tuple[str, ...]:
        narrow = {str(group.reduce_dtype) for group in groups if group.reduce_dtype in NARROW}
        if not narrow:
            return ()
        return (
            f"gradients are summed over the micro-steps in {' and '.join(sorted(narrow))}, which loses accuracy with "
            "their number: set MixedPrecisionPolicy(reduce_dtype=torch.float32).",
        )


class _Usage:
    """Which parameters of the groups on one mesh had a gradient, in the eyes of all its ranks."""

    def __init__(self, mesh: dist.DeviceMesh, groups: list[ParamGroup]) -> None:
        self.groups = groups
        self._mesh = mesh
        self._params = [(group, position) for group in groups for position in range(len(group.params))]
        self._index = {param: index for index, param in enumerate(self._params)}

    def over_ranks(
        self, held: dict[ParamGroup, Held]
    ) -> tuple[list[tuple[ParamGroup, int]], list[tuple[ParamGroup, int]]]:
        """Returns the parameters with a gradient on any rank, and those of them without one on another."""
        mine = [self._index[group, i] for group in self.groups if group in held for i in held[group].used]
        flags = torch.zeros(2, len(self._params), dtype=torch.uint8)  # with a gradient somewhere, without one somewhere
        flags[0, mine] = 1
        flags[1] = 1 - flags[0]
        flags = flags.to(self.groups[0].device)
        for process_group in _groups_across(self._mesh):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=process_group)
        anywhere, elsewhere_not = flags.cpu()
        return self._at(anywhere), self._at(anywhere & elsewhere_not)

    def _at(self, flags: torch.Tensor) -> list[tuple[ParamGroup, int]]:
        return [self._params[index] for index in flags.nonzero().flatten().tolist()]


def _by_mesh(groups: Iterable[ParamGroup]) -> dict[dist.DeviceMesh, list[ParamGroup]]:
    by_mesh: dict[dist.DeviceMesh, list[ParamGroup]] = {}
    for group in groups:
        by_mesh.setdefault(group.mesh, []).append(group)
    return by_mesh


def _groups_across(mesh: dist.DeviceMesh) -> list[dist.ProcessGroup | None]:
    """Returns the process groups over which a reduction one after the other reaches every rank of the mesh."""
    if mesh.size() == 1:
        return []
    if mesh.size() == dist.get_world_size():
        return [None]
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


def _dims(group: ParamGroup) -> tuple[str, ...]:
    mesh = group.mesh
    return mesh.mesh_dim_names or tuple(f"mesh dimension {dim}" for dim in range(mesh.ndim))


def _mesh_text(group: ParamGroup) -> str:
    return "x".join(map(str, group.mesh.shape)) + f" ({', '.join(_dims(group))})"


def _regathers(groups: list[ParamGroup]) -> dict[str, tuple[int, int]]:
    """Number and bytes of the all-gathers in a backward, by mesh dimension."""
    found: dict[str, tuple[int, int]] = {}
    for group in groups:
        if group.shard_size > 1 and len(group.gathers) > 1:
            calls, nbytes = found.get(_dims(group)[-1], (0, 0))
            found[_dims(group)[-1]] = calls + 1, nbytes + group.gathered_bytes
    return found


def _reductions(group: ParamGroup) -> tuple[str, ...]:
    """The reductions of a group, in the order in which they run."""
    dims = _dims(group)
    scatter = (f"reduce_scatter over {dims[-1]}",) if group.shard_size > 1 else ()
    return scatter + ((f"all_reduce over {dims[0]}",) if group.replicate_size > 1 else ())
