# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart_table.py"


def write_run(folder: Path, mode: str, seconds: list[float], all_reduces: int) -> Path:
    """Writes what a run with one logged line an iteration leaves, and a validation after the last."""
    folder.mkdir()
    lines: list[dict[str, Any]] = [
        {"iteration": iteration, "seconds_per_iteration": value, "samples_per_second": 64 / value}
        for iteration, value in enumerate(seconds, start=1)
    ]
    lines.append({"iteration": len(seconds), "validation_loss": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    collectives = [
        {
            "collective": "all_reduce",
            "mesh_dimension": "dp_replicate",
            "calls": all_reduces,
            "bytes": all_reduces * 1000,
        },
        {"collective": "reduce_scatter", "mesh_dimension": "dp_shard", "calls": 4, "bytes": 8_000_000},
    ]
    other_first_step = {"iteration": 1, "collectives": []}
    ledger = {
        "fsdp_accum_mode": mode,
        "optimizer_steps": [other_first_step, {"iteration": 2, "collectives": collectives}],
    }
    (folder / "comm_ledger.json").write_text(json.dumps(ledger))
    return folder


def print_table(run: Path, against: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(run), "--against", str(against)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_table_has_success_and_costs(tmp_path: Path) -> None:
    warm_up = [60.0] * 5
    run = write_run(tmp_path / "run", "all_reduce", [*warm_up, 0.5, 0.4, 9.0], all_reduces=1)
    against = write_run(tmp_path / "none", "none", [*warm_up, 1.0], all_reduces=4)
    evaluation = {"success": {"reach-v3": 1.0, "push-v3": 0.5}, "mean": 0.75, "episodes": 20}
    (run / "evaluation.json").write_text(json.dumps(evaluation))

    printed = print_table(run, against)

    assert printed.returncode == 0, printed.stderr
    rows = [" ".join(line.split()) for line in printed.stdout.splitlines()]
    assert "20 episodes" in printed.stdout
    for row in (
        "reach-v3 100%",
        "push-v3 50%",
        "mean 75%",
        "all_reduce none",
        "seconds 0.500 1.000",
        "samples/s 128 64",
        "all_reduce over dp_replicate 1 (1,000 B) 4 (4,000 B)",
        "reduce_scatter over dp_shard 4 (8,000,000 B) 4 (8,000,000 B)",
        "all collectives 5 (8,001,000 B) 8 (8,004,000 B)",
    ):
        assert row in rows


def test_a_run_that_never_warmed_up_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "short run", "all_reduce", [1.0] * 5, all_reduces=1)
    (run / "evaluation.json").write_text(json.dumps({"success": {}, "mean": 0.0, "episodes": 1}))
    printed = print_table(run, run)
    assert printed.returncode != 0
    assert str(run / "metrics.jsonl") in printed.stderr and "train for longer" in printed.stderr
