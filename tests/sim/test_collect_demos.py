# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("metaworld", reason="needs the extra `sim`")

from cosmos_framework.data.lerobot import read_dataset

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
ASKED = ("--tasks", "button-press-v3", "drawer-close-v3", "--episodes", "1", "--held-out", "1", "--workers", "1")


def collect(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/collect_demos.py", "--root", str(root), *arguments],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_what_is_collected_can_be_read_and_is_collected_once(tmp_path: Path) -> None:
    root = tmp_path / "demos"
    first = collect(root, *ASKED)
    assert first.returncode == 0, first.stderr
    assert list(tmp_path.iterdir()) == [root]
    dataset = read_dataset(root)
    assert dataset.tasks == ("button-press-v3", "drawer-close-v3")
    assert dataset.domains == {"buttons": (0,), "drawers": (1,)}
    assert dataset.splits == {"train": (0, 2), "val": (2, 4)}
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    again = collect(root, *ASKED)
    assert again.returncode == 0 and "is there already" in again.stdout
    other = collect(root, *ASKED, "--seed", "1")
    assert other.returncode == 1 and "was recorded with other arguments" in other.stderr
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
