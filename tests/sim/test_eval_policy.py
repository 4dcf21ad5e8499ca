# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from cosmos_framework.data.lerobot import Episode, write_dataset
from cosmos_framework.model.action_policy import ActionPolicyConfig
from cosmos_framework.scripts.train import main as train_main
from tests.synthetic import synthetic_episodes, write_synthetic

TASK = "drawer-close-v3"


def train(root: str, output: str) -> int:
    """Trains a small policy on the pool's ranks as torchrun would; returns the exit code."""
    os.environ["IMAGINAIRE_OUTPUT_ROOT"] = output
    os.environ["WORLD_SIZE"] = "4"
    small = ["model.depth=1", "model.heads=2", "model.head_width=16", "dataset.chunk=8", "scheduler.warmup_iter=1"]
    short = ["trainer.max_iter=2", "trainer.run_validation=false"]
    return train_main([f"dataset.root={root}", "job.name=small", "parallelism=hsdp", *short, *small])


def evaluate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Calls the command, which must end before any trial; returns what it says."""
    from scripts.eval_policy import main

    monkeypatch.setattr(sys, "argv", ["eval_policy.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return str(stopped.value)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has not saved a checkpoint, on a data set whose tasks nobody simulates."""
    folder = tmp_path / "run"
    folder.mkdir()
    root = str(write_synthetic(tmp_path / "demos"))
    OmegaConf.save(
        {"model": ActionPolicyConfig(), "dataset": {"root": root, "history": 2, "chunk": 16}}, folder / "config.yaml"
    )
    return folder


def test_a_folder_that_is_no_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert f"{tmp_path} has no config.yaml" in evaluate(monkeypatch, "--run", str(tmp_path))


def test_a_run_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    OmegaConf.save({"model": {"_target_": "other.build"}}, run / "config.yaml")
    assert "trained other.build" in evaluate(monkeypatch, "--run", str(run))


def test_a_data_set_that_has_moved_can_be_named(monkeypatch: pytest.MonkeyPatch, run: Path, tmp_path: Path) -> None:
    said = evaluate(monkeypatch, "--run", str(run), "--dataset", str(tmp_path / "nowhere"))
    assert "nowhere is no folder" in said and "--dataset" in said


def test_more_actions_than_a_chunk_has_are_refused(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    assert "--execute 17 is more than the 16" in evaluate(monkeypatch, "--run", str(run), "--execute", "17")


def test_a_report_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    said = evaluate(monkeypatch, "--run", str(run), "--output", str(run / "none" / "report.json"))
    assert f"there is no folder {run / 'none'}" in said


def test_tasks_that_are_not_simulated_are_named(monkeypatch: pytest.MonkeyPatch, run: Path, tmp_path: Path) -> None:
    pytest.importorskip("metaworld", reason="needs the extra `sim`")
    assert "'reach left' is unknown to Meta-World" in evaluate(monkeypatch, "--run", str(run))

    episodes = [Episode(episode.state, episode.action, TASK) for episode in synthetic_episodes()]
    other = tmp_path / "other"
    write_dataset(other, episodes, fps=10, domains={"all": [TASK]}, validation_episodes=1)
    said = evaluate(monkeypatch, "--run", str(run), "--dataset", str(other))
    assert f"{TASK} has states of 39 numbers and actions of 4; {other} has 5 and 3" in said


@pytest.mark.slow
def test_what_several_ranks_trained_is_tried_by_one_process(
    monkeypatch: pytest.MonkeyPatch, rank_pool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("metaworld", reason="needs the extra `sim`")
    from cosmos_framework.sim.metaworld import record_expert
    from scripts.eval_policy import main

    root, report = tmp_path / "demos", tmp_path / "report.json"
    write_dataset(root, record_expert(TASK, 3, seed=0), fps=80, domains={"drawers": [TASK]}, validation_episodes=1)
    assert rank_pool.run(train, str(root), str(tmp_path)) == [0] * 4
    run = tmp_path / "cosmos_framework" / "action_policy" / "small"
    moved = root.rename(tmp_path / "moved")
    asked = ["--run", str(run), "--dataset", str(moved), "--episodes", "2", "--workers", "1", "--output", str(report)]
    monkeypatch.setattr(sys, "argv", ["eval_policy.py", *asked])
    main()
    written = json.loads(report.read_text())
    assert written["success"].keys() == {TASK} and written["mean"] == written["success"][TASK]
    assert written["episodes"] == 2 and written["seed"] == 0
    assert TASK in capsys.readouterr().out

    (run / "checkpoints" / "latest_checkpoint.txt").unlink()
    assert f"no checkpoint in {run}" in evaluate(monkeypatch, *asked)
