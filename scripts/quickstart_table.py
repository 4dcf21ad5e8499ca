# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Prints what a trained policy can do, and what its training cost per optimizer step against another run's."""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

# Processes warm up in the first windows, and the ledger counts during two of them.
WARM_UP_ITERATIONS = 5


@dataclass(frozen=True)
class StepCost:
    """What one optimizer step of a run costs.

    Attributes:
        mode: `trainer.fsdp_accum_mode` of the run.
        seconds: Median over its logged lines.
        samples_per_second: Likewise, over all ranks.
        traffic: Number of collectives and their bytes on rank 0, by what they are.
    """

    mode: str
    seconds: float
    samples_per_second: float
    traffic: dict[str, tuple[int, int]]


def main() -> None:
    """Prints the tables for the folders on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run whose policy was evaluated")
    parser.add_argument("--against", type=Path, required=True, help="folder of the run to compare with")
    args = parser.parse_args()
    print("\n".join(success_lines(args.run)), end="\n\n")
    print("\n".join(cost_lines(read_step_cost(args.run), read_step_cost(args.against))))


def success_lines(run: Path) -> list[str]:
    """Returns the table of success rates, from the run's evaluation.json."""
    evaluation = json.loads((run / "evaluation.json").read_text())
    rates = [*evaluation["success"].items(), ("mean", evaluation["mean"])]
    title = f"success in closed loop, {evaluation['episodes']} episodes a task"
    return [title, *(f"  {task:<32}{rate:>20.0%}" for task, rate in rates)]


def read_step_cost(run: Path) -> StepCost:
    """Reads the run's metrics.jsonl and comm_ledger.json.

    Raises:
        ValueError: The run logged nothing after warming up.
    """
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "seconds_per_iteration" in line and line["iteration"] > WARM_UP_ITERATIONS]
    if not steps:
        raise ValueError(f"{run}/metrics.jsonl has no line after iteration {WARM_UP_ITERATIONS}; train for longer")
    ledger = json.loads((run / "comm_ledger.json").read_text())
    return StepCost(
        mode=ledger["fsdp_accum_mode"],
        seconds=statistics.median(line["seconds_per_iteration"] for line in steps),
        samples_per_second=statistics.median(line["samples_per_second"] for line in steps),
        traffic={
            f"{entry['collective']} over {entry['mesh_dimension']}": (entry["calls"], entry["bytes"])
            for entry in ledger["optimizer_steps"][-1]["collectives"]
        },
    )


def cost_lines(run: StepCost, against: StepCost) -> list[str]:
    """Returns the table of two runs' costs per optimizer step."""
    rows = [
        ("", run.mode, against.mode),
        ("seconds", f"{run.seconds:.3f}", f"{against.seconds:.3f}"),
        ("samples/s", f"{run.samples_per_second:.0f}", f"{against.samples_per_second:.0f}"),
    ]
    for collective in sorted(run.traffic.keys() | against.traffic.keys()):
        ours, theirs = (_in_words(*cost.traffic.get(collective, (0, 0))) for cost in (run, against))
        rows.append((collective, ours, theirs))
    rows.append(("all collectives", _in_words(*_total(run)), _in_words(*_total(against))))
    title = "one optimizer step: collectives and their bytes are those of one rank"
    return [title, *(f"  {what:<32}{ours:>20}{theirs:>20}" for what, ours, theirs in rows)]


def _total(cost: StepCost) -> tuple[int, int]:
    calls_and_bytes = cost.traffic.values()
    return sum(calls for calls, _ in calls_and_bytes), sum(size for _, size in calls_and_bytes)


def _in_words(calls: int, size: int) -> str:
    return f"{calls} ({size:,} B)"


if __name__ == "__main__":
    main()
