# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""What a window of gradient accumulation takes and holds in each mode, predicted from single micro-steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

FSDP_MODES = ("none", "all_reduce", "grad_sync")


@dataclass(frozen=True)
class Way:
    """One way to accumulate.

    Attributes:
        mode: `trainer.fsdp_accum_mode`.
        reshard: `trainer.fsdp_accum_reshard`.
    """

    mode: str
    reshard: bool = True

    def __str__(self) -> str:
        return self.mode if self.reshard else f"{self.mode}, kept gathered"


NOTHING_WAITS = Way("none")
DDP_WAYS = (NOTHING_WAITS, Way("all_reduce"))  # its one collective waits in every other mode as well
FSDP_WAYS = tuple(Way(mode, reshard) for mode, reshard in product(FSDP_MODES, (True, False)))


@dataclass(frozen=True)
class Cost:
    """What the micro-steps of a window of two or more take, and what a rank holds inside it.

    Attributes:
        first_s: Seconds of the first micro-step.
        inner_s: Seconds of each one between the first and the boundary.
        boundary_s: Seconds of the boundary, optimizer step included.
        held_bytes: Bytes of gradient held and of parameters kept gathered, on each rank, beyond `NOTHING_WAITS`.
    """

    first_s: float
    inner_s: float
    boundary_s: float
    held_bytes: int


@dataclass(frozen=True)
class Figures:
    """What is known of one model on one mesh.

    Attributes:
        alone_s: Seconds of a window of one micro-step, in which nothing waits and nothing is kept, whichever the way.
        costs: Of each way that makes a difference there; `NOTHING_WAITS` is one.
        samples_per_micro_step: Over all ranks.
        too_large: Ways that were not run because of what a rank would hold, with its bytes.
    """

    alone_s: float
    costs: dict[Way, Cost]
    samples_per_micro_step: int
    too_large: dict[Way, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """A window of one way.

    Attributes:
        way: The way to accumulate.
        accum: Number of micro-steps, `trainer.grad_accum_iter`.
        window_s: Seconds of the window.
        samples_per_s: Samples per second, over all ranks.
        speedup: How many times faster than a window of as many micro-steps in which nothing waits.
        held_bytes: Bytes that each rank holds inside the window, beyond that one.
    """

    way: Way
    accum: int
    window_s: float
    samples_per_s: float
    speedup: float
    held_bytes: int


def predict(figures: Figures, way: Way, accum: int) -> Prediction:
    """Adds a window up from its micro-steps.

    Args:
        figures: What is known of the model and the mesh.
        way: One of `figures.costs`.
        accum: Number of micro-steps.

    Raises:
        ValueError: `accum` is below 1.
    """
    if accum < 1:
        raise ValueError(f"grad_accum_iter={accum} must be a whole number of at least 1.")
    window_s = _window_s(figures, way, accum)
    return Prediction(
        way=way,
        accum=accum,
        window_s=window_s,
        samples_per_s=accum * figures.samples_per_micro_step / window_s,
        speedup=_window_s(figures, NOTHING_WAITS, accum) / window_s,
        held_bytes=figures.costs[way].held_bytes if accum > 1 else 0,
    )


def _window_s(figures: Figures, way: Way, accum: int) -> float:
    cost = figures.costs[way]
    return figures.alone_s if accum == 1 else cost.first_s + (accum - 2) * cost.inner_s + cost.boundary_s


TIE = 0.01


def choose(predictions: Sequence[Prediction], memory_bytes: float) -> Prediction:
    """Returns the fastest window that fits; among those at most 1 % slower, the one that holds the least.

    Args:
        predictions: Of the same accumulation; `NOTHING_WAITS`, which always fits, is among them.
        memory_bytes: What a rank can spare, 0 or more.
    """
    fitting = [each for each in predictions if each.held_bytes <= memory_bytes]
    limit_s = min(each.window_s for each in fitting) * (1 + TIE)
    return min(
        (each for each in fitting if each.window_s <= limit_s), key=lambda each: (each.held_bytes, each.window_s)
    )


@dataclass(frozen=True)
class Job:
    """A model, a mesh and a link that nobody has measured yet, in the figures of a data sheet.

    Attributes:
        compute_s: Seconds of forward and backward of one micro-step, without any collective.
        all_gather_s: Seconds that compute waits for one all-gather of all parameters over dp_shard. Resharding gathers
            twice in a micro-step.
        reduce_scatter_s: Seconds that it waits for the reduce-scatter of all gradients over dp_shard.
        all_reduce_s: Seconds that it waits for the all-reduce over dp_replicate.
        parameters: Number of parameters of the whole model.
        shard_degree: Ranks that hold one copy together.
        replicate_degree: Number of copies.
        param_bytes: Bytes of a gathered parameter.
        reduce_bytes: Bytes of a gradient when it is reduced.
        samples_per_micro_step: Over all ranks.
    """

    compute_s: float
    all_gather_s: float = 0.0
    reduce_scatter_s: float = 0.0
    all_reduce_s: float = 0.0
    parameters: int = 0
    shard_degree: int = 1
    replicate_degree: int = 1
    param_bytes: int = 2
    reduce_bytes: int = 4
    samples_per_micro_step: int = 1

    def figures(self) -> Figures:
        """Returns what each way costs if collectives and compute simply add up."""
        alone_s = self.compute_s + 2 * self.all_gather_s + self.reduce_scatter_s + self.all_reduce_s
        return Figures(alone_s, {way: self._cost(way) for way in FSDP_WAYS}, self.samples_per_micro_step)

    def _cost(self, way: Way) -> Cost:
        first_gathers_s = self.all_gather_s * (2 if way.reshard else 1)
        later_gathers_s = self.all_gather_s * (2 if way.reshard else 0)
        sync_s = self.reduce_scatter_s + self.all_reduce_s
        early_sync_s = {"none": sync_s, "all_reduce": self.reduce_scatter_s, "grad_sync": 0.0}[way.mode]
        return Cost(
            first_s=self.compute_s + first_gathers_s + early_sync_s,
            inner_s=self.compute_s + later_gathers_s + early_sync_s,
            boundary_s=self.compute_s + later_gathers_s + sync_s,
            held_bytes=self._held_bytes(way),
        )

    def _held_bytes(self, way: Way) -> int:
        shard = -(-self.parameters // self.shard_degree)
        gradients = {
            "none": 0,
            "all_reduce": shard if self.replicate_degree > 1 else 0,
            "grad_sync": self.parameters if self.shard_degree * self.replicate_degree > 1 else 0,
        }[way.mode]
        gathered = 0 if way.reshard or self.shard_degree == 1 else self.parameters
        return gradients * self.reduce_bytes + gathered * self.param_bytes
