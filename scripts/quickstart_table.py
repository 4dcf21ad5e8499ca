# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Prints what the quickstart found: success in closed loop, and what waiting for the boundary saved."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

MIB = 2**20


def main() -> None:
    """Prints the tables of the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path, required=True, help="the run that was evaluated")
    parser.add_argument("--deferred", type=Path, required=True, help="a short run in which collectives wait")
    parser.add_argument("--none", type=Path, required=True, help="the same run in mode none")
    args = parser.parse_args()
    print("\n".join([*success_lines(args.policy), "", *savings_lines(args.deferred, args.none)]))


def success_lines(run: Path) -> list[str]:
    """Returns a line a task, and the mean, from the run's evaluation."""
    evaluation = json.loads((run / "evaluation.json").read_text())
    rows = [*evaluation["success"].items(), ("mean", evaluation["mean"])]
    title = f"success in closed loop, {evaluation['episodes']} trials a task"
    return [title, *(f"  {task:<40} {rate:>10.0%}" for task, rate in rows)]


def savings_lines(deferred: Path, none: Path) -> list[str]:
    """Returns both runs' speed and traffic side by side."""
    runs = [(run_figures(run), run_ledger(run)) for run in (deferred, none)]
    lines = ["per optimizer step" + " " * 24 + "".join(f"{ledger['fsdp_accum_mode']:>20}" for _, ledger in runs)]
    for label, key in (("s/iter", "seconds_per_iteration"), ("samples/s", "samples_per_second")):
        lines.append(f"  {label:<40}" + "".join(f"{figures[key]:>20.3g}" for figures, _ in runs))
    traffic = [collectives(ledger) for _, ledger in runs]
    for name in sorted({name for counts in traffic for name in counts}):
        cells = [counts.get(name, (0, 0)) for counts in traffic]
        lines.append(f"  {name:<40}" + "".join(f"{f'{calls} ({size / MIB:.2f} MiB)':>20}" for calls, size in cells))
    return lines


def run_figures(run: Path) -> dict[str, float]:
    """Returns medians over a run's logged lines, the first one left out since it warms up."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = [row for row in rows if "seconds_per_iteration" in row]
    timed = timed[1:] or timed
    return {key: median(row[key] for row in timed) for key in ("seconds_per_iteration", "samples_per_second")}


def run_ledger(run: Path) -> dict[str, Any]:
    """Returns a run's ledger of collectives."""
    return json.loads((run / "comm_ledger.json").read_text())


def collectives(ledger: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns {collective: (calls, bytes)} of the last optimizer step that was counted, on rank 0."""
    return {
        f"{entry['collective']} over {entry['mesh_dimension']}": (entry["calls"], entry["bytes"])
        for entry in ledger["optimizer_steps"][-1]["collectives"]
    }


if __name__ == "__main__":
    main()
