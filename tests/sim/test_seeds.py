# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("metaworld", reason="needs the extra `sim`")

from cosmos_framework.sim.metaworld import record_expert

pytestmark = pytest.mark.filterwarnings("ignore:Constant")

TASK = "button-press-v3"
GOAL = slice(36, 39)


def test_the_same_seed_records_the_same_episodes() -> None:
    first, again = (record_expert(TASK, 2, seed=5) for _ in range(2))
    for left, right in zip(first, again, strict=True):
        np.testing.assert_array_equal(left.state, right.state)
        np.testing.assert_array_equal(left.action, right.action)
    assert (first[0].state[0, GOAL] != first[1].state[0, GOAL]).any()
    assert (record_expert(TASK, 1, seed=6)[0].state[0, GOAL] != first[0].state[0, GOAL]).any()
