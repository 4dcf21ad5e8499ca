# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""A policy that turns a history of robot states and a task into a chunk of actions, by flow matching.

Sources: flow matching, Lipman et al. 2023 (arXiv:2210.02747); an action expert trained that way, Black et al. 2024
(pi0, arXiv:2410.24164); action chunks, Zhao et al. 2023 (arXiv:2304.13705); the transformer, Vaswani et al. 2017.

Shapes below: B samples, H states of S numbers, T actions of A numbers, D the width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosmos_framework.data.action_chunks import ActionChunkDatasetConfig
from cosmos_framework.model._base import ImaginaireModel
from cosmos_framework.utils.config import ModelConfig, values, within

SMALLEST_STD = 1e-3
VALIDATION_SEED = 0


@dataclass
class ActionPolicyConfig(ModelConfig):
    """The policy's size.

    Attributes:
        depth: Number of transformer blocks.
        heads: Attention heads of a block.
        head_width: Numbers of a token that each head attends with; a token has `heads` times as many.
    """

    _target_: str = "cosmos_framework.model.action_policy.build_action_policy"
    depth: int = within(1, default=3)
    heads: int = within(1, default=4)
    head_width: int = field(default=24, metadata=values("an even number above 0", lambda n: n > 0 and n % 2 == 0))


class Block(nn.Module):
    """A pre-norm transformer block, tokens (B, N, D) to tokens (B, N, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Mixes the tokens among each other, then each by itself."""
        tokens = tokens + self._attend(self.attention_norm(tokens))
        return tokens + self.mlp(self.mlp_norm(tokens))

    def _attend(self, tokens: Tensor) -> Tensor:
        qkv = self.qkv(tokens).unflatten(-1, (3, self.heads, -1))  # (B, N, 3, heads, D / heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, N, D / heads)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


class ActionPolicyNet(nn.Module):
    """Predicts the velocity of noisy actions; each domain has input and output heads of its own.

    A micro-batch runs the heads of its domain alone: the others get no gradient in that micro-step.
    """

    def __init__(
        self,
        state_size: int,
        action_size: int,
        history: int,
        chunk: int,
        domains: int,
        tasks: int,
        config: ActionPolicyConfig,
    ) -> None:
        super().__init__()
        width = config.heads * config.head_width
        self.state_in = nn.ModuleList(nn.Linear(state_size, width) for _ in range(domains))
        self.action_in = nn.ModuleList(nn.Linear(action_size, width) for _ in range(domains))
        self.action_out = nn.ModuleList(nn.Linear(width, action_size) for _ in range(domains))
        self.task = nn.Embedding(tasks, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.place = nn.Parameter(0.02 * torch.randn(history + 1 + chunk, width))
        self.blocks = nn.ModuleList(Block(width, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, state: Tensor, noisy_action: Tensor, time: Tensor, task_index: Tensor, domain: int) -> Tensor:
        """Predicts velocities.

        Args:
            state: normalised, (B, H, S).
            noisy_action: normalised, (B, T, A).
            time: features of the time of the flow, see `time_features`, (B, D).
            task_index: (B,).
            domain: of the whole micro-batch.

        Returns:
            Velocities (B, T, A).
        """
        states = self.state_in[domain](state)  # (B, H, D)
        task = self.task(task_index)[:, None]  # (B, 1, D)
        actions = self.action_in[domain](noisy_action) + self.time(time)[:, None]  # (B, T, D)
        tokens = torch.cat([states, task, actions], dim=1) + self.place
        for block in self.blocks:
            tokens = block(tokens)
        velocity = self.action_out[domain](self.norm(tokens[:, -actions.shape[1] :]))
        # FSDP2 puts its hook on the output, which must not be a view for that.
        return velocity.clone()


class ActionPolicyModel(ImaginaireModel):
    """The policy with its normalisation, its training and its sampling."""

    state_mean: Tensor
    state_std: Tensor
    action_mean: Tensor
    action_std: Tensor

    def __init__(self, net: ActionPolicyNet, stats: dict[str, dict[str, Any]]) -> None:
        """Keeps the data set's statistics as buffers.

        Args:
            net: the network.
            stats: {"observation.state" | "action": {"mean" | "std": (size,)}}.
        """
        super().__init__()
        self.net = net
        for name, key in (("state", "observation.state"), ("action", "action")):
            self.register_buffer(f"{name}_mean", torch.as_tensor(stats[key]["mean"]).clone())
            # A number that never changed in the data set must not be blown up when it does.
            self.register_buffer(f"{name}_std", torch.as_tensor(stats[key]["std"]).clamp(min=SMALLEST_STD))

    def fsdp_modules(self) -> Iterator[nn.Module]:
        """Names the blocks, then the network: its embeddings and all heads are one FSDP group."""
        yield from self.net.blocks
        yield self.net

    def training_step(self, data: dict[str, Any], iteration: int) -> tuple[dict[str, Any], Tensor]:
        """Computes the flow-matching loss of a micro-batch.

        Args:
            data: see `ActionChunks.batch`.
            iteration: optimizer steps done so far; without effect.

        Returns:
            What was predicted, and the mean squared error of the velocity over the actions that are not padding.
        """
        return self._step(data, generator=None)

    def validation_step(self, data: dict[str, Any], iteration: int) -> tuple[dict[str, Any], Tensor]:
        """Computes the loss with the same noise each time, so that validations can be compared."""
        device = data["action"].device
        return self._step(data, generator=torch.Generator(device).manual_seed(VALIDATION_SEED))

    def _step(self, data: dict[str, Any], generator: torch.Generator | None) -> tuple[dict[str, Any], Tensor]:
        action = (data["action"] - self.action_mean) / self.action_std  # (B, T, A)
        noise = torch.randn(action.shape, generator=generator, device=action.device)
        time = torch.rand(len(action), generator=generator, device=action.device)  # (B,)
        noisy = torch.lerp(noise, action, time[:, None, None])
        velocity = self.net(
            self._normalised_state(data), noisy, self._features(time), data["task_index"], data["domain"]
        ).float()
        error = (velocity - (action - noise)).square().mean(-1)  # (B, T)
        is_real = ~data["action_is_pad"]
        return {"velocity": velocity}, (error * is_real).sum() / is_real.sum()

    @torch.no_grad()
    def sample_actions(self, data: dict[str, Any], steps: int = 10) -> Tensor:
        """Draws a chunk of actions by integrating the flow with Euler's method.

        Args:
            data: `observation.state` (B, H, S), `task_index` (B,) and `domain`.
            steps: of the integration.

        Returns:
            Actions in the data set's units, (B, T, A).
        """
        state = self._normalised_state(data)
        chunk = self.net.place.shape[0] - state.shape[1] - 1
        action = torch.randn(len(state), chunk, len(self.action_mean), device=state.device)
        for step in range(steps):
            time = torch.full((len(state),), step / steps, device=state.device)
            action = (
                action
                + self.net(state, action, self._features(time), data["task_index"], data["domain"]).float() / steps
            )
        return action * self.action_std + self.action_mean

    def _features(self, time: Tensor) -> Tensor:
        # Not inside the network, whose inputs FSDP2 may cast to 16 bit: too coarse for the fast sines.
        return time_features(time, self.net.place.shape[-1])

    def _normalised_state(self, data: dict[str, Any]) -> Tensor:
        return (data["observation.state"] - self.state_mean) / self.state_std


def build_action_policy(config: ActionPolicyConfig, dataset: ActionChunkDatasetConfig) -> ActionPolicyModel:
    """Builds the policy that fits a data set.

    Args:
        config: its size.
        dataset: gives the sizes, the domains, the tasks and the statistics.

    Raises:
        DatasetError: the data set cannot be used.
    """
    from cosmos_framework.data.lerobot import read_dataset

    data = read_dataset(dataset.root)
    net = ActionPolicyNet(
        state_size=data.state.shape[1],
        action_size=data.action.shape[1],
        history=dataset.history,
        chunk=dataset.chunk,
        domains=len(data.domains),
        tasks=len(data.tasks),
        config=config,
    )
    return ActionPolicyModel(net, data.stats)


def time_features(time: Tensor, width: int) -> Tensor:
    """Returns sines and cosines of times of the flow, which is noise at 0 and the action at 1; (B,) to (B, width)."""
    rates = torch.exp(torch.linspace(0, math.log(1000), width // 2, device=time.device))
    angles = time[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
