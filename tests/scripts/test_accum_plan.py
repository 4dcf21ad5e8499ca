# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from cosmos_framework.scripts import accum_plan
from tests.synthetic import write_synthetic

GIVEN = ["--compute-s", "10.8", "--all-reduce-s", "11.4", "--parameters", "2e9", "--shard-degree", "8"]
SIZES = [*GIVEN, "--replicate-degree", "2", "--accum", "4"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert accum_plan.main(argv) == 0
    return capsys.readouterr().out.splitlines()


def test_figures_of_a_cluster_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, *SIZES)
    rows = {line[17:43].strip(): line[43:].split() for line in lines[1:-1]}
    assert rows["none"][:3] == ["88.8", "0.04505", "x1.00"]
    assert rows["all_reduce"] == ["54.6", "0.07326", "x1.63", f"{2e9 / 8 * 4 / 2**30:.3f}"]
    assert len(rows) == 6
    assert lines[-1] == (
        "grad_accum_iter=4: trainer.fsdp_accum_mode=all_reduce trainer.fsdp_accum_reshard=true takes 54.6 s (x1.63)"
    )


def test_memory_decides(capsys: pytest.CaptureFixture[str]) -> None:
    scatters = ["--reduce-scatter-s", "3"]
    assert "fsdp_accum_mode=grad_sync" in run(capsys, *SIZES, *scatters)[-1]
    tight = run(capsys, *SIZES, *scatters, "--memory-gib", "2")[-1]
    assert tight.startswith("grad_accum_iter=4: trainer.fsdp_accum_mode=all_reduce")
    assert tight.endswith("trainer.fsdp_accum_mode=auto trainer.fsdp_accum_memory_gib=1.07")
    assert "fsdp_accum_mode=none" in run(capsys, *SIZES, *scatters, "--memory-gib", "0")[-1]


def test_options_and_overrides_in_any_order() -> None:
    command = ["recipe=action_policy", "--accum", "1,4", "parallelism=hsdp", "--repeats", "1", "job.name=x"]
    args = accum_plan._parser().parse_intermixed_args(command)
    assert args.overrides == ["recipe=action_policy", "parallelism=hsdp", "job.name=x"]
    assert (args.accum, args.repeats) == ([1, 4], 1)


def test_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="extra `report`")
    run(capsys, *GIVEN, "--plot", str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_plot_without_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert accum_plan.main([*GIVEN, "--plot", "plan.png"]) == 2
    assert "pip install 'cosmos-framework[report]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--all-reduce-s", "3"], "--all-reduce-s needs --compute-s"),
        (["--compute-s", "1", "parallelism=hsdp"], "parallelism=hsdp is for a model that is measured"),
        (["--compute-s", "1", "--memory-gib", "2"], "--memory-gib=2 needs --parameters"),
        (["recipe=nope"], "recipe=nope does not exist"),
        (["recipe=action_policy", "dataset.root=/nowhere"], "dataset.root=/nowhere"),
    ],
)
def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    assert accum_plan.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--compute-s", "0"], "above 0"),
        (["--compute-s", "1", "--all-reduce-s", "-1"], "at least 0"),
        (["--accum", "4,0"], "at least 1"),
        (["--memory-gib", "nan"], "at least 0"),
        (["--parameters", "1.5"], "whole number of at least 1"),
        (["--plot", "plan.gif"], ".png, .svg or .pdf"),
        (["--plot", "/nowhere/plan.png"], "existing folder"),
    ],
)
def test_values_that_mean_nothing(capsys: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    with pytest.raises(SystemExit):
        accum_plan.main(argv)
    assert expected in capsys.readouterr().err


MEMORY_BYTES = 20_000  # a gradient or the parameters of the small model, not both


def measured(folder: str, *overrides: str) -> None:
    os.chdir(folder)
    small = ["model.depth=1", "model.heads=2", "model.head_width=8", "dataloader_train.batch_size=4"]
    all_overrides = ["recipe=action_policy", f"dataset.root={folder}/data", *small, *overrides]
    figures = accum_plan._measured_figures(all_overrides, repeats=1, memory_bytes=MEMORY_BYTES)
    assert figures.samples_per_micro_step == 16
    assert figures.alone_s > 0
    assert all(min(cost.first_s, cost.inner_s, cost.boundary_s) > 0 for cost in figures.costs.values())
    held = {str(way): cost.held_bytes for way, cost in figures.costs.items()}
    if "parallelism=ddp" in overrides:
        assert held == {"none": 0, "all_reduce": 0}
    else:
        assert set(held) == {"none", "none, kept gathered", "all_reduce", "grad_sync"}
        assert 0 == held["none"] < held["all_reduce"] < held["none, kept gathered"] == held["grad_sync"]
        assert {str(way) for way in figures.too_large} == {"all_reduce, kept gathered", "grad_sync, kept gathered"}
        line = accum_plan._too_large(figures, MEMORY_BYTES)
        assert line.startswith("not run, over 1.86265e-05 GiB: all_reduce, kept gathered (")
        assert line.endswith(f"fsdp_accum_memory_gib={(MEMORY_BYTES - held['all_reduce']) / 2**30:.3g}")
    assert os.listdir(folder) == ["data"], "nothing of it lasts"


@pytest.mark.slow
def test_measured_on_the_mesh(rank_pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_synthetic(tmp_path / "data")
    for parallelism in ("hsdp", "ddp"):
        rank_pool.run(measured_by_rank, str(tmp_path), f"parallelism={parallelism}")


def measured_by_rank(folder: str, parallelism: str) -> None:
    before, os.environ["WORLD_SIZE"] = os.getcwd(), "4"
    try:
        measured(folder, parallelism, "trainer.ddp.find_unused_parameters=true")
    finally:
        del os.environ["WORLD_SIZE"]
        os.chdir(before)
