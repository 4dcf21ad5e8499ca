# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""FSDP2: a window's gradients, held by us and handed back to torch so that it reduces the right sum.

torch adds up what it holds back by position, wants one dtype in a group, and drops or leaks what no later backward
picks up. One rule avoids all of that: *every reduction of a group inside a window covers all its trainable parameters,
with zeros for those that have no gradient, and what waits is out of torch's sight until then*. The rule stands in for
the group's post-backward, the one place through which each of its reductions goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from .accum_mode import AccumMode
from .backend import HeldBackGradientError, Plan, Settings
from .fsdp2_state import ParamGroup, finish_backward, kept_gathered, post_backward_replaced, reset_after_failure

NARROW = (torch.float16, torch.bfloat16)


class FSDP2Backend:
    """All parameter groups of the `fully_shard`ed modules of a model, whatever their meshes."""

    def __init__(self, groups: list[ParamGroup], settings: Settings, name_of: Callable[[nn.Module, str], str]) -> None:
        self._all_groups = groups
        self._settings = settings
        self._name_of = name_of
        self._forward_was_outside = False
        always = not settings.reshard or settings.reduce_unused_params
        self._groups = [
            group
            for group in groups
            if group.user_lets_reduce and (always or self._waits(group) or group.held.is_waiting or group.is_replaced)
        ]

    def _waits(self, group: ParamGroup) -> AccumMode | None:
        """Returns what of a group's reduction waits for the boundary, None if nothing."""
        if self._settings.mode is AccumMode.GRAD_SYNC and group.shard_size * group.replicate_size > 1:
            return AccumMode.GRAD_SYNC
        if self._settings.mode is AccumMode.ALL_REDUCE and group.replicate_size > 1:
            return AccumMode.ALL_REDUCE
        return None

    @contextmanager
    def micro_step(self, boundary: bool) -> Iterator[None]:
        rule = self._at_boundary if boundary else self._before_boundary
        gathered = nullcontext() if self._settings.reshard else kept_gathered(self._groups)
        with post_backward_replaced(self._groups, rule), gathered:
            yield

    def _before_boundary(self, group: ParamGroup) -> None:
        waits, reshard = self._waits(group), self._settings.reshard
        if not reshard and group.ran_before_block():
            self._forward_was_outside = True
        if waits is AccumMode.GRAD_SYNC:
            self._hold(group)
            group.post_backward(reshard=reshard)  # sees no gradient
        else:
            self._reduce_if_run(group, all_reduce=waits is None, reshard=reshard)

    def _at_boundary(self, group: ParamGroup) -> None:
        self._reduce_if_run(group, all_reduce=True, reshard=True)

    def _hold(self, group: ParamGroup) -> None:
        held = group.held
        for position in group.fresh():
            grad = group.take(position)
            if position in held.unsharded:
                held.unsharded[position] += grad
            else:
                held.unsharded[position] = grad
            held.used.add(position)

    def _reduce_if_run(self, group: ParamGroup, all_reduce: bool, reshard: bool) -> None:
        # What is held of a group without a fresh gradient waits on: autograd may still be on its way to the group, and
        # torch calls here for every group whenever a backward ends, that of a reentrant checkpoint included.
        if group.fresh() or (self._settings.reduce_unused_params and group.has_run):
            self._reduce(group, all_reduce, reshard)
        else:
            group.post_backward(reshard=reshard)

    def _reduce(self, group: ParamGroup, all_reduce: bool, reshard: bool = True) -> None:
        held, fresh, trainable = group.held, group.fresh(), group.trainable()
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
        knows = self._waits(group) or not self._settings.reduce_unused_params
        with group.hooks_silent(zeros if knows else ()):
            held.partial = group.post_backward(held.partial, all_reduce, reshard)
        held.layout = covered

    def _refuse_thaw(self, group: ParamGroup, changed: set[int]) -> None:
        raise HeldBackGradientError(
            f"requires_grad of {', '.join(self._names(group, changed))} changed inside a window whose gradients are "
            "held back: change it between windows, or give the window up with GradSync.discard() first."
        )

    def close_window(self) -> None:
        waiting = [group for group in self._groups if group.held.is_waiting]
        if waiting:
            with post_backward_replaced(waiting, lambda group: self._reduce(group, all_reduce=True)):
                finish_backward(waiting)
        if stuck := self.held_back():
            raise HeldBackGradientError(
                f"gradients of {', '.join(stuck)} are still held back after the boundary, since gradient sync was "
                "switched off by hand inside the window: switch it on again before the boundary."
            )
        used = self._used_by_any_rank()
        for index, group in enumerate(self._groups):
            for position, was_none in group.held.filled.items():
                if (index, position) in used:
                    if position not in group.held.used and self._waits(group):
                        group.run_hooks(position)
                elif was_none:
                    group.drop_sharded_grad(position)
        for group in self._all_groups:
            if group.held.gathered:
                group.reshard()
            group.held.clear()

    def _used_by_any_rank(self) -> set[tuple[int, int]]:
        """Returns (index of group, position) of the parameters with a gradient, after a small all-reduce.

        Raises:
            HeldBackGradientError: the ranks used different parameters and nobody said that they would.
        """
        by_mesh: dict[dist.DeviceMesh, list[int]] = {}
        for index, group in enumerate(self._groups):
            by_mesh.setdefault(group.mesh, []).append(index)
        used: set[tuple[int, int]] = set()
        mixed: list[tuple[int, int]] = []
        for mesh, indices in by_mesh.items():
            keys = [(index, position) for index in indices for position in range(len(self._groups[index].params))]
            bits = [position in self._groups[index].held.used for index, position in keys]
            anywhere, not_everywhere = _any_rank(mesh, self._groups[indices[0]].device, bits)
            used.update(key for key, bit in zip(keys, anywhere, strict=True) if bit)
            both = zip(keys, anywhere, not_everywhere, strict=True)
            mixed += [key for key, somewhere, elsewhere in both if somewhere and elsewhere]
        if mixed and not self._settings.reduce_unused_params:
            names = [name for index, position in mixed for name in self._names(self._groups[index], {position})]
            raise HeldBackGradientError(
                f"some ranks used {', '.join(names)} in this window and some did not. If that is meant, set "
                "fsdp_reduce_unused_params=True; otherwise let every rank use the same parameters."
            )
        return used

    def held_back(self) -> dict[str, int]:
        bytes_of = {}
        for group in self._all_groups:
            held = group.held
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
            reset_after_failure(self._all_groups)
        for group in self._all_groups:
            group.clear_grads()
            group.reshard()

    def remarks(self) -> tuple[str, ...]:
        if not self._forward_was_outside:
            return ()
        return ("a forward ran outside the block, where FSDP2 frees the parameters after it: run it inside.",)

    def plan(self) -> Plan:
        waits = [(group, self._waits(group)) for group in self._all_groups]
        each: set[str] = set()
        once: set[str] = set()
        held_bytes = 0
        for group, waiting in waits:
            collectives = _collectives(group)
            later = {AccumMode.GRAD_SYNC: collectives, AccumMode.ALL_REDUCE: collectives[-1:], None: ()}[waiting]
            once.update(later)
            each.update(set(collectives).difference(later))
            if waiting:
                numel = group.numel if waiting is AccumMode.GRAD_SYNC else group.sharded_numel
                held_bytes += sum(map(numel, group.trainable())) * group.reduce_itemsize
        if self._settings.reshard:
            each.update(f"all_gather over {_dims(group)[-1]}" for group in self._all_groups if group.shard_size > 1)
        return Plan(
            backend="fsdp2",
            where=f"{len(waits)} groups over {' and '.join(sorted({_mesh_text(group) for group, _ in waits}))}",
            each_micro_step=tuple(sorted(each)),
            waits=tuple(sorted(once)),
            gathered_once=not self._settings.reshard,
            no_effect="" if once else self._why_nothing_waits(),
            held_bytes=held_bytes,
            notes=self._notes(waits),
        )

    def _why_nothing_waits(self) -> str:
        mode = self._settings.mode
        if mode is AccumMode.NONE:
            return "fsdp_accum_mode='none' lets every micro-step synchronise"
        if all(group.shard_size * group.replicate_size == 1 for group in self._all_groups):
            return f"fsdp_accum_mode={mode.value!r} saves nothing on one rank: there is nothing to synchronise"
        return (
            f"fsdp_accum_mode={mode.value!r} saves nothing on a mesh without replicas: set "
            "fsdp_accum_mode='grad_sync', or data_parallel_replicate_degree above 1"
        )

    def _notes(self, waits: list[tuple[ParamGroup, AccumMode | None]]) -> tuple[str, ...]:
        narrow = {str(group.reduce_dtype) for group, waiting in waits if waiting and group.reduce_dtype in NARROW}
        if not narrow:
            return ()
        return (
            f"gradients are summed over the micro-steps in {' and '.join(sorted(narrow))}, which loses accuracy with "
            "their number: set MixedPrecisionPolicy(reduce_dtype=torch.float32).",
        )


def _any_rank(mesh: dist.DeviceMesh, device: torch.device, bits: list[bool]) -> tuple[list[int], list[int]]:
    """Returns for each bit whether it is set on any rank of the mesh, and whether it is not set on any."""
    flags = torch.tensor([bits, [not bit for bit in bits]], dtype=torch.uint8, device=device)  # (2, bits)
    for group in _groups_across(mesh):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    anywhere, not_everywhere = flags.tolist()
    return anywhere, not_everywhere


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


def _collectives(group: ParamGroup) -> tuple[str, ...]:
    """The reductions of a group, in the order in which they run."""
    dims = _dims(group)
    scatter = (f"reduce_scatter over {dims[-1]}",) if group.shard_size > 1 else ()
    return scatter + ((f"all_reduce over {dims[0]}",) if group.replicate_size > 1 else ())
