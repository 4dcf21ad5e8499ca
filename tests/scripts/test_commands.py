# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""test.sh and quickstart.sh around an environment whose programs print how they were called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in a folder with a space in its name, whose environment counts as installed."""
    checkout = tmp_path / "check out"
    checkout.mkdir()
    shutil.copytree(REPO / "scripts", checkout / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "constraints.txt"):
        shutil.copy(REPO / name, checkout)
    programs = checkout / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "torchrun"):
        (programs / name).write_text('#!/bin/sh\necho "$PWD: $(basename "$0") $*"\n')
        (programs / name).chmod(0o755)
    installed_from = f"{checkout}\n" + "".join((REPO / name).read_text() for name in ("setup.py", "constraints.txt"))
    (checkout / ".venv" / "installed_from").write_text(installed_from)
    return checkout


def run(checkout: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script from another folder, with an interpreter for new environments that is too old."""
    return subprocess.run(
        ["bash", str(checkout / "scripts" / script), *arguments],
        check=False,
        cwd=checkout.parent,
        env={**os.environ, "PYTHON": "false"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_arguments_of_the_test_command_go_to_pytest(checkout: Path) -> None:
    done = run(checkout, "test.sh", "-m", "not slow")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{checkout}: python -m pytest -m not slow\n"


def test_quickstart_takes_its_steps_in_order(checkout: Path) -> None:
    done = run(checkout, "quickstart.sh")
    assert done.returncode == 0, done.stderr
    calls = [line.removeprefix(f"{checkout}: ") for line in done.stdout.splitlines() if line.startswith(str(checkout))]
    programs = [next(word for word in call.split() if word.endswith(".py")) for call in calls]
    expected = ["collect_demos.py", "train.py", "train.py", "eval_policy.py", "quickstart_table.py"]
    assert programs == [f"scripts/{name}" for name in expected]
    for call, mode in zip(calls[1:3], ["all_reduce", "none"], strict=True):
        assert "--nproc_per_node=4" in call and "parallelism=hsdp" in call
        assert "trainer.grad_accum_iter=4" in call and f"trainer.fsdp_accum_mode={mode}" in call


def test_quickstart_evaluates_a_policy_once(checkout: Path) -> None:
    run_folder = checkout / "outputs" / "cosmos_framework" / "quickstart" / "all_reduce"
    latest, evaluation = run_folder / "checkpoints" / "latest_checkpoint.txt", run_folder / "evaluation.json"
    latest.parent.mkdir(parents=True)
    for file, changed in ((latest, 1000), (evaluation, 2000)):
        file.touch()
        os.utime(file, (changed, changed))
    assert "eval_policy.py" not in run(checkout, "quickstart.sh").stdout
    os.utime(latest, (3000, 3000))
    assert "eval_policy.py" in run(checkout, "quickstart.sh").stdout


@pytest.mark.parametrize("script", ["test.sh", "quickstart.sh"])
def test_other_pins_need_another_environment(checkout: Path, script: str) -> None:
    with open(checkout / "constraints.txt", "a") as pins:
        pins.write("one-more==1.0\n")
    done = run(checkout, script)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "the pinned packages need Python 3.11 or newer; PYTHON=false is not, or does not run\n"


def test_a_step_that_fails_ends_the_quickstart(checkout: Path) -> None:
    (checkout / ".venv" / "bin" / "torchrun").write_text("#!/bin/sh\nexit 7\n")
    done = run(checkout, "quickstart.sh")
    assert done.returncode == 7
    assert "eval_policy.py" not in done.stdout
