# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""What is compared: parallelisms, modes, resharding, accumulations; and the settings of a run."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from two_hosts.network import Link

# One domain, so that every micro-step uses every parameter: what static_graph asks for.
_DDP = ("parallelism=ddp", "trainer.ddp.find_unused_parameters=false")
PARALLELISMS: dict[str, tuple[str, ...]] = {
    "ddp": (*_DDP, "trainer.ddp.static_graph=false"),
    "ddp_static_graph": (*_DDP, "trainer.ddp.static_graph=true"),
    "fsdp": ("parallelism=fsdp",),
    "hsdp": ("parallelism=hsdp",),
}

# Two ranks on one core compute such a micro-step in about 0.3 s, most of it in the model and little in gathering shards
# within the host; the calibrated link has about 100 Mbit/s then, which costs their core little.
RECIPE = (
    "recipe=action_policy",
    "model.depth=6",
    "model.heads=4",
    "model.head_width=32",
    "dataloader_train.batch_size=48",
    # On CPU torch's other implementations spend more time in DTensor's dispatch than the rest of a step takes.
    "optimizer.fused=true",
    "scheduler=constant",
    "trainer.timeout_period=300",
    "trainer.run_validation=false",
    # Clipping stays: it is part of a step. Logging is not.
    "trainer.callbacks.comm_ledger=null",
    "trainer.callbacks.progress_bar=null",
    "trainer.callbacks.jsonl_metrics=null",
)

# Budgets of mode "auto", as shares of all that it could hold, and the micro-steps of its windows.
AUTO_SHARES = (0.0, 0.25, 0.5, 0.75, math.inf)
AUTO_ACCUM = 4


@dataclass(frozen=True)
class Case:
    """One way to run a window.

    Attributes:
        parallelism: One of `PARALLELISMS`.
        mode: `trainer.fsdp_accum_mode`.
        reshard: `trainer.fsdp_accum_reshard`.
        accum: `trainer.grad_accum_iter`.
        memory_gib: `trainer.fsdp_accum_memory_gib`, for mode "auto".
    """

    parallelism: str
    mode: str
    reshard: bool
    accum: int
    memory_gib: float | None = None

    @property
    def baseline(self) -> Case:
        """The case that this one's time is compared with: nothing waits, nothing is kept."""
        return Case(self.parallelism, "none", True, self.accum)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON, which has no infinity."""
        return {**asdict(self), "memory_gib": "inf" if self.memory_gib == math.inf else self.memory_gib}

    @staticmethod
    def from_dict(entry: Mapping[str, Any]) -> Case:
        """Reads what `to_dict` wrote; other entries are ignored."""
        memory_gib = None if entry["memory_gib"] is None else float(entry["memory_gib"])
        return Case(entry["parallelism"], entry["mode"], entry["reshard"], entry["accum"], memory_gib)


@dataclass(frozen=True)
class Settings:
    """What a run measures.

    Attributes:
        link: What joins the hosts; where the calibration starts.
        calibrate: Whether to look for the link's rate first.
        rounds: Number of timed windows of each case.
        parallelisms: Some of `PARALLELISMS`.
        accumulations: Micro-steps of a window.
        overrides: Of the configuration, in Hydra's grammar, after those of `RECIPE`.
    """

    link: Link
    calibrate: bool
    rounds: int
    parallelisms: tuple[str, ...]
    accumulations: tuple[int, ...]
    overrides: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Writes the settings down for the ranks."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Settings:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        return Settings(
            link=Link(**fields["link"]),
            calibrate=fields["calibrate"],
            rounds=fields["rounds"],
            parallelisms=tuple(fields["parallelisms"]),
            accumulations=tuple(fields["accumulations"]),
            overrides=tuple(fields["overrides"]),
        )


def cases_of(settings: Settings, parameter_bytes: int) -> list[Case]:
    """Returns every combination that differs, and the curve of mode "auto" where FSDP runs windows of that length.

    Args:
        settings: Which parallelisms and accumulations.
        parameter_bytes: Of the whole model.
    """
    cases = [case for parallelism in settings.parallelisms for case in _grid(parallelism, settings.accumulations)]
    if "fsdp" in settings.parallelisms and AUTO_ACCUM in settings.accumulations:
        # All that can be held: the whole gradient, and every parameter.
        whole_gib = 2 * parameter_bytes / 2**30
        cases += [Case("fsdp", "auto", True, AUTO_ACCUM, share * whole_gib) for share in AUTO_SHARES]
    return cases


def _grid(parallelism: str, accumulations: Sequence[int]) -> list[Case]:
    """DDP has one collective to put off, and nothing to gather."""
    of_ddp = [("none", True), ("all_reduce", True)]
    of_fsdp = list(itertools.product(("none", "all_reduce", "grad_sync"), (True, False)))
    kinds = of_ddp if parallelism.startswith("ddp") else of_fsdp
    return [Case(parallelism, mode, reshard, accum) for accum in accumulations for mode, reshard in kinds]
