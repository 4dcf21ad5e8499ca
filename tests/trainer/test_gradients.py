# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""What the optimizer gets after a window, on four ranks, against one process that computes in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_framework.callbacks.grad_clip import GradClip
from cosmos_framework.model._base import ImaginaireModel
from cosmos_framework.trainer import ImaginaireTrainer
from cosmos_framework.utils.callback import Callback
from tests.tiny import TinyBatches, TinyModel, full_gradients, full_tensors, tiny_config

RANKS = 4
WINDOWS = 2
ACCUMULATION = 3
# Heads used in turns, one not used at the boundary, one not used in the whole second window.
SCHEDULE = "left right left left left left"

LAYOUTS = {
    "ddp": ["trainer.distributed_parallelism=ddp"],
    "ddp_static_graph": [
        "trainer.distributed_parallelism=ddp",
        "trainer.ddp.static_graph=true",
        "trainer.ddp.find_unused_parameters=false",
    ],
    "fsdp": ["model.parallelism.data_parallel_replicate_degree=1"],
    "hsdp": ["model.parallelism.data_parallel_replicate_degree=2"],
    "replicate_only": ["model.parallelism.data_parallel_replicate_degree=4"],
}
MODES = ["none", "all_reduce", "grad_sync"]
QUICK = ("ddp", "ddp_static_graph", "hsdp")

WINDOWS_SEEN: list[dict[str, torch.Tensor | None]] = []


class GradientsOfWindows(Callback):
    """Keeps each window's gradients as the optimizer gets them."""

    def on_train_start(self, model: ImaginaireModel, iteration: int = 0) -> None:
        WINDOWS_SEEN.clear()

    def on_before_optimizer_step(
        self,
        model: ImaginaireModel,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        grad_scaler: torch.amp.GradScaler,
        iteration: int = 0,
    ) -> None:
        WINDOWS_SEEN.append(full_gradients(model))


def schedule_of(layout: str) -> str:
    """A static graph is one that uses the same parameters each time."""
    return "left" if layout == "ddp_static_graph" else SCHEDULE


def train(folder: Path, layout: str, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = TinyModel()
    if layout == "ddp_static_graph":
        del model.net.heads["right"]
    trainer = ImaginaireTrainer(
        tiny_config(
            folder,
            *LAYOUTS[layout],
            f"trainer.max_iter={WINDOWS}",
            f"trainer.grad_accum_iter={ACCUMULATION}",
            "optimizer={_target_: torch.optim.SGD, lr: 0.1}",
            f"trainer.callbacks={{gradients: {{_target_: {__name__}.GradientsOfWindows}}}}",
            *overrides,
        )
    )
    trainer.train(model, TinyBatches(schedule_of(layout)), None)
    return list(WINDOWS_SEEN), full_tensors(model)


def reference(layout: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Does the same windows on one process, in float64, with no accumulation code at all: one loss a window."""
    torch.manual_seed(0)
    model = TinyModel()
    if layout == "ddp_static_graph":
        del model.net.heads["right"]
    model.double()
    data = TinyBatches(schedule_of(layout))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    windows = []
    for window in range(WINDOWS):
        losses = []
        for index in range(window * ACCUMULATION, (window + 1) * ACCUMULATION):
            for rank in range(RANKS):
                batch = data.batch(index, rank)
                batch |= {"x": batch["x"].double(), "y": batch["y"].double()}
                losses.append(model.training_step(batch, 0)[1])
        optimizer.zero_grad(set_to_none=True)
        torch.stack(losses).mean().backward()
        windows.append(full_gradients(model))
        optimizer.step()
        scheduler.step()
    return windows, full_tensors(model)


class Trained:
    """What each way of accumulating gave under one layout, and what it should have given."""

    def __init__(self, rank_pool: Any, folder: Path, layout: str) -> None:
        self.layout = layout
        self.windows, self.parameters = reference(layout)
        ways = {f"{mode} {reshard}": (mode, reshard) for mode in MODES for reshard in (True, False)}
        cases = {
            name: (folder / name, layout, f"trainer.fsdp_accum_mode={mode}", f"trainer.fsdp_accum_reshard={reshard}")
            for name, (mode, reshard) in ways.items()
        }
        self.by_rank = rank_pool.run_cases(train, cases)


@pytest.fixture(
    scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def trained(request: pytest.FixtureRequest, rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(rank_pool, tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("mode", MODES)
def test_windows_equal_one_process_in_float64(trained: Trained, mode: str, reshard: bool) -> None:
    for windows, parameters in trained.by_rank[f"{mode} {reshard}"]:
        for gradients, expected in zip(windows, trained.windows, strict=True):
            for name in expected:
                assert_equal_gradient(gradients[name], expected[name], name, trained.layout)
        for name, value in trained.parameters.items():
            torch.testing.assert_close(parameters[name].double(), value, rtol=1e-5, atol=1e-7, msg=name)


def assert_equal_gradient(found: Any, expected: Any, name: str, layout: str) -> None:
    if expected is None:
        assert found is None, name
    else:
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7, msg=f"{name} under {layout}")


def clipped(folder: Path, layout: str) -> tuple[float, float]:
    """Returns the norm that GradClip reports and the norm that the optimizer then gets."""
    norms = []

    class Probe(ImaginaireTrainer):
        def _optimizer_step(self, model: ImaginaireModel, *args: Any, **kwargs: Any) -> None:
            left = [gradient for gradient in full_gradients(model).values() if gradient is not None]
            norms.append((self.metrics["grad_norm"], torch.nn.utils.get_total_norm(left).item()))
            super()._optimizer_step(model, *args, **kwargs)

    torch.manual_seed(0)
    clip = f"{GradClip.__module__}.GradClip"
    overrides = [
        *LAYOUTS[layout],
        "trainer.max_iter=1",
        f"trainer.callbacks={{clip: {{_target_: {clip}, clip_norm: 0.1}}}}",
    ]
    Probe(tiny_config(folder, *overrides)).train(TinyModel(), TinyBatches(), None)
    return norms[0]


def test_clipping_uses_the_true_global_norm(rank_pool: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = TinyModel().double(), TinyBatches()
    for index in range(2):
        for rank in range(RANKS):
            batch = data.batch(index, rank)
            batch |= {"x": batch["x"].double(), "y": batch["y"].double()}
            (model.training_step(batch, 0)[1] / (2 * RANKS)).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    cases = {layout: (tmp_path / layout, layout) for layout in ("ddp", "fsdp", "hsdp", "replicate_only")}
    for layout, norms in rank_pool.run_cases(clipped, cases).items():
        for before, after in norms:
            assert before == pytest.approx(expected, rel=1e-5), layout
            assert after == pytest.approx(0.1, rel=1e-4), layout
