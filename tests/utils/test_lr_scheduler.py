# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmos_framework.utils.lr_scheduler import warmup_cosine


def learning_rates(steps: int, **arguments: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = warmup_cosine(optimizer, **arguments)  # type: ignore[arg-type]
    rates = []
    for _ in range(steps):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates


def test_warm_up_then_half_a_cosine() -> None:
    rates = learning_rates(9, warmup_iter=2, max_iter=6, min_factor=0.1)
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(5)]
    assert rates == pytest.approx([2 * factor for factor in [0.5, 1.0, *cosine, 0.1, 0.1]])


@given(warmup_iter=st.integers(0, 20), max_iter=st.integers(1, 20), min_factor=st.floats(0, 1))
def test_stays_between_its_ends(warmup_iter: int, max_iter: int, min_factor: float) -> None:
    rates = learning_rates(25, warmup_iter=warmup_iter, max_iter=max_iter, min_factor=min_factor)
    assert all(0 <= rate <= 2.0 for rate in rates)
    assert all(rate >= 2.0 * min_factor - 1e-9 for rate in rates[warmup_iter:])
