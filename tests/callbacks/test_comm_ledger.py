# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""The ledger of a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_framework.trainer import ImaginaireTrainer
from tests.tiny import TinyBatches, TinyModel, tiny_config

# The network's own group and one for each of its two blocks.
GROUPS = 3


def train(folder: str, *overrides: str) -> None:
    callbacks = (
        "trainer.callbacks={ledger: {_target_: cosmos_framework.callbacks.comm_ledger.CommLedger},"
        "clip: {_target_: cosmos_framework.callbacks.grad_clip.GradClip}}"
    )
    hsdp = "model.parallelism.data_parallel_replicate_degree=2"
    config = tiny_config(folder, callbacks, hsdp, "trainer.grad_accum_iter=4", "trainer.max_iter=3", *overrides)
    ImaginaireTrainer(config).train(TinyModel(), TinyBatches("left"), None)


@pytest.mark.parametrize(
    ("mode", "reduce_scatters", "all_reduces"), [("none", 4, 4), ("all_reduce", 4, 1), ("grad_sync", 1, 1)]
)
def test_ledger_counts_what_a_window_sends(
    rank_pool: Any, tmp_path: Path, mode: str, reduce_scatters: int, all_reduces: int
) -> None:
    rank_pool.run(train, str(tmp_path), f"trainer.fsdp_accum_mode={mode}")
    ledger = json.loads((tmp_path / "comm_ledger.json").read_text())
    assert (ledger["fsdp_accum_mode"], ledger["grad_accum_iter"], ledger["ranks"]) == (mode, 4, 4)
    assert [step["iteration"] for step in ledger["optimizer_steps"]] == [1, 2]
    counted = {
        (entry["collective"], entry["mesh_dimension"]): (entry["calls"], entry["bytes"])
        for entry in ledger["optimizer_steps"][-1]["collectives"]
    }
    assert counted["reduce_scatter", "dp_shard"][0] == reduce_scatters * GROUPS
    assert counted["all_reduce", "dp_replicate"][0] == all_reduces * GROUPS
    assert all(size > 0 for _, size in counted.values())
