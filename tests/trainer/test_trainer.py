# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""The loop on one process: hooks, windows, loaders, errors."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_framework.model._base import ImaginaireModel
from cosmos_framework.trainer import ImaginaireTrainer
from cosmos_framework.utils import distributed
from cosmos_framework.utils.callback import Callback
from tests.tiny import TinyBatches, TinyModel, full_tensors, tiny_config

EVENTS: list[tuple[str, int | None]] = []


def recorded(name: str, hook: Any) -> Any:
    """Makes a method that notes its call, and the iteration that it was given, before it does what `hook` does."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        EVENTS.append((name, kwargs.get("iteration")))
        return hook(self, *args, **kwargs)

    return method


class Recorder(Callback):
    """Records every hook that a callback has."""


for hook_name in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(Recorder, hook_name, recorded(hook_name, getattr(Callback, hook_name)))


class RecordedModel(TinyModel):
    on_train_start = recorded("model.on_train_start", ImaginaireModel.on_train_start)
    on_after_backward = recorded("model.on_after_backward", ImaginaireModel.on_after_backward)
    on_before_optimizer_step = recorded("model.on_before_optimizer_step", ImaginaireModel.on_before_optimizer_step)
    on_before_zero_grad = recorded("model.on_before_zero_grad", ImaginaireModel.on_before_zero_grad)


class RecordedTrainer(ImaginaireTrainer):
    _optimizer_step = recorded("_optimizer_step", ImaginaireTrainer._optimizer_step)
    _zero_grad = recorded("_zero_grad", ImaginaireTrainer._zero_grad)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Each test starts and ends without a process group, whatever it raises."""
    EVENTS.clear()
    yield
    distributed.destroy_process_group()


def train(folder: Path, *overrides: str, model: ImaginaireModel | None = None, data: Any = None) -> ImaginaireTrainer:
    trainer = ImaginaireTrainer(tiny_config(folder, *overrides))
    trainer.train(model or TinyModel(), TinyBatches() if data is None else data, None)
    return trainer


MICRO_STEP = [
    "on_before_dataloading",
    "on_after_dataloading",
    "on_training_step_start",
    "on_training_step_batch_start",
    "on_before_forward",
    "on_after_forward",
    "on_before_backward",
    "model.on_after_backward",
    "on_after_backward",
]
BOUNDARY = [
    "on_before_optimizer_step",
    "model.on_before_optimizer_step",
    "_optimizer_step",
    "on_before_zero_grad",
    "model.on_before_zero_grad",
    "_zero_grad",
]
CHECKPOINT = [
    "on_save_checkpoint_start",
    "on_save_checkpoint",
    "on_save_checkpoint_end",
    "on_save_checkpoint_success",
]
VALIDATION = [
    "on_validation_start",
    "on_validation_step_start",
    "on_validation_step_end",
    "on_validation_end",
]


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_hooks_over_two_windows_come_in_upstreams_order(tmp_path: Path, parallelism: str) -> None:
    config = tiny_config(
        tmp_path,
        f"trainer.distributed_parallelism={parallelism}",
        f"trainer.callbacks={{recorder: {{_target_: {__name__}.Recorder}}}}",
        "trainer.run_validation=true",
        "trainer.validation_iter=2",
        "trainer.max_val_iter=1",
        "checkpoint.save_iter=2",
    )
    RecordedTrainer(config).train(RecordedModel(), TinyBatches(), TinyBatches())

    window = [*MICRO_STEP, "on_training_step_batch_end", *MICRO_STEP, *BOUNDARY, "on_training_step_batch_end"]
    assert [name for name, _ in EVENTS] == [
        "model.on_train_start",
        "on_optimizer_init_start",
        "on_optimizer_init_end",
        "on_load_checkpoint_start",
        "on_load_checkpoint_end",
        "on_train_start",
        *window,
        "on_training_step_end",
        *window,
        *CHECKPOINT,
        "on_training_step_end",
        *VALIDATION,
        "on_train_end",
        "on_app_end",
    ]
    iterations = [iteration for name, iteration in EVENTS if name == "on_training_step_batch_end"]
    assert iterations == [0, 0, 1, 1]
    assert [iteration for name, iteration in EVENTS if name == "on_training_step_end"] == [1, 2]
    assert [iteration for name, iteration in EVENTS if name == "on_before_optimizer_step"] == [0, 1]


class LossOfHooks(Callback):
    """Keeps the losses that the hooks were given."""

    losses: list[float] = []

    def on_before_backward(self, model: ImaginaireModel, loss: torch.Tensor, iteration: int = 0) -> None:
        self.losses.append(loss.item())

    def on_training_step_batch_end(
        self, model: ImaginaireModel, data_batch: Any, output_batch: Any, loss: torch.Tensor, iteration: int = 0
    ) -> None:
        self.losses.append(loss.item())


def test_hooks_see_the_undivided_loss(tmp_path: Path) -> None:
    model = TinyModel()
    data = TinyBatches()
    with torch.no_grad():
        expected = [model.training_step(data.batch(index, rank=0), 0)[1].item() for index in range(2)]
    LossOfHooks.losses.clear()
    callbacks = f"trainer.callbacks={{losses: {{_target_: {__name__}.LossOfHooks}}}}"
    train(tmp_path, "trainer.max_iter=1", callbacks, model=model, data=data)
    assert LossOfHooks.losses == pytest.approx([expected[0], expected[0], expected[1], expected[1]], rel=1e-6)


def test_no_batch_too_many_is_fetched(tmp_path: Path) -> None:
    data = TinyBatches()
    train(tmp_path, "trainer.max_iter=3", data=data)
    assert data.fetched == 6


def test_window_goes_on_when_the_loader_ends_in_it(tmp_path: Path) -> None:
    data = TinyBatches(length=3)
    trainer = train(tmp_path, "trainer.max_iter=3", data=data)
    assert (data.fetched, trainer.progress.micro_batches) == (6, 6)


def test_resume_skips_what_was_consumed_though_the_accumulation_changed(tmp_path: Path) -> None:
    train(tmp_path, "trainer.max_iter=2", "trainer.grad_accum_iter=3")
    data = TinyBatches()
    trainer = train(tmp_path, "trainer.max_iter=4", "trainer.grad_accum_iter=1", data=data)
    assert (data.start, data.fetched, trainer.progress.micro_batches) == (6, 2, 8)


def test_run_that_is_already_done_trains_and_saves_nothing(tmp_path: Path) -> None:
    train(tmp_path)
    latest = tmp_path / "checkpoints" / "iter_000000002" / ".metadata"
    written = latest.stat().st_mtime_ns
    data = TinyBatches()
    train(tmp_path, data=data)
    assert data.fetched == 0
    assert latest.stat().st_mtime_ns == written


def test_empty_loader_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dataloader_train gave no micro-batch"):
        train(tmp_path, data=[])


def test_validation_without_a_loader_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trainer.run_validation=true needs a dataloader_val"):
        train(tmp_path, "trainer.run_validation=true")


class Failing(TinyBatches):
    """Raises in the second window."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def batch(self, index: int, rank: int) -> dict[str, Any]:
        if index == 3:
            raise self.error
        return super().batch(index, rank)


@pytest.mark.parametrize("error", [RuntimeError("from the loader"), KeyboardInterrupt()])
def test_exceptions_come_out_unchanged_and_leave_no_alarm(tmp_path: Path, error: BaseException) -> None:
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(type(error)) as raised:
        train(tmp_path, data=Failing(error))
    assert raised.value is error
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.alarm(0) == 0


class Hanging(TinyBatches):
    def batch(self, index: int, rank: int) -> dict[str, Any]:
        time.sleep(10)
        return super().batch(index, rank)


def test_window_that_takes_too_long_ends_in_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="trainer.timeout_period=1 s"):
        train(tmp_path, "trainer.timeout_period=1", data=Hanging())


def test_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    states = []
    for name in ("first", "second"):
        trainer = ImaginaireTrainer(tiny_config(tmp_path / name, "trainer.seed=7"))
        model = TinyModel()
        trainer.train(model, TinyBatches(), None)
        states.append(full_tensors(model))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_config_and_process_group_are_left_in_order(tmp_path: Path) -> None:
    train(tmp_path)
    assert (tmp_path / "config.yaml").exists()
    assert not torch.distributed.is_initialized()
