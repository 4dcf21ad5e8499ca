# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""What the progress bar shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_framework.trainer import ImaginaireTrainer
from tests.tiny import TinyBatches, TinyModel, tiny_config

BAR = "trainer.callbacks={bar: {_target_: cosmos_framework.callbacks.progress_bar.ProgressBar}}"


def test_bar_counts_windows_from_where_the_run_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ImaginaireTrainer(tiny_config(tmp_path, BAR)).train(TinyModel(), TinyBatches(), None)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert all(figure in shown for figure in ("loss=", "s/iter=", "samples/s=", "waits="))
    ImaginaireTrainer(tiny_config(tmp_path, BAR, "trainer.max_iter=3")).train(TinyModel(), TinyBatches(), None)
    shown = capsys.readouterr().err
    assert "2/3" in shown and "3/3" in shown
