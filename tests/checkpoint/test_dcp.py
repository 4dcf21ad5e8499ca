# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Checkpoints: what is resumed, on which mesh, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_framework.checkpoint import optimizer_state
from cosmos_framework.checkpoint.dcp import CheckpointError, find_checkpoint, load_model
from cosmos_framework.model._base import ImaginaireModel
from cosmos_framework.trainer import ImaginaireTrainer
from cosmos_framework.utils import distributed
from cosmos_framework.utils.callback import Callback
from tests.tiny import TinyBatches, TinyModel, full_tensors, tiny_config

LAYOUTS = {
    "ddp": ["trainer.distributed_parallelism=ddp"],
    "fsdp": ["model.parallelism.data_parallel_replicate_degree=1"],
    "hsdp": ["model.parallelism.data_parallel_replicate_degree=2"],
}
# The head "right" has no optimizer state at iteration 2.
SCHEDULE = "left left left left right left left right"


class NoisyModel(TinyModel):
    """Draws random numbers in its training step."""

    def training_step(self, data: dict[str, Any], iteration: int) -> tuple[dict[str, Any], torch.Tensor]:
        return super().training_step(data | {"x": data["x"] + torch.randn_like(data["x"])}, iteration)

    def init_optimizer_scheduler(self, *configs: Any) -> tuple[Any, Any]:
        self.optimizer, scheduler = super().init_optimizer_scheduler(*configs)
        return self.optimizer, scheduler


def train(folder: Path | str, *overrides: str, model: NoisyModel | None = None) -> dict[str, Any]:
    """Trains, and returns everything that a checkpoint should hold, as one process would see it."""
    trainer = ImaginaireTrainer(tiny_config(folder, *overrides))
    model = model or NoisyModel()
    # A process group that the trainer made would be gone before the parameters are gathered.
    trainer._made_process_group = False
    trainer.train(model, TinyBatches(SCHEDULE), None)
    moments = {
        f"{name} {entry}": value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, entries in optimizer_state.collect(model, model.optimizer).items()
        for entry, value in entries.items()
    }
    return {
        "parameters": full_tensors(model),
        "moments": moments,
        "lr": model.optimizer.param_groups[0]["lr"],
        "micro_batches": trainer.progress.micro_batches,
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("layout", ["ddp", "hsdp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(rank_pool: Any, tmp_path: Path, layout: str) -> None:
    whole = rank_pool.run(train, tmp_path / "whole", *LAYOUTS[layout], "trainer.max_iter=4")
    rank_pool.run(train, tmp_path / "parts", *LAYOUTS[layout], "trainer.max_iter=2")
    parts = rank_pool.run(train, tmp_path / "parts", *LAYOUTS[layout], "trainer.max_iter=4")
    for found, expected in zip(parts, whole, strict=True):
        assert_same(found, expected)


def test_checkpoint_loads_on_other_ranks_and_meshes(rank_pool: Any, tmp_path: Path) -> None:
    saved = rank_pool.run(train, tmp_path, *LAYOUTS["hsdp"], "trainer.max_iter=2")[0]
    assert "net.heads.left.weight exp_avg" in saved["moments"]
    assert "net.heads.right.weight exp_avg" not in saved["moments"]
    for layout, ranks in (("fsdp", 4), ("ddp", 2)):
        for loaded in rank_pool.run(train, tmp_path, *LAYOUTS[layout], "trainer.max_iter=2", world_size=ranks):
            assert_same(loaded, saved)
    assert_same(train(tmp_path, "trainer.max_iter=2"), saved)
    model = TinyModel()
    assert load_model(model, tmp_path) == 2
    assert_same(full_tensors(model), saved["parameters"])


def test_load_path_starts_a_new_run_from_another_model(tmp_path: Path) -> None:
    saved = train(tmp_path / "first")
    found = train(tmp_path / "second", f"checkpoint.load_path={tmp_path / 'first'}", "trainer.max_iter=0")
    assert_same(found["parameters"], saved["parameters"])
    assert (found["moments"], found["micro_batches"]) == ({}, 0)


def test_own_checkpoint_wins_over_load_path(tmp_path: Path) -> None:
    train(tmp_path / "first")
    saved = train(tmp_path / "second")
    assert_same(train(tmp_path / "second", f"checkpoint.load_path={tmp_path / 'first'}"), saved)


def test_every_checkpoint_of_a_run_can_be_loaded(tmp_path: Path) -> None:
    train(tmp_path, "checkpoint.save_iter=1", "trainer.max_iter=3")
    folder = tmp_path / "checkpoints"
    assert [load_model(TinyModel(), folder / f"iter_{i:09}") for i in (1, 2, 3)] == [1, 2, 3]
    assert find_checkpoint(tmp_path) == find_checkpoint(folder) == folder / "iter_000000003"


class Unwritable(Callback):
    """Puts into the fourth checkpoint what cannot be written."""

    def on_save_checkpoint(self, model: ImaginaireModel, state_dict: dict[str, Any]) -> None:
        if self.trainer.progress.micro_batches == 8:
            state_dict["lock"] = threading.Lock()


def test_save_that_fails_is_not_resumed_from(tmp_path: Path) -> None:
    callbacks = f"trainer.callbacks={{unwritable: {{_target_: {__name__}.Unwritable}}}}"
    with pytest.raises(CheckpointError, match="iter_000000004 could not be written .*lock.*still names iter_000000003"):
        train(tmp_path, callbacks, "trainer.max_iter=4", "checkpoint.save_iter=1")
    assert find_checkpoint(tmp_path).name == "iter_000000003"
    assert train(tmp_path, "trainer.max_iter=4")["micro_batches"] == 8
    assert find_checkpoint(tmp_path).name == "iter_000000004"


COUNTED: list[int] = []


class Counter(Callback):
    """Keeps a tensor of its own in the checkpoint."""

    def on_train_start(self, model: ImaginaireModel, iteration: int = 0) -> None:
        COUNTED.append(int(self.count.item()))

    def on_training_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def on_save_checkpoint(self, model: ImaginaireModel, state_dict: dict[str, Any]) -> None:
        state_dict["counter"] = self.count

    on_load_checkpoint = on_save_checkpoint

    def on_load_checkpoint_start(self, model: ImaginaireModel) -> None:
        self.count = torch.zeros(())


def test_callbacks_can_keep_state_in_the_checkpoint(tmp_path: Path) -> None:
    callbacks = f"trainer.callbacks={{counter: {{_target_: {__name__}.Counter}}}}"
    COUNTED.clear()
    train(tmp_path, callbacks, "trainer.max_iter=3")
    train(tmp_path, callbacks, "trainer.max_iter=4")
    assert COUNTED == [0, 3]


def files_below(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*") if file.name != "config.yaml"}


class OtherModel(NoisyModel):
    def __init__(self) -> None:
        super().__init__()
        self.net.embed = torch.nn.Linear(4, 6, bias=False)
        self.net.blocks[0] = torch.nn.Linear(6, 6, dtype=torch.float32)
        self.net.heads["left"] = torch.nn.Linear(6, 2)
        self.net.extra = torch.nn.Linear(2, 2)


def refused(folder: Path, *overrides: str, model: NoisyModel | None = None) -> str:
    """Returns the message with which a resume is refused, and sees that it changed nothing."""
    before = files_below(folder)
    with pytest.raises(CheckpointError) as raised:
        train(folder, *overrides, "trainer.max_iter=3", model=model)
    assert files_below(folder) == before
    return str(raised.value)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    train(tmp_path, "checkpoint.save_iter=1")
    distributed.destroy_process_group()
    return tmp_path


def test_truncated_shard_is_refused(job: Path) -> None:
    shard = job / "checkpoints" / "iter_000000002" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    message = refused(job)
    assert f"{shard} is damaged" in message
    assert "Write the name of an older checkpoint into" in message


def test_missing_shard_is_refused(job: Path) -> None:
    shard = job / "checkpoints" / "iter_000000002" / "__0_0.distcp"
    shard.unlink()
    assert f"{shard} is damaged: 0 of" in refused(job)


def test_missing_checkpoint_is_refused_and_the_complete_ones_are_named(job: Path) -> None:
    (job / "checkpoints" / "iter_000000002" / ".metadata").unlink()
    message = refused(job)
    assert "latest_checkpoint.txt names iter_000000002, which is no complete checkpoint" in message
    assert message.endswith("into it: iter_000000001.")


def test_damaged_metadata_is_refused(job: Path) -> None:
    (job / "checkpoints" / "iter_000000002" / ".metadata").write_bytes(b"")
    assert ".metadata cannot be read" in refused(job)


def test_checkpoint_of_another_model_is_refused(job: Path) -> None:
    message = refused(job, model=OtherModel())
    assert "it lacks net.extra.weight" in message
    assert "it has net.embed.bias, unknown to this model" in message
    assert "net.heads.left.weight has shape (3, 6) there and (2, 6) here" in message
    assert "choose another job.name" in message


def test_checkpoint_of_another_optimizer_is_refused(job: Path) -> None:
    message = refused(job, "optimizer={_target_: torch.optim.SGD, lr: 0.1}")
    assert "it was saved with optimizer AdamW, this run has SGD" in message


class TwoGroups(NoisyModel):
    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        yield from reversed(list(super().parameters(recurse)))


def test_checkpoint_of_other_parameter_groups_is_refused(job: Path) -> None:
    assert "parameter groups hold other parameters, or in another order" in refused(job, model=TwoGroups())


def test_load_path_that_has_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in .*nowhere"):
        train(tmp_path, f"checkpoint.load_path={tmp_path / 'nowhere'}")
