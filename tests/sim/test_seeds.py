# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("metaworld", reason="needs the extra `sim`")

from cosmos_framework.sim.metaworld import make_env, record_expert, reset_env

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Constant")]

TASK = "button-press-v3"
GOAL = slice(36, 39)


def test_the_seed_alone_places_objects_and_goal() -> None:
    used, fresh = make_env(TASK), make_env(TASK)
    first = reset_env(used, 1)
    used.step(np.ones(4))
    np.testing.assert_array_equal(reset_env(used, 1), first)
    np.testing.assert_array_equal(reset_env(fresh, 1), first)
    assert (reset_env(fresh, 2)[GOAL] != first[GOAL]).any()


def test_the_same_seed_records_the_same_episodes() -> None:
    first, again = (record_expert(TASK, 2, seed=5) for _ in range(2))
    for left, right in zip(first, again, strict=True):
        np.testing.assert_array_equal(left.state, right.state)
        np.testing.assert_array_equal(left.action, right.action)
    assert (first[0].state[0, GOAL] != first[1].state[0, GOAL]).any()
    assert (record_expert(TASK, 1, seed=6)[0].state[0, GOAL] != first[0].state[0, GOAL]).any()
