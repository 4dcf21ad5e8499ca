# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""The ledger of real runs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cosmos_framework.callbacks.comm_ledger import saved_against_none
from cosmos_framework.trainer import ImaginaireTrainer
from cosmos_framework.utils.collectives import Traffic
from tests.tiny import TinyBatches, TinyModel, tiny_config

# The network's own group, which torch does not gather again in the backward, and one for each of its two blocks.
GROUPS, FORWARD_GATHERS, BACKWARD_GATHERS = 3, 3, 2
ACCUMULATION, WINDOWS = 4, 3

pytestmark = pytest.mark.slow

HSDP = "model.parallelism.data_parallel_replicate_degree=2"
FSDP = "model.parallelism.data_parallel_replicate_degree=1"
DDP = "trainer.distributed_parallelism=ddp"
KEPT = "trainer.fsdp_accum_reshard=false"
NONE, ALL_REDUCE, GRAD_SYNC = (f"trainer.fsdp_accum_mode={mode}" for mode in ("none", "all_reduce", "grad_sync"))

RUNS = [
    (HSDP, NONE),
    (HSDP, ALL_REDUCE),
    (HSDP, GRAD_SYNC, KEPT),
    (FSDP, NONE),
    (FSDP, ALL_REDUCE),
    (FSDP, GRAD_SYNC),
    (DDP, NONE),
    (DDP, ALL_REDUCE),
]


def train(folder: str, *overrides: str) -> None:
    callbacks = (
        "trainer.callbacks={ledger: {_target_: cosmos_framework.callbacks.comm_ledger.CommLedger},"
        "clip: {_target_: cosmos_framework.callbacks.grad_clip.GradClip}}"
    )
    length = f"trainer.grad_accum_iter={ACCUMULATION}", f"trainer.max_iter={WINDOWS + 1}"
    static = "trainer.ddp={find_unused_parameters: false, static_graph: true, broadcast_buffers: true}"
    model = TinyModel()
    # Only where all parameters are used can the bytes that none would send be known.
    model.net.heads["right"].requires_grad_(False)
    config = tiny_config(folder, callbacks, static, *length, *overrides)
    ImaginaireTrainer(config).train(model, TinyBatches("left"), None)


def last_lines(folder: str, runs: list[tuple[str, ...]]) -> list[str]:
    """Trains all runs in folders of their own; returns what the ledger of each logged last."""
    logger = logging.getLogger("cosmos_framework.callbacks.comm_ledger")
    logger.setLevel(logging.INFO)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    last = []
    for index, overrides in enumerate(runs):
        train(f"{folder}/{index}", *overrides)
        last += lines[-1:]
    logger.removeHandler(handler)
    return last


class Run:
    """What the ledger of one run says."""

    def __init__(self, ledger: dict[str, Any], line: str) -> None:
        self.ledger = ledger
        self.line = line
        self.step = ledger["optimizer_steps"][-1]
        self.sent = self._traffic("collectives")
        self.saved = self._traffic("saved_against_none")

    def _traffic(self, name: str) -> dict[tuple[str, str], Traffic]:
        return {
            (entry["collective"], entry["mesh_dimension"]): Traffic(entry["calls"], entry["bytes"])
            for entry in self.step[name]
        }


Runs = dict[tuple[str, ...], Run]


@pytest.fixture(scope="module")
def runs(rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    lines = rank_pool.run(last_lines, str(folder), RUNS)[0]
    ledgers = [json.loads((folder / str(index) / "comm_ledger.json").read_text()) for index in range(len(RUNS))]
    return {run: Run(ledger, line) for run, ledger, line in zip(RUNS, ledgers, lines, strict=True)}


@pytest.mark.parametrize(
    ("which", "reduce_scatters", "all_reduces"),
    [((HSDP, NONE), 4, 4), ((HSDP, ALL_REDUCE), 4, 1), ((HSDP, GRAD_SYNC, KEPT), 1, 1)],
)
def test_the_ledger_counts_what_a_window_sends(
    runs: Runs, which: tuple[str, ...], reduce_scatters: int, all_reduces: int
) -> None:
    run = runs[which]
    assert (run.ledger["grad_accum_iter"], run.ledger["ranks"]) == (ACCUMULATION, 4)
    assert [step["iteration"] for step in run.ledger["optimizer_steps"]] == [1, 2, 3]
    assert run.sent["reduce_scatter", "dp_shard"].calls == reduce_scatters * GROUPS
    assert run.sent["all_reduce", "dp_replicate"].calls == all_reduces * GROUPS
    gathers = FORWARD_GATHERS if KEPT in which else ACCUMULATION * (FORWARD_GATHERS + BACKWARD_GATHERS)
    assert run.sent["all_gather", "dp_shard"].calls == gathers


@pytest.mark.parametrize("which", RUNS)
def test_the_share_of_time_is_one(runs: Runs, which: tuple[str, ...]) -> None:
    for step in runs[which].ledger["optimizer_steps"]:
        assert 0 < step["in_flight_share"] < 1
        assert step["in_flight_seconds"] == pytest.approx(step["in_flight_share"] * step["seconds"])
        each = [entry["seconds"] for entry in step["collectives"]]
        assert max(each) <= step["in_flight_seconds"] <= sum(each) * (1 + 1e-9)


@pytest.mark.parametrize("which", RUNS)
def test_what_was_saved_is_what_none_sends_more(runs: Runs, which: tuple[str, ...]) -> None:
    ours, none = runs[which], runs[which[0], NONE]
    for key in none.sent.keys() | ours.sent.keys():
        saved, sent = ours.saved.get(key, Traffic()), ours.sent.get(key, Traffic())
        assert Traffic(sent.calls + saved.calls, sent.bytes + saved.bytes) == none.sent.get(key, Traffic()), key
    saves = NONE not in which and which != (FSDP, ALL_REDUCE)
    assert any(saved.calls > 0 for saved in ours.saved.values()) == saves


def test_the_last_line_tells_what_was_saved(runs: Runs) -> None:
    assert "9 of 12 all_reduce over dp_replicate" in runs[HSDP, ALL_REDUCE].line
    assert "9 of 12 reduce_scatter over dp_shard" in runs[FSDP, GRAD_SYNC].line
    assert "of 4 all_reduce over world" in runs[DDP, ALL_REDUCE].line
    assert "17 of 20 all_gather over dp_shard" in runs[HSDP, GRAD_SYNC, KEPT].line


def test_where_nothing_was_saved_it_tells_what_would(runs: Runs) -> None:
    assert "saved nothing" in runs[FSDP, ALL_REDUCE].line
    assert "fsdp_accum_mode='grad_sync'" in runs[FSDP, ALL_REDUCE].line
    assert "every micro-step synchronise" in runs[HSDP, NONE].line


def test_what_only_a_deferring_window_sends_counts_against_it() -> None:
    reduce, agree = ("all_reduce", "dp_replicate"), ("all_reduce", "world")
    micro_steps = [{}, {}, {reduce: Traffic(2, 200)}]
    sent = {reduce: Traffic(2, 200), agree: Traffic(1, 8)}
    assert saved_against_none(micro_steps, sent, {}) == {reduce: Traffic(4, 400), agree: Traffic(-1, -8)}


def test_a_run_of_fewer_windows_has_a_ledger_all_the_same(rank_pool: Any, tmp_path: Path) -> None:
    short = "trainer.max_iter=2", "trainer.grad_accum_iter=1"
    lines = rank_pool.run(last_lines, str(tmp_path), [short], world_size=1)[0]
    ledger = json.loads((tmp_path / "0" / "comm_ledger.json").read_text())
    assert len(ledger["optimizer_steps"]) == 2
    assert "saved nothing: with trainer.grad_accum_iter=1" in lines[0]
