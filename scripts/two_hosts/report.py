# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""What a run leaves: results.json, results.csv, three plots, and a README.md with the tables."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from two_hosts import plots
from two_hosts.summary import Ideal, Row, ideals_of, rows

WINDOW_OF_INTEREST = 4

_INTRODUCTION = """# What each mode costs and saves between two hosts

`scripts/bench_two_hosts.py` wrote this page, the plots, `results.csv` and `results.json` (every single window):

```bash
sudo "$(which python)" scripts/bench_two_hosts.py --calibrate
```

It needs root, iproute2, and a machine on which nothing else runs. Two network namespaces stand for two hosts. A veth
pair joins them, shaped by `tc tbf` at both ends. Two ranks in each, which share one core, train `recipe=action_policy`
with the trainer of this package, on noise in the shapes of Meta-World's demonstrations. All cases are interleaved, in
another order each round. `--calibrate` sets the link's rate so that the all-reduce of a micro-step of HSDP takes 11.4
seconds where its compute takes 10.8, in proportion: what a user measured on two hosts of eight GPUs on Ethernet.
"""

_READING = """How to read it:

- *s/window*: from a barrier until the slowest rank has stepped its optimizer; median of all rounds, and extremes.
- *against none*: how many times faster than mode `none` with resharding, at the same N.
- *N x compute + sync*: what a window would take that syncs once, and how far the measured time is above that. *Compute*
  is a micro-step that sends nothing between the hosts, inside a window of HSDP's `all_reduce`, of FSDP's `grad_sync`
  with parameters kept gathered, of DDP's deferral; on the slowest rank, for which the others wait at the boundary.
  *Sync* is what a window of one micro-step takes beyond that.
- *predicted*: what `cosmos-accum-plan` says, from windows of one and of three micro-steps that are measured between the
  others, and how far it is above what was measured.
- *link*: what both hosts sent in one window, as their interfaces count it: headers, acknowledgements, clipping's norm
  and the barrier that ends the window are in it.
- *gradient held*, *parameters kept*: on one rank, just before the boundary. Mode `none` holds its reduced gradient as
  well, in `grad`, which is not counted here; DDP's held gradient is that `grad`.
- *peak*: largest resident memory of a rank in a window above that before it, activations included. It is measured in
  windows of their own, once a case, since looking takes time.

A link of `tbf` has a rate and no distance: latency is that of the kernel unless `--latency-ms` is given. The two ranks
of a host share a core with their own network stack, so part of a sync is computing here, which it is not on a GPU.
"""


def describe_machine() -> dict[str, Any]:
    """Describes what the figures depend on, apart from the settings."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def write(measured: dict[str, Any], out: Path) -> None:
    """Writes all files, over those of an earlier run.

    Args:
        measured: What `worker` wrote, with the machine's description as "machine".
        out: Folder; made if it does not exist.
    """
    out.mkdir(parents=True, exist_ok=True)
    table, ideals = rows(measured), ideals_of(measured)
    (out / "results.json").write_text(json.dumps(measured, indent=1) + "\n")
    _write_csv(table, out / "results.csv")
    plots.plot_window_time(table, ideals, out / "window_time.svg")
    accum = _accum_of_interest(table)
    plots.plot_time_against_memory(table, accum, out / "time_memory.svg")
    has_budgets = any(row.case.mode == "auto" for row in table)
    if has_budgets:
        plots.plot_budgets(table, out / "budgets.svg")
    (out / "README.md").write_text("\n".join(_readme(measured, table, ideals, accum, has_budgets)) + "\n")


def _accum_of_interest(table: Sequence[Row]) -> int:
    accums = {row.case.accum for row in table}
    return WINDOW_OF_INTEREST if WINDOW_OF_INTEREST in accums else max(accums)


def _write_csv(table: Iterable[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        lines = [{**row.case.to_dict(), **{k: v for k, v in asdict(row).items() if k != "case"}} for row in table]
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def _readme(
    measured: dict[str, Any], table: Sequence[Row], ideals: dict[str, Ideal], accum: int, has_budgets: bool
) -> list[str]:
    lines = [_INTRODUCTION, _circumstances(measured)]
    lines += [f"## Windows of {accum} micro-steps", "", *markdown([row for row in table if row.case.accum == accum])]
    lines += ["", "![seconds per window against accumulation](window_time.svg)", "", *_ideal_lines(ideals)]
    lines += ["", "![seconds per window against memory](time_memory.svg)", ""]
    if has_budgets:
        lines += ["![seconds per window against what the budget lets mode auto hold](budgets.svg)", ""]
    lines += [_READING, "## All cases", "", *markdown(table)]
    return lines


def _circumstances(measured: dict[str, Any]) -> str:
    machine, link = measured["machine"], measured["link"]
    rounds = len(measured["cases"][0]["windows"])
    return (
        f"Measured on {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, Linux "
        f"{machine['kernel']}, Python {machine['python']}, torch {machine['torch']}; link of {link['rate_mbit']:.0f} "
        f"Mbit/s and {link['latency_ms']:g} ms; {measured['parameters'] / 1e6:.2f} M parameters, "
        f"{measured['samples_per_micro_step'] // 4} samples a rank and micro-step, {rounds} rounds.\n"
    )


def _ideal_lines(ideals: dict[str, Ideal]) -> list[str]:
    lines = ["| parallelism | compute of a micro-step, s | sync of a micro-step, s |", "| --- | --- | --- |"]
    for parallelism, ideal in ideals.items():
        lines.append(f"| {plots.TITLES[parallelism]} | {ideal.compute_s:.3f} | {ideal.sync_s:.3f} |")
    return lines


def markdown(table: Iterable[Row]) -> list[str]:
    """Returns a Markdown table of cases."""
    header = (
        "parallelism, mode, N, s/window (min–max), samples/s, against none, N x compute + sync, predicted, "
        "link MiB/step, gradient held MiB, parameters kept MiB, peak MiB"
    )
    names = header.split(", ")
    return [_line(names), _line(["---"] * len(names)), *(_line(_cells(row)) for row in table)]


def _cells(row: Row) -> list[str]:
    return [
        plots.TITLES[row.case.parallelism],
        _mode(row),
        str(row.case.accum),
        f"{row.seconds:.2f} ({row.fastest_s:.2f}–{row.slowest_s:.2f})",
        f"{row.samples_per_s:.0f}",
        f"x{row.speedup:.2f}",
        _seconds_and_difference(row.ideal_s, row.over_ideal),
        _seconds_and_difference(row.predicted_s, row.prediction_error),
        f"{row.link_mib:.1f}",
        f"{row.held_mib:.1f}",
        f"{row.gathered_mib:.1f}",
        f"{row.peak_mib:.0f}",
    ]


def _mode(row: Row) -> str:
    if row.case.memory_gib is not None:
        is_limited = row.case.memory_gib < math.inf
        return f"auto, {f'{row.case.memory_gib * 1024:.1f} MiB' if is_limited else 'all that saves'}"
    return row.case.mode if row.case.reshard else f"{row.case.mode}, kept gathered"


def _seconds_and_difference(seconds: float | None, difference: float | None) -> str:
    return "" if seconds is None or difference is None else f"{seconds:.2f} ({difference:+.0%})"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
