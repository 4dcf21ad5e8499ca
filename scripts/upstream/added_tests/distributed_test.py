# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Tests that are appended to upstream's cosmos_framework/utils/distributed_test.py."""

import pytest
import torch

from cosmos_framework.utils import distributed


@pytest.mark.L0
@pytest.mark.CPU
@pytest.mark.parametrize("fsdp_accum_mode", ["all_reduce", "grad_sync", "none"])
def test_ddp_sync_grad_leaves_the_gradients_of_a_plain_module_alone(fsdp_accum_mode: str) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    x = torch.tensor([[1.0, 2.0]])  # [1,2]
    for is_boundary in (False, True):
        with distributed.ddp_sync_grad(model, is_boundary, fsdp_accum_mode=fsdp_accum_mode):
            model(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, 2 * x)


@pytest.mark.L0
@pytest.mark.CPU
def test_ddp_sync_grad_rejects_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match="fsdp_accum_mode='sometimes' is unknown"):
        distributed.ddp_sync_grad(torch.nn.Linear(2, 1), True, fsdp_accum_mode="sometimes")
