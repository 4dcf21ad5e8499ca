# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""From what was measured to the numbers that are shown: medians, ratios, and the ideal of one sync a window."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from two_hosts.cases import Case

MIB = 2**20

# The modes whose inner micro-steps send nothing between the hosts.
_SILENT = {
    "ddp": ("all_reduce", True),
    "ddp_static_graph": ("all_reduce", True),
    "fsdp": ("grad_sync", False),
    "hsdp": ("all_reduce", True),
}


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        case: Which one.
        seconds: Median seconds of a window; `fastest_s` and `slowest_s` are the extremes of all rounds.
        samples_per_s: Samples per second over all ranks.
        speedup: How many times faster than its baseline.
        link_mib: Median MiB that both hosts sent over the link for one optimizer step.
        held_mib: MiB of gradient held back on a rank just before the boundary.
        gathered_mib: MiB of parameters gathered on a rank just before the boundary.
        peak_mib: Largest resident memory of a rank inside the window, in MiB above the one before it.
        ideal_s: `accum` x compute + 1 x sync; None if no case told them apart.
        predicted_s: What `cosmos_framework.utils.accum_cost` foretold.
    """

    case: Case
    seconds: float
    fastest_s: float
    slowest_s: float
    samples_per_s: float
    speedup: float
    link_mib: float
    held_mib: float
    gathered_mib: float
    peak_mib: float
    ideal_s: float | None
    predicted_s: float | None

    @property
    def over_ideal(self) -> float | None:
        """Time above the ideal, as a fraction of it."""
        return None if self.ideal_s is None else self.seconds / self.ideal_s - 1

    @property
    def prediction_error(self) -> float | None:
        """Predicted above measured time, as a fraction of the measured one."""
        return None if self.predicted_s is None else self.predicted_s / self.seconds - 1


@dataclass(frozen=True)
class Ideal:
    """The two parts of a micro-step under one parallelism.

    Attributes:
        compute_s: Seconds of a micro-step that sends nothing between the hosts, on the slowest rank of each window.
        sync_s: Seconds that all of its collectives between the hosts, and the optimizer, add.
    """

    compute_s: float
    sync_s: float

    def window_s(self, accum: int) -> float:
        """Returns the seconds of a window that syncs once."""
        return accum * self.compute_s + self.sync_s


def rows(measured: dict[str, Any]) -> list[Row]:
    """Returns a row for each case, in the order in which they were written down.

    Args:
        measured: What `worker` wrote.
    """
    seconds = {Case.from_dict(entry): _median(entry, "seconds") for entry in measured["cases"]}
    ideals = ideals_of(measured)
    return [_row(entry, seconds, ideals, measured["samples_per_micro_step"]) for entry in measured["cases"]]


def ideals_of(measured: dict[str, Any]) -> dict[str, Ideal]:
    """Returns compute and sync of a micro-step by parallelism, of those where a long enough window was measured.

    Args:
        measured: What `worker` wrote.
    """
    ideals = {}
    for parallelism, (mode, reshard) in _SILENT.items():
        entries = [entry for entry in measured["cases"] if entry["parallelism"] == parallelism]
        silent = [entry for entry in entries if (entry["mode"], entry["reshard"]) == (mode, reshard)]
        long = [entry for entry in silent if _accum(entry) > 2]
        if long:
            compute_s = _median(max(long, key=_accum), "inner_s")
            shortest = min(
                (entry for entry in entries if Case.from_dict(entry) == Case.from_dict(entry).baseline), key=_accum
            )
            ideals[parallelism] = Ideal(compute_s, _median(shortest, "seconds") / _accum(shortest) - compute_s)
    return ideals


def _row(entry: dict[str, Any], seconds: dict[Case, float], ideals: dict[str, Ideal], samples: int) -> Row:
    case, weight = Case.from_dict(entry), entry["weight"]
    window_s = [window["seconds"] for window in entry["windows"]]
    ideal = ideals.get(case.parallelism)
    return Row(
        case=case,
        seconds=seconds[case],
        fastest_s=min(window_s),
        slowest_s=max(window_s),
        samples_per_s=case.accum * samples / seconds[case],
        speedup=seconds[case.baseline] / seconds[case],
        link_mib=_median(entry, "link_bytes") / MIB,
        held_mib=weight["held_bytes"] / MIB,
        gathered_mib=weight["gathered_bytes"] / MIB,
        peak_mib=weight["peak_bytes"] / MIB,
        ideal_s=None if ideal is None else ideal.window_s(case.accum),
        predicted_s=entry.get("predicted_s"),
    )


def _accum(entry: dict[str, Any]) -> int:
    return entry["accum"]


def _median(entry: dict[str, Any], name: str) -> float:
    return statistics.median(window[name] for window in entry["windows"])
