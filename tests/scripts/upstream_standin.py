# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a checkout of upstream: files of our own writing that have the shapes which the edits look for."""

from __future__ import annotations

import subprocess
from pathlib import Path

HEADER = "# A stand-in.\n"

DISTRIBUTED = """from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any

import torch

RANK = os.environ.get("RANK", "0")


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, model: torch.nn.Module, *args: Any) -> None:
        super().__init__(model, *args)
        self.show_sync_grad_static_graph_warning = True


{dispatcher}

def after() -> str:
    return RANK  # stays as it is
"""

DISPATCHER_BEFORE_HSDP_FIX = '''@contextmanager
def ddp_sync_grad(model, enabled):
    """Only DDP waits."""
    is_ddp = isinstance(model, DistributedDataParallel)
    if is_ddp:
        former = model.require_backward_grad_sync
        model.require_backward_grad_sync = enabled
    try:
        yield
    finally:
        if is_ddp:
            model.require_backward_grad_sync = former
'''

DISPATCHER_AFTER_HSDP_FIX = '''@contextmanager
def ddp_sync_grad(model, enabled):
    """DDP waits, and FSDP2's all-reduce."""
    touched = []
    try:
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = enabled
        else:
            for each in model.modules():
                if isinstance(each, torch.distributed.fsdp.FSDPModule):
                    touched.append((each, each._get_fsdp_state()._fsdp_param_group.all_reduce_grads))
                    each.set_requires_all_reduce(enabled, recurse=False)
        yield
    finally:
        for each, former in touched:
            each.set_requires_all_reduce(former, recurse=False)
'''

DISTRIBUTED_TEST = """import torch

from cosmos_framework.utils import distributed


def test_there_is_a_rank():
    assert distributed.after() == "0" and torch.ones(1)
"""

CONFIG = """from __future__ import annotations

import attrs


@attrs.define(slots=False)
class JobConfig:
    name: str = ""


@attrs.define(slots=False)
class TrainerConfig:
    distributed_parallelism: str = "ddp"
    # Micro-steps of a window.
    grad_accum_iter: int = 1
    # The last one.
    max_iter: int = 7
"""

SFT_CONFIG = """from __future__ import annotations

from typing import Any, Optional

from pydantic import BaseModel, ConfigDict, Field


class TrainerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    grad_accum_iter: int = Field(default=1, description="Micro-steps of a window.")
    max_iter: Optional[int] = None


class SFTExperimentConfig(BaseModel):
    job: dict[str, Any]
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
"""

SFT_CONFIG_TEST = """import pytest

from cosmos_framework.configs.toml_config.sft_config import SFTExperimentConfig


def test_a_job_is_needed():
    with pytest.raises(ValueError):
        SFTExperimentConfig.model_validate({})
"""

TRAINER = """from cosmos_framework.utils import distributed


class ImaginaireTrainer:
    def training_step(self, model_ddp, data, grad_accum_iter=0):
        with distributed.ddp_sync_grad(model_ddp, grad_accum_iter == self.config.trainer.grad_accum_iter - 1):
            loss = model_ddp(data).sum()
            loss.backward()
        return loss
"""

DISTILLATION = """import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cosmos_framework.trainer import ImaginaireTrainer
from cosmos_framework.utils import distributed


@contextmanager
def _sync_grad_for_closure(model: torch.nn.Module, enabled: bool) -> Iterator[None]:
    sharded = [each for each in model.modules() if callable(getattr(each, "set_requires_gradient_sync", None))]
    for each in sharded:
        each.set_requires_gradient_sync(enabled, recurse=False)
    try:
        with distributed.ddp_sync_grad(model, enabled):
            yield
    finally:
        for each in sharded:
            each.set_requires_gradient_sync(True, recurse=False)


class DistillationTrainer(ImaginaireTrainer):
    def training_step(self, model_ddp, data, grad_accum_iter=0):
        if not inspect.ismethod(getattr(model_ddp, "training_step_closures", None)):
            return super().training_step(model_ddp, data, grad_accum_iter)
        is_boundary = grad_accum_iter == self.config.trainer.grad_accum_iter - 1
        for closure, is_last in model_ddp.training_step_closures(data):
            with _sync_grad_for_closure(model_ddp, is_boundary and is_last):
                loss = closure()
                loss.backward()
        return loss
"""

DISTILLATION_TEST = """from types import SimpleNamespace
from unittest.mock import patch

import torch

import cosmos_framework.trainer.distillation as trainer_module


def _trainer(grad_accum_iter):
    trainer = object.__new__(trainer_module.DistillationTrainer)
    trainer.config = SimpleNamespace(trainer=SimpleNamespace(grad_accum_iter=grad_accum_iter))
    return trainer


class _Closures(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step_closures(self, data):
        yield (lambda: (self.weight * data).sum()), False
        yield (lambda: (self.weight * data).sum()), True


class _Fake(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gradient_sync_calls = []

    def set_requires_gradient_sync(self, enabled, *, recurse=True):
        self.gradient_sync_calls.append((enabled, recurse))


class _ClosuresAndFake(_Closures):
    def __init__(self):
        super().__init__()
        self.fake = _Fake()


def test_one_micro_step():
    model = _ClosuresAndFake()
    _trainer(1).training_step(model, torch.ones(1))
    assert model.weight.grad.item() == 2
    assert model.fake.gradient_sync_calls == [(False, False), (True, False), (True, False), (True, False)]


def test_no_boundary():
    model = _ClosuresAndFake()
    _trainer(2).training_step(model, torch.ones(1))
    assert model.fake.gradient_sync_calls == [(False, False), (True, False), (False, False), (True, False)]


def test_other():
    with patch("cosmos_framework.utils.distributed.ddp_sync_grad") as sync:
        assert not sync.called
"""

SFT_CONFIG_MD = """# Fields

| field             | default | description                            |
| ----------------- | ------- | -------------------------------------- |
| `grad_accum_iter` | `1`     | Micro-steps of a window; `a \\| b` too. |
| `max_iter`        | `7`     | The last one.                          |

The end.
"""

TRAINING_MD = """# Training

1. `[trainer]`
    1. `grad_accum_iter` — Micro-steps of a window.
    1. `max_iter` — The last one.
"""

CHANGELOG = """# Changes

## Unreleased

- New features
  - Add a thing.

- Breaking changes

## 0.1

- New features
  - Add all.
"""


def files(dispatcher: str = DISPATCHER_AFTER_HSDP_FIX) -> dict[str, str]:
    """Returns the stand-in's files by path, with `ddp_sync_grad` before or after upstream's fix for HSDP."""
    helper = "def build_hydra_overrides(raw):\n    return [f'trainer.{k}={v}' for k, v in raw['trainer'].items()]\n"
    return {
        "cosmos_framework/__init__.py": HEADER,
        "cosmos_framework/configs/__init__.py": HEADER,
        "cosmos_framework/configs/toml_config/__init__.py": HEADER,
        "cosmos_framework/configs/toml_config/sft_config.py": HEADER + SFT_CONFIG,
        "cosmos_framework/configs/toml_config/sft_config_test.py": HEADER + SFT_CONFIG_TEST,
        "cosmos_framework/configs/toml_config/toml_config_helper.py": HEADER + helper,
        "cosmos_framework/trainer/__init__.py": HEADER + TRAINER,
        "cosmos_framework/trainer/distillation.py": HEADER + DISTILLATION,
        "cosmos_framework/trainer/distillation_test.py": HEADER + DISTILLATION_TEST,
        "cosmos_framework/utils/__init__.py": HEADER,
        "cosmos_framework/utils/config.py": HEADER + CONFIG,
        "cosmos_framework/utils/distributed.py": HEADER + DISTRIBUTED.replace("{dispatcher}", dispatcher),
        "cosmos_framework/utils/distributed_test.py": HEADER + DISTRIBUTED_TEST,
        "docs/sft_config.md": SFT_CONFIG_MD,
        "docs/training.md": TRAINING_MD,
        "CHANGELOG.md": CHANGELOG,
    }


def make(root: Path, contents: dict[str, str]) -> Path:
    """Writes a stand-in into `root` and commits it."""
    for path, text in contents.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "A stand-in"]):
        git(root, *command)
    return root


def git(root: Path, *args: str) -> str:
    """Runs git in `root` and returns what it prints."""
    who = ["-c", "user.name=tests", "-c", "user.email=tests@example.invalid"]
    return subprocess.run(["git", "-C", str(root), *who, *args], check=True, capture_output=True, text=True).stdout


def snapshot(root: Path) -> dict[str, bytes]:
    """Returns every file of the work tree and the names of its folders."""
    found = [each for each in sorted(root.rglob("*")) if ".git" not in each.relative_to(root).parts]
    return {str(each.relative_to(root)): each.read_bytes() if each.is_file() else b"folder" for each in found}
