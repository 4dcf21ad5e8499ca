# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from cosmos_framework.scripts.train import main


@pytest.fixture
def output_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path / "outputs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["trainer.fsdp_accum_mode=reduce_scatter"], "all_reduce, grad_sync, none"),
        (["trainer.fsdp_accum_mode=null"], "all_reduce, grad_sync, none"),
        (["trainer.fsdp_accum_mode=false"], "all_reduce, grad_sync, none"),
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
    runnable = [f"dataset.root={output_root.parent}", "trainer.run_validation=false"]
    for rank in range(4):
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
