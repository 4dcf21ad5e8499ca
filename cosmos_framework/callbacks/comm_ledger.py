# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""What training sends over the network for one optimizer step, how long that takes, and what accumulation saves."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from cosmos_framework.model._base import ImaginaireModel
from cosmos_framework.utils import distributed
from cosmos_framework.utils.callback import Callback
from cosmos_framework.utils.collectives import (
    CollectiveCounter,
    Totals,
    Traffic,
    in_flight_s,
    mesh_dimensions,
    totals_of,
)

logger = logging.getLogger(__name__)


class CommLedger(Callback):
    """Counts and times the collectives of a run's first windows, by kind and mesh dimension, as rank 0 sees them.

    A window is timed from its first fetch until the optimizer has stepped. Its collectives are those from there to the
    hooks before the optimizer step, so that those of clipping stay out if this callback comes before it.

    `comm_ledger.json` in the job's folder has in `optimizer_steps` one entry a window. Read the last one: the first
    windows may have traffic of their own, since DDP's static graph always synchronises the very first backward, and
    DDP arranges its buckets anew after its first reduction. In an entry are:

    - `seconds`: what the window took; `in_flight_seconds` and `in_flight_share`: for how much of that at least one
      collective was in flight. Waiting for slower ranks is part of it, and computation meanwhile is not subtracted: a
      faster link cannot save more than this.
    - `collectives`: `calls`, `bytes` (see `Collective`) and `seconds` in flight of each kind and mesh dimension.
    - `saved_against_none`: what `fsdp_accum_mode=none` would have sent beyond that, negative where it sends less. In it
      each micro-step would run what the fullest one ran, and each collective would take as long as its like here.
      Calls are exact if all micro-steps use the same modules, bytes if these use all their parameters: FSDP2 leaves
      unused ones out, a boundary does not. Gathers that parameters spare in the backward by staying gathered do not
      run in any micro-step; the plan of the model's `GradSync` tells them.
    """

    def __init__(self, windows: int = 3) -> None:
        """Takes note of how long to count.

        Args:
            windows: Number of windows to count, from where the run starts or resumes.
        """
        self._windows = windows
        self._left = 0
        self._window: _Window | None = None
        self._steps: list[dict[str, Any]] = []

    @distributed.rank0_only
    def on_train_start(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Looks at the model's mesh."""
        self._left = self._windows
        self._dimensions = mesh_dimensions(model)

    def on_before_dataloading(self, iteration: int = 0) -> None:
        """Starts with the first fetch of a window."""
        if self._window is None and self._left:
            self._window = _Window(CollectiveCounter(self._dimensions))

    def on_after_backward(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Remembers what the micro-step sent."""
        if self._window is not None:
            self._window.end_backward()

    def on_before_optimizer_step(
        self,
        model: ImaginaireModel,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        grad_scaler: torch.amp.GradScaler,
        iteration: int = 0,
    ) -> None:
        """Ends the count at the boundary."""
        if self._window is not None:
            self._window.end_count()

    def on_before_zero_grad(
        self,
        model: ImaginaireModel,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        iteration: int = 0,
    ) -> None:
        """Ends the window, and writes the ledger after the last one."""
        if self._window is None:
            return
        self._steps.append({"iteration": iteration + 1, **self._window.entry(_regathers(model))})
        self._window = None
        self._left -= 1
        if not self._left:
            self._write(model)

    def on_train_end(self, model: ImaginaireModel, iteration: int = 0) -> None:
        """Writes the ledger of a run that had fewer windows."""
        if self._steps and self._left:
            self._write(model)

    def _write(self, model: ImaginaireModel) -> None:
        trainer = self.config.trainer
        ledger = {
            "distributed_parallelism": trainer.distributed_parallelism,
            "fsdp_accum_mode": trainer.fsdp_accum_mode,
            "fsdp_accum_reshard": trainer.fsdp_accum_reshard,
            "grad_accum_iter": trainer.grad_accum_iter,
            "ranks": distributed.get_world_size(),
            "optimizer_steps": self._steps,
        }
        (Path(self.config.job.path_local) / "comm_ledger.json").write_text(json.dumps(ledger, indent=2) + "\n")
        step = self._steps[-1]
        logger.info("collectives of an optimizer step on rank 0: %s", _sent_in_words(step))
        logger.info(
            "collectives took %.0f %% of optimizer step %d (%.2g of %.2g s); against fsdp_accum_mode=none it saved %s",
            100 * step["in_flight_share"],
            step["iteration"],
            step["in_flight_seconds"],
            step["seconds"],
            _saved_in_words(step) or f"nothing: {self._why_nothing_is_saved(model)}",
        )

    def _why_nothing_is_saved(self, model: ImaginaireModel) -> str:
        if self.config.trainer.grad_accum_iter == 1:
            return "with trainer.grad_accum_iter=1 nothing can wait, only above 1"
        sync = distributed.grad_sync_of(model)
        reasons = [plan.no_effect for plan in sync.plan() if plan.no_effect] if sync is not None else []
        return "; ".join(dict.fromkeys(reasons)) or "no micro-step sent less than another"


class _Window:
    """The collectives of one window, and where its backwards end."""

    def __init__(self, counter: CollectiveCounter) -> None:
        self._counter = counter.__enter__()
        self._ends: list[int] = []

    def end_backward(self) -> None:
        self._ends.append(self._counter.count)

    def end_count(self) -> None:
        self._counter.__exit__()

    def entry(self, regathers: Totals) -> dict[str, Any]:
        """Returns what the ledger says about the window, which ends now; see `saved_against_none`."""
        collectives = self._counter.collectives()
        seconds, in_flight = self._counter.elapsed_s(), in_flight_s(collectives)
        micro_steps = [totals_of(collectives[start:end]) for start, end in pairwise([0, *self._ends])]
        sent = totals_of(collectives)
        seconds_of = {key: in_flight_s(each for each in collectives if each.key == key) for key in sent}
        saved = saved_against_none(micro_steps, sent, regathers)
        return {
            "seconds": seconds,
            "in_flight_seconds": in_flight,
            "in_flight_share": in_flight / seconds,
            "collectives": [_entry(key, sent[key], seconds_of[key]) for key in sorted(sent)],
            "saved_against_none": [
                _entry(key, saved[key], seconds_of[key] * saved[key].calls / sent[key].calls) for key in sorted(saved)
            ],
        }


def _regathers(model: ImaginaireModel) -> Totals:
    """Returns the all-gathers that each backward spares since parameters stay gathered."""
    sync = distributed.grad_sync_of(model)
    totals: Totals = defaultdict(Traffic)
    for plan in sync.plan() if sync is not None else []:
        for dimension, (calls, size) in plan.regathers.items():
            totals["all_gather", dimension].calls += calls
            totals["all_gather", dimension].bytes += size
    return totals


def saved_against_none(micro_steps: list[Totals], sent: Totals, regathers: Totals) -> Totals:
    """Returns what a window that defers nothing would send beyond what this one sent.

    Nothing is assumed about which reductions wait: without deferral each micro-step runs what the fullest one runs.

    Args:
        micro_steps: what each micro-step sent until its backward ended.
        sent: what the window sent, after the last backward as well.
        regathers: what each backward spares since parameters stay gathered; no micro-step shows it.

    Returns:
        The difference where there is one, negative for what such a window would not send.
    """
    saved = {}
    for key, traffic in sent.items():
        each = [totals.get(key, Traffic()) for totals in micro_steps]
        more = regathers.get(key, Traffic())
        calls, size = (max(step.calls for step in each) + more.calls, max(step.bytes for step in each) + more.bytes)
        saved[key] = Traffic(len(each) * calls - traffic.calls, len(each) * size - traffic.bytes)
    return {key: traffic for key, traffic in saved.items() if traffic != Traffic()}


def _entry(key: tuple[str, str], traffic: Traffic, seconds: float) -> dict[str, Any]:
    kind, dimension = key
    return {
        "collective": kind,
        "mesh_dimension": dimension,
        "calls": traffic.calls,
        "bytes": traffic.bytes,
        "seconds": seconds,
    }


def _sent_in_words(step: dict[str, Any]) -> str:
    return ", ".join(f"{entry['calls']} {_what(entry)}" for entry in step["collectives"]) or "none"


def _saved_in_words(step: dict[str, Any]) -> str:
    """Returns nothing if nothing was saved."""
    sent = {_key(entry): entry["calls"] for entry in step["collectives"]}
    spared = [
        f"{entry['calls']} of {entry['calls'] + sent[_key(entry)]} {_what(entry)}"
        for entry in step["saved_against_none"]
        if entry["calls"] > 0
    ]
    seconds = sum(entry["seconds"] for entry in step["saved_against_none"])
    return f"{', '.join(spared)}: about {seconds:.2g} s a step" if spared else ""


def _key(entry: dict[str, Any]) -> tuple[str, str]:
    return entry["collective"], entry["mesh_dimension"]


def _what(entry: dict[str, Any]) -> str:
    return f"{entry['collective']} over {entry['mesh_dimension']} ({entry['bytes'] / 2**20:.3g} MiB)"
