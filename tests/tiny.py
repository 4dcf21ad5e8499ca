# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""A model small enough for tests, with a head a domain, its data, and a configuration that trains it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.distributed.tensor import DTensor

from cosmos_framework.model._base import ImaginaireModel
from cosmos_framework.utils import distributed

DOMAINS = ("left", "right")


class TinyNetwork(torch.nn.Module):
    """Two blocks, and a head for each domain in the group of the network itself."""

    blocks: torch.nn.ModuleList
    heads: torch.nn.ModuleDict

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 6)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.heads = torch.nn.ModuleDict({domain: torch.nn.Linear(6, 3) for domain in DOMAINS})

    def forward(self, x: torch.Tensor, domain: str) -> torch.Tensor:
        x = self.embed(x)  # (B, 6)
        for block in self.blocks:
            x = torch.tanh(block(x))  # (B, 6)
        return self.heads[domain](x)  # (B, 3)


class TinyModel(ImaginaireModel):
    """Regression with the head of the micro-batch's domain."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyNetwork()
        self.register_buffer("scale", torch.tensor(2.0))

    def training_step(self, data: dict[str, Any], iteration: int) -> tuple[dict[str, Any], torch.Tensor]:
        prediction = self.net(data["x"], data["domain"])
        loss = torch.nn.functional.mse_loss(prediction.to(data["y"].dtype), self.scale * data["y"])
        return {"prediction": prediction}, loss

    validation_step = training_step


class TinyBatches:
    """Endless micro-batches: micro-batch i has its domain from `schedule`, samples from (i, rank)."""

    def __init__(self, schedule: str = "left right", samples: int = 2, length: int | None = None) -> None:
        self.schedule = schedule.split()
        self.samples = samples
        self.length = length
        self.start = 0
        self.fetched = 0

    def set_start_iteration(self, micro_batches: int) -> None:
        self.start = micro_batches

    def batch(self, index: int, rank: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1000 * index + rank)
        return {
            "x": torch.randn(self.samples, 4, generator=generator),
            "y": torch.randn(self.samples, 3, generator=generator),
            "domain": self.schedule[index % len(self.schedule)],
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        index = self.start
        while self.length is None or index < self.length:
            self.fetched += 1
            yield self.batch(index, distributed.get_rank())
            index += 1


def full_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns copies of the model's parameters as one process would hold them, by name; every rank calls."""
    return {name: _full(parameter) for name, parameter in model.named_parameters()}


def full_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns copies of the gradients as one process would hold them, by name; every rank calls."""
    return {
        name: None if parameter.grad is None else _full(parameter.grad) for name, parameter in model.named_parameters()
    }


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def tiny_config(folder: Path | str, *overrides: str) -> DictConfig:
    """Returns a configuration whose job's folder is `folder`, changed by "name=value" strings."""
    config = OmegaConf.create(
        {
            "job": {"project": "tests", "group": "tests", "name": "tiny", "path_local": str(folder)},
            "trainer": {
                "distributed_parallelism": "fsdp",
                "grad_accum_iter": 2,
                "fsdp_accum_mode": "all_reduce",
                "fsdp_accum_reshard": True,
                "fsdp_reduce_unused_params": False,
                "fsdp_accum_memory_gib": 0.0,
                "max_iter": 2,
                "logging_iter": 1,
                "run_validation": False,
                "validation_iter": 1,
                "max_val_iter": 2,
                "seed": 0,
                "timeout_period": 60,
                "memory_format": "preserve_format",
                "grad_scaler_args": {"enabled": False},
                "callbacks": {},
                "ddp": {"find_unused_parameters": True, "static_graph": False, "broadcast_buffers": True},
            },
            "model": {
                "parallelism": {"data_parallel_shard_degree": -1, "data_parallel_replicate_degree": 1},
                "precision": "float32",
                "fsdp_master_dtype": "float32",
            },
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01},
            "scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "gamma": 0.5},
            "checkpoint": {"save_iter": 1000, "load_path": None},
        }
    )
    config.merge_with_dotlist(list(overrides))
    return config
