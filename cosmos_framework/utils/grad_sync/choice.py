# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""What each FSDP2 group of a model puts off: the same for all in most modes, what the memory allows in mode "auto"."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .accum_mode import AccumMode
from .backend import Settings
from .fsdp2_state import ParamGroup


@dataclass(frozen=True)
class Choice:
    """What one group puts off.

    Attributes:
        waits: which of its reductions wait for the boundary, as a mode would have it; None if nothing does.
        keeps_gathered: whether its parameters stay gathered inside a window.
    """

    waits: AccumMode | None = None
    keeps_gathered: bool = False

    def and_also(self, other: Choice) -> Choice:
        """Returns the choice that puts off what either does, `other` deciding what waits."""
        return Choice(other.waits or self.waits, other.keeps_gathered or self.keeps_gathered)


def choose(groups: list[ParamGroup], settings: Settings) -> dict[ParamGroup, Choice]:
    """Returns what each group puts off; equal on all ranks that share the groups.

    Mode "auto" starts from all_reduce with resharding. The budget then goes to what saves the most time per byte held,
    a group's reduce-scatter or its gathers, for as long as it lasts.
    """
    if settings.mode is not AccumMode.AUTO:
        return {group: Choice(_waiting(group, settings.mode), not settings.reshard) for group in groups}
    choices = {group: Choice(_waiting(group, AccumMode.ALL_REDUCE)) for group in groups}
    left = settings.memory_bytes
    for offer in sorted((offer for group in groups for offer in _offers(group)), key=_Offer.rank):
        if offer.held_bytes <= left:
            left -= offer.held_bytes
            choices[offer.group] = choices[offer.group].and_also(offer.choice)
    return choices


def _waiting(group: ParamGroup, mode: AccumMode) -> AccumMode | None:
    if mode is AccumMode.GRAD_SYNC and group.shard_size * group.replicate_size > 1:
        return AccumMode.GRAD_SYNC
    if mode is AccumMode.ALL_REDUCE and group.replicate_size > 1:
        return AccumMode.ALL_REDUCE
    return None


@dataclass(frozen=True)
class _Offer:
    """Something to hold in memory for the sake of fewer collectives in each micro-step but one."""

    group: ParamGroup
    choice: Choice
    held_bytes: int
    saved_s: float

    def rank(self) -> tuple[bool, float]:
        """For sorting, the best first: what uses the links between hosts, then what saves the most per byte held."""
        return _is_in_host(self.group.shard_ranks), -self.saved_s / self.held_bytes


def _offers(group: ParamGroup) -> list[_Offer]:
    """What there is to gain from a group; nothing where it is not sharded."""
    if group.shard_size == 1:
        return []
    param_bytes = group.gathered_bytes
    saved_s = sum(_collective_s(param_bytes, ranks) for ranks in group.gathers)
    offers = [_Offer(group, Choice(keeps_gathered=True), param_bytes, saved_s)]
    if grad_bytes := whole_grad_bytes(group):
        instead_of = sharded_grad_bytes(group) if group.replicate_size > 1 else 0
        saved_s = _collective_s(grad_bytes, group.shard_ranks)
        offers.append(_Offer(group, Choice(waits=AccumMode.GRAD_SYNC), grad_bytes - instead_of, saved_s))
    return offers


def whole_grad_bytes(group: ParamGroup) -> int:
    """Bytes of a group's gradients, unsharded, in the dtype of the reduction."""
    return sum(map(group.numel, group.trainable())) * group.reduce_itemsize


def sharded_grad_bytes(group: ParamGroup) -> int:
    """Bytes of a rank's share of a group's gradients, in the dtype of the reduction."""
    return sum(map(group.sharded_numel, group.trainable())) * group.reduce_itemsize


# Typical of 10 Gbit/s Ethernet. They only weigh small groups, whose collectives are mostly latency, against large ones.
LATENCY_S, BYTES_PER_S = 50e-6, 1.25e9


def _collective_s(nbytes: int, ranks: list[int]) -> float:
    """Returns the seconds of a ring all-gather or reduce-scatter of `nbytes` in all."""
    return (len(ranks) - 1) * (LATENCY_S + nbytes / len(ranks) / BYTES_PER_S)


def _is_in_host(ranks: list[int]) -> bool:
    """Whether the ranks share a host; torchrun numbers them host by host."""
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return len({rank // ranks_per_host for rank in ranks}) == 1
