# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import inspect
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cosmos_framework.utils import distributed
from tests.scripts import upstream_standin as standin

pytest.importorskip("libcst", reason="extra `upstream`")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FIELDS = ("fsdp_accum_mode", "fsdp_accum_reshard", "fsdp_reduce_unused_params", "fsdp_accum_memory_gib")

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, with `scripts/` on the path as Python has it for a script."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    main = importlib.import_module("apply_to_upstream").main
    return lambda *args: main([str(arg) for arg in args])


@pytest.fixture(params=[standin.DISPATCHER_BEFORE_HSDP_FIX, standin.DISPATCHER_AFTER_HSDP_FIX], ids=["before", "after"])
def either_state(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return standin.make(tmp_path / "upstream", standin.files(request.param))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return standin.make(tmp_path / "upstream", standin.files())


def edit(checkout: Path, path: str, old: str, new: str, commit: bool = True) -> None:
    text = (checkout / path).read_text(encoding="utf-8")
    assert old in text
    (checkout / path).write_text(text.replace(old, new), encoding="utf-8")
    if commit:
        standin.git(checkout, "commit", "-qam", "An edit")


# Applying


def test_fields_are_the_keywords_of_the_dispatcher(run: Run) -> None:
    fields = importlib.import_module("upstream.fields").FIELDS
    keywords = inspect.signature(distributed.ddp_sync_grad).parameters.values()
    assert [(field.name, field.default.strip('"')) for field in fields] == [
        (each.name, getattr(each.default, "value", str(each.default))) for each in list(keywords)[2:]
    ]


def test_check_prints_the_diff_and_writes_nothing(
    run: Run, either_state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = standin.snapshot(either_state)
    assert run(either_state, "--check") == 0
    out = capsys.readouterr().out
    assert "+++ b/cosmos_framework/utils/grad_sync/fsdp2.py" in out
    assert "-def _sync_grad_for_closure" in out
    assert "files would change; nothing was written." in out
    assert standin.snapshot(either_state) == before
    assert not list((either_state / ".git").glob("*.json"))


def test_check_apply_apply_revert(run: Run, either_state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (either_state / "CHANGELOG.md").chmod(0o600)
    before = standin.snapshot(either_state)
    assert run(either_state) == 0
    applied = standin.snapshot(either_state)
    assert applied != before
    assert stat.S_IMODE((either_state / "CHANGELOG.md").stat().st_mode) == 0o600
    capsys.readouterr()
    assert run(either_state) == 0
    assert capsys.readouterr().out == "Applied already: nothing changes.\n"
    assert standin.snapshot(either_state) == applied
    assert run(either_state, "--revert") == 0
    assert standin.snapshot(either_state) == before
    assert standin.git(either_state, "status", "--porcelain") == ""
    assert run(either_state, "--revert") == 0
    assert "Nothing to restore" in capsys.readouterr().out


def test_applied_twice_without_a_record_changes_nothing(run: Run, checkout: Path, tmp_path: Path) -> None:
    run(checkout)
    standin.git(checkout, "add", "-A")
    standin.git(checkout, "commit", "-qm", "Applied")
    standin.git(tmp_path, "clone", "-q", str(checkout), "clone")
    applied = standin.snapshot(tmp_path / "clone")
    assert run(tmp_path / "clone") == 0
    assert standin.snapshot(tmp_path / "clone") == applied


def test_either_state_ends_as_the_same_dispatcher(run: Run, either_state: Path, tmp_path: Path) -> None:
    other = standin.make(tmp_path / "other", standin.files())
    assert run(either_state) == run(other) == 0
    edited = "cosmos_framework/utils/distributed.py"
    assert (either_state / edited).read_bytes() == (other / edited).read_bytes()


def test_edited_files_say_what_they_should(run: Run, checkout: Path) -> None:
    run(checkout)
    text = {path: content.decode() for path, content in standin.snapshot(checkout).items()}
    utils = text["cosmos_framework/utils/distributed.py"]
    assert "contextmanager\n" not in utils.replace("AbstractContextManager", "")
    assert "show_sync_grad_static_graph_warning" not in utils
    assert "return RANK  # stays as it is" in utils
    for trainer in ("__init__", "distillation"):
        step = text[f"cosmos_framework/trainer/{trainer}.py"]
        assert all(f"{field}=self.config.trainer.{field},\n" in step for field in FIELDS)
    assert (
        "    # Micro-steps of a window.\n    grad_accum_iter: int = 1\n    # Which"
        in text["cosmos_framework/utils/config.py"]
    )
    assert "from typing import Any, Literal, Optional\n" in text["cosmos_framework/configs/toml_config/sft_config.py"]
    table = [line for line in text["docs/sft_config.md"].splitlines() if line.startswith("|")]
    assert len({len(line) for line in table}) == 1
    assert [line.split("`")[1] for line in table[2:]] == ["grad_accum_iter", *FIELDS, "max_iter"]
    assert all(f"    1. `{field}` — " in text["docs/training.md"] for field in FIELDS)
    entry = text["CHANGELOG.md"].index("fsdp_accum_mode")
    assert text["CHANGELOG.md"].index("Add a thing.") < entry < text["CHANGELOG.md"].index("Breaking")


@pytest.mark.slow
def test_edited_package_runs_with_its_own_tests(run: Run, checkout: Path, tmp_path: Path) -> None:
    """One process does it all, since importing torch takes longer than most of it."""
    pytest.importorskip("attrs", reason="upstream's configuration")
    pytest.importorskip("pydantic", reason="upstream's TOML schema")
    run(checkout)
    shutil.copytree(checkout / "cosmos_framework/utils/grad_sync", tmp_path / "alone/grad_sync")
    trial = (
        "import sys, grad_sync\n"
        "assert not [name for name in sys.modules if name.startswith('cosmos')], 'the copied core needs the package'\n"
        f"sys.path.insert(0, {str(checkout)!r})\n"
        "import torch; from cosmos_framework.utils import config, distributed\n"
        "model = torch.nn.Linear(1, 1)\n"
        "with distributed.ddp_sync_grad(model, False, fsdp_accum_mode='grad_sync'): model(torch.ones(1)).backward()\n"
        "assert model.weight.grad.item() == 1 and config.TrainerConfig().fsdp_accum_mode == 'all_reduce'\n"
        "try: config.TrainerConfig(fsdp_accum_mode='sometimes')\n"
        "except ValueError: pass\n"
        "else: raise AssertionError\n"
        "import pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-W', 'ignore', 'cosmos_framework']))\n"
    )
    (tmp_path / "trial.py").write_text(f"if __name__ == '__main__':\n{textwrap.indent(trial, '    ')}")
    result = subprocess.run(
        [sys.executable, tmp_path / "trial.py"],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "alone")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "15 passed" in result.stdout


# Refusing

LOST_ANCHORS = [
    ("cosmos_framework/utils/distributed.py", "def ddp_sync_grad", "def sync_grad", "the function ddp_sync_grad"),
    ("cosmos_framework/utils/distributed.py", "(model, enabled)", "(model, enabled, group)", "model, enabled, group"),
    (
        "cosmos_framework/utils/distributed.py",
        "        yield\n",
        "        mine(model)\n        yield\n",
        "also uses mine",
    ),
    ("cosmos_framework/utils/distributed.py", "touched = []", "model.mine = 1\n    touched = []", "also uses mine"),
    ("cosmos_framework/utils/config.py", "grad_accum_iter", "accum", "one class with a field grad_accum_iter"),
    ("cosmos_framework/utils/config.py", "class TrainerConfig", "class TrainerConfig(", "text that can be read"),
    ("cosmos_framework/configs/toml_config/sft_config.py", "grad_accum_iter", "accum", "a field grad_accum_iter"),
    ("cosmos_framework/trainer/__init__.py", "ddp_sync_grad(", "sync(", "a call of ddp_sync_grad in training_step"),
    (
        "cosmos_framework/trainer/__init__.py",
        "model_ddp, grad_accum_iter ==",
        "model_ddp, 1, grad_accum_iter ==",
        "a flag",
    ),
    ("cosmos_framework/trainer/distillation.py", "def _sync_grad_for_closure", "def _sync", "_sync_grad_for_closure"),
    ("cosmos_framework/trainer/distillation.py", "    try:\n", "    mine()\n    try:\n", "also uses mine"),
    ("cosmos_framework/trainer/distillation_test.py", "gradient_sync_calls ==", "mine ==", "gradient_sync_calls"),
    (
        "cosmos_framework/trainer/distillation_test.py",
        "SimpleNamespace(grad_accum_iter",
        "dict(grad_accum_iter",
        "SimpleN",
    ),
    ("docs/sft_config.md", "`grad_accum_iter`", "`accum`", "a table row for `grad_accum_iter`"),
    ("docs/training.md", "`grad_accum_iter`", "`accum`", "a list item for `grad_accum_iter`"),
    ("CHANGELOG.md", "## Unreleased", "## Next", "a section Unreleased"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "old", "new", "said"), LOST_ANCHORS)
def test_lost_anchor_is_listed_and_nothing_written(
    run: Run, checkout: Path, capsys: pytest.CaptureFixture[str], path: str, old: str, new: str, said: str
) -> None:
    edit(checkout, path, old, new)
    before = standin.snapshot(checkout)
    assert run(checkout, "--force") == 1
    listed = capsys.readouterr().err.splitlines()
    assert listed[0] == "Not found in this checkout, which is left untouched:"
    assert len(listed) == 2
    assert listed[1].startswith(f"  {path}: ")
    assert said in listed[1]
    assert standin.snapshot(checkout) == before


def test_all_lost_anchors_are_in_one_list(run: Run, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(checkout, "cosmos_framework/utils/config.py", "grad_accum_iter", "accum")
    edit(checkout, "docs/training.md", "`grad_accum_iter`", "`accum`")
    standin.git(checkout, "rm", "-q", "CHANGELOG.md")
    standin.git(checkout, "commit", "-qm", "No change log")
    assert run(checkout) == 1
    listed = [line.split(":")[0].strip() for line in capsys.readouterr().err.splitlines()[1:]]
    assert listed == ["cosmos_framework/utils/config.py", "docs/training.md", "CHANGELOG.md"]


def test_uncommitted_changes_are_refused_without_force(
    run: Run, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(checkout, "cosmos_framework/utils/config.py", "max_iter: int = 7", "max_iter: int = 8", commit=False)
    before = standin.snapshot(checkout)
    assert run(checkout) == 1
    assert "  cosmos_framework/utils/config.py\nCommit or stash them, or give --force." in capsys.readouterr().err
    assert standin.snapshot(checkout) == before
    assert run(checkout, "--force") == 0
    assert "max_iter: int = 8" in (checkout / "cosmos_framework/utils/config.py").read_text(encoding="utf-8")
    assert run(checkout, "--revert") == 0
    assert standin.snapshot(checkout) == before


def test_a_file_in_the_way_is_refused_without_force(run: Run, checkout: Path) -> None:
    theirs = checkout / "cosmos_framework/utils/grad_sync/fsdp2.py"
    theirs.parent.mkdir()
    theirs.write_bytes(b"THEIRS = 1\r\n")
    before = standin.snapshot(checkout)
    assert run(checkout) == 1
    assert standin.snapshot(checkout) == before
    assert run(checkout, "--force") == 0
    assert run(checkout, "--revert") == 0
    assert standin.snapshot(checkout) == before


def test_revert_refuses_files_edited_since(run: Run, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = standin.snapshot(checkout)
    run(checkout)
    edit(checkout, "CHANGELOG.md", "Add a thing.", "Add another thing.", commit=False)
    assert run(checkout, "--revert") == 1
    assert "  CHANGELOG.md\n" in capsys.readouterr().err
    assert run(checkout, "--revert", "--force") == 0
    assert standin.snapshot(checkout) == before


@pytest.mark.parametrize("fails_at", [0, 7, 19])
def test_a_failed_write_leaves_every_file_as_it_was(
    run: Run, checkout: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    put = importlib.import_module("upstream.checkout").Checkout._put
    written: list[str] = []

    def fail_once(self: Any, path: str, staged: Path | None) -> None:
        written.append(path)
        if len(written) == fails_at + 1:
            raise OSError("no space left")
        put(self, path, staged)

    monkeypatch.setattr(importlib.import_module("upstream.checkout").Checkout, "_put", fail_once)
    before = standin.snapshot(checkout)
    with pytest.raises(OSError, match="no space left"):
        run(checkout)
    assert standin.snapshot(checkout) == before
    assert run(checkout) == 0


def test_revert_after_the_process_died_halfway(run: Run, checkout: Path) -> None:
    before = standin.snapshot(checkout)
    run(checkout)
    for path in ("CHANGELOG.md", "docs/training.md"):
        (checkout / path).write_bytes(before[path])
    (checkout / "cosmos_framework/utils/grad_sync/ddp.py").unlink()
    assert run(checkout, "--revert") == 0
    assert standin.snapshot(checkout) == before


@pytest.mark.parametrize("inside", ["", "cosmos_framework"])
def test_a_folder_that_is_no_checkout_is_refused(
    run: Run, checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    assert run(checkout / inside if inside else tmp_path) == 1
    assert "checkout" in capsys.readouterr().err
