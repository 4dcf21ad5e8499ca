# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "NPROC_PER_NODE": "8"}


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A copy in a folder with a space in its name, beside a torchrun that prints its arguments, one a line."""
    copy = tmp_path / "check out" / "scripts"
    shutil.copytree(SCRIPTS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    torchrun.chmod(0o755)
    return copy


def launch(scripts: Path, name: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(scripts.parents[1] / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", str(scripts / name), *arguments],
        check=False,
        cwd=scripts.parents[1],
        env={"PATH": path, "HOME": os.environ.get("HOME", "/"), "CUDA_VISIBLE_DEVICES": "", **settings},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_single_node_passes_its_arguments_on(scripts: Path) -> None:
    done = launch(scripts, "launch_single_node.sh", "job.name=a b", "parallelism=hsdp", NPROC_PER_NODE="4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "--standalone",
        "--nproc_per_node=4",
        str(scripts / "train.py"),
        "job.name=a b",
        "parallelism=hsdp",
    ]


@pytest.mark.slow
def test_one_rank_where_there_is_no_gpu(scripts: Path) -> None:
    done = launch(scripts, "launch_single_node.sh")
    assert done.returncode == 0, done.stderr
    assert "--nproc_per_node=1" in done.stdout.splitlines()


@pytest.mark.parametrize("port, expected", [({}, "29500"), ({"MASTER_PORT": "1234"}, "1234")])
def test_multi_node_makes_a_rendezvous(scripts: Path, port: dict[str, str], expected: str) -> None:
    done = launch(scripts, "launch_multi_node.sh", "parallelism=hsdp", **TWO_NODES, **port)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "--nnodes=2",
        "--node_rank=1",
        "--nproc_per_node=8",
        "--master_addr=10.0.0.1",
        f"--master_port={expected}",
        str(scripts / "train.py"),
        "parallelism=hsdp",
    ]


@pytest.mark.parametrize("name", TWO_NODES.keys() - {"NPROC_PER_NODE"})
def test_multi_node_names_what_is_missing(scripts: Path, name: str) -> None:
    settings = {key: value for key, value in TWO_NODES.items() if key != name}
    for given in (settings, {**settings, name: ""}):
        done = launch(scripts, "launch_multi_node.sh", **given)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith(f"launch_multi_node.sh: {name} is not set")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "setting, value",
    [
        ("NNODES", "two"),
        ("NNODES", "0"),
        ("NODE_RANK", "-1"),
        ("NODE_RANK", "2"),
        ("NODE_RANK", "a[$(touch /tmp/never)]"),
        ("MASTER_PORT", "http"),
        ("NPROC_PER_NODE", "0"),
        ("NPROC_PER_NODE", ""),
    ],
)
def test_multi_node_names_what_is_wrong(scripts: Path, setting: str, value: str) -> None:
    done = launch(scripts, "launch_multi_node.sh", **{**TWO_NODES, setting: value})
    assert done.returncode == 2 and done.stdout == ""
    assert setting in done.stderr and value in done.stderr
    assert len(done.stderr.splitlines()) == 1
