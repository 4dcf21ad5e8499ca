# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from cosmos_framework.scripts.train import main
from tests.tiny import TinyBatches, TinyModel

REPO = Path(__file__).parents[2]
TARGETS = [
    "model._target_=tests.scripts.test_train.tiny_model",
    "dataloader_train._target_=tests.scripts.test_train.tiny_batches",
]


def tiny_model(model_config: Any, dataset_config: Any) -> TinyModel:
    return TinyModel()


def tiny_batches(dataset_config: Any, **arguments: Any) -> Iterable[dict[str, Any]]:
    return TinyBatches()


def torchrun(ranks: int, *overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.run(
        [*launcher, str(REPO / "scripts" / "train.py"), *overrides],
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def output_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path / "outputs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["trainer.fsdp_accum_mode=reduce_scatter"], "all_reduce, grad_sync, none, auto"),
        (["trainer.fsdp_accum_mode=null"], "all_reduce, grad_sync, none, auto"),
        (["trainer.fsdp_accum_mode=false"], "all_reduce, grad_sync, none, auto"),
        (["trainer.distributed_parallelism=tp"], "ddp, fsdp"),
        (["trainer.grad_accum_iter=0"], "trainer.grad_accum_iter=0"),
        (["trainer.grad_accum_iter=two"], "trainer.grad_accum_iter=two"),
        (["trainer.grad_accum=2"], "trainer.grad_accum_iter"),
        (["checkpoint.save_iter=-1"], "checkpoint.save_iter=-1"),
        (["parallelism=hsdp", "model.parallelism.data_parallel_replicate_degree=3"], "1, 2, 4"),
        (["parallelism=fsdp", "model.parallelism.data_parallel_shard_degree=8"], "data_parallel_shard_degree=8"),
        (["recipe=unknown"], "action_policy"),
        (["dataset.root=/no/such/folder"], "dataset.root=/no/such/folder"),
        (["trainer.max_iter"], "trainer.max_iter"),
    ],
)
def test_an_error_is_one_line_on_rank_0_and_touches_nothing(
    overrides: list[str],
    expected: str,
    output_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    runnable = [f"dataset.root={output_root.parent}", "trainer.run_validation=false", *TARGETS]
    for rank in (0, 3):
        monkeypatch.setenv("RANK", str(rank))
        assert main([*runnable, *overrides]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1 and expected in printed.err
    assert not dist.is_initialized()
    assert list(output_root.parent.iterdir()) == []


def test_help_lists_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(["--help"])
    assert exit_status.value.code == 0
    assert "parallelism=ddp|fsdp|hsdp|replicate" in capsys.readouterr().out


def smoke(root: Path, parallelism: str) -> list[str]:
    """Overrides that train for two windows; `root` must be a folder, no more."""
    length = ["trainer.max_iter=2", "trainer.logging_iter=1", "trainer.run_validation=false"]
    window = ["trainer.grad_accum_iter=2", "trainer.fsdp_accum_mode=grad_sync"]
    job = ["job.group=tests", "job.name=smoke"]
    return [*TARGETS, f"parallelism={parallelism}", f"dataset.root={root}", *length, *window, *job]


def assert_smoke_trained(output_root: Path) -> None:
    folder = output_root / "cosmos_framework" / "tests" / "smoke"
    saved = OmegaConf.load(folder / "config.yaml")
    assert saved.trainer.fsdp_accum_mode == "grad_sync" and saved.scheduler.max_iter == 2
    losses = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 2
    assert (folder / "checkpoints" / "latest_checkpoint.txt").read_text().strip() == "iter_000000002"
    assert (folder / "comm_ledger.json").exists()


def train_on_ranks(root: Path, parallelism: str) -> int:
    """Trains in the pool's ranks as torchrun's would; returns the exit code."""
    environment = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "IMAGINAIRE_OUTPUT_ROOT": root / "out"}
    os.environ.update({name: str(value) for name, value in environment.items()})
    return main(smoke(root, parallelism))


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp", "replicate"])
def test_what_the_configuration_says_is_trained(rank_pool: Any, tmp_path: Path, parallelism: str) -> None:
    assert rank_pool.run(train_on_ranks, tmp_path, parallelism, world_size=2) == [0, 0]
    assert_smoke_trained(tmp_path / "out")


@pytest.mark.slow
def test_torchrun_trains_what_the_configuration_says(output_root: Path) -> None:
    done = torchrun(2, *smoke(output_root.parent, "fsdp"), cwd=output_root.parent)
    assert done.returncode == 0, done.stderr
    assert_smoke_trained(output_root)


@pytest.mark.slow
def test_torchrun_prints_an_error_once(output_root: Path) -> None:
    done = torchrun(2, *TARGETS, f"dataset.root={output_root.parent}", "trainer.max_iter=0", cwd=output_root.parent)
    assert done.returncode != 0
    assert done.stderr.count("trainer.max_iter=0 must be") == 1
    assert "exitcode  : 2" in done.stderr
    assert not output_root.exists()
