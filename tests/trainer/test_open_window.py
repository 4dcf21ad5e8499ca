# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""What the trainer refuses, and what it drops, while gradients are held back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cosmos_framework.callbacks.grad_clip import GradClip
from cosmos_framework.model._base import ImaginaireModel
from cosmos_framework.trainer import ImaginaireTrainer
from cosmos_framework.utils.callback import Callback
from cosmos_framework.utils.grad_sync import HeldBackGradientError
from tests.tiny import TinyBatches, TinyModel, full_gradients, tiny_config

LAYOUTS = {
    "ddp": ["trainer.distributed_parallelism=ddp"],
    "fsdp_grad_sync": ["trainer.fsdp_accum_mode=grad_sync"],
    "hsdp_all_reduce": ["model.parallelism.data_parallel_replicate_degree=2"],
    "hsdp_grad_sync": ["model.parallelism.data_parallel_replicate_degree=2", "trainer.fsdp_accum_mode=grad_sync"],
}
ACTIONS = {"_optimizer_step": "an optimizer step", "clip": "gradient clipping", "save": "a checkpoint"}


WINDOWS_SEEN: list[dict[str, torch.Tensor | None]] = []


class ActsInMidWindow(Callback):
    """After the first micro-step does what only a complete window allows, or drops the window."""

    def __init__(self, action: str) -> None:
        self._action = action
        self._micro_steps = 0

    def on_training_step_batch_end(
        self, model: ImaginaireModel, data_batch: Any, output_batch: Any, loss: torch.Tensor, iteration: int = 0
    ) -> None:
        self._micro_steps += 1
        if self._micro_steps > 1:
            return
        assert isinstance(model, TinyModel)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        if self._action == "_optimizer_step":
            self.trainer._optimizer_step(model, optimizer, scheduler, scaler, iteration)
        elif self._action == "clip":
            GradClip().on_before_optimizer_step(model, optimizer, scheduler, scaler, iteration)
        elif self._action == "save":
            self.trainer.checkpointer.save(model, optimizer, scheduler, scaler, iteration)
        elif self._action == "_zero_grad":
            self.trainer._zero_grad(model, optimizer, iteration)

    def on_before_optimizer_step(self, model: ImaginaireModel, *args: Any, **kwargs: Any) -> None:
        WINDOWS_SEEN.append(full_gradients(model))


def train(folder: Path, layout: str, action: str) -> str | list[dict[str, torch.Tensor | None]]:
    """Returns the message of the HeldBackGradientError, or the gradients of the windows."""
    acts = f"trainer.callbacks={{acts: {{_target_: {__name__}.ActsInMidWindow, action: {action}}}}}"
    torch.manual_seed(0)
    trainer = ImaginaireTrainer(tiny_config(folder, *LAYOUTS[layout], "trainer.max_iter=1", acts))
    WINDOWS_SEEN.clear()
    try:
        trainer.train(TinyModel(), TinyBatches("left"), None)
    except HeldBackGradientError as error:
        return str(error)
    return list(WINDOWS_SEEN)


class Ends(NamedTuple):
    """What `train` returned under one layout, by action and rank, and the folder that has one for each action."""

    by_action: dict[str, list[Any]]
    folder: Path


@pytest.fixture(scope="module", params=LAYOUTS)
def ends(request: pytest.FixtureRequest, rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    folder = tmp_path_factory.mktemp(request.param)
    cases = {action: (folder / action, request.param, action) for action in [*ACTIONS, "_zero_grad"]}
    return Ends(rank_pool.run_cases(train, cases), folder)


@pytest.mark.parametrize("action", ACTIONS)
def test_what_needs_all_gradients_is_refused(ends: Ends, action: str) -> None:
    for message in ends.by_action[action]:
        assert message.startswith(f"{ACTIONS[action]} in mid-window would miss the gradients of ")
        assert "net.embed.weight" in message
    assert not (ends.folder / action / "checkpoints").exists()


def test_zeroing_gradients_drops_what_is_held_back(ends: Ends) -> None:
    torch.manual_seed(0)
    model, data = TinyModel(), TinyBatches("left")
    for rank in range(4):
        (model.training_step(data.batch(1, rank), 0)[1] / (2 * 4)).backward()
    for (gradients,) in ends.by_action["_zero_grad"]:
        for name, expected in full_gradients(model).items():
            assert (gradients[name] is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-7, msg=name)
