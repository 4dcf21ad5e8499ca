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
from scripts.collect_demos import main

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
ASKED = ("--tasks", "button-press-v3", "drawer-close-v3", "--episodes", "1", "--held-out", "1", "--workers", "1")


def test_what_is_collected_can_be_read_and_is_collected_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "demos"
    command = ["scripts/collect_demos.py", "--root", str(root), *ASKED]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == [root]
    dataset = read_dataset(root)
    assert dataset.tasks == ("button-press-v3", "drawer-close-v3")
    assert dataset.domains == {"buttons": (0,), "drawers": (1,)}
    assert dataset.splits == {"train": (0, 2), "val": (2, 4)}
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    monkeypatch.setattr(sys, "argv", command)
    main()
    assert "is there already" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--seed", "1"])
    with pytest.raises(SystemExit, match="was recorded with other arguments"):
        main()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
