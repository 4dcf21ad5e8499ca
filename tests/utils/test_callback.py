# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""The group that calls the callbacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from cosmos_framework.utils.callback import Callback, CallBackGroup

CALLS: list[str] = []


class Named(Callback):
    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        CALLS.append(f"{self.name} {model} {iteration}")


def group_of(**callbacks: Any) -> CallBackGroup:
    config: Any = OmegaConf.create({"trainer": {"callbacks": callbacks}})
    trainer: Any = SimpleNamespace()
    return CallBackGroup(config, trainer)


def named(name: str) -> dict[str, str]:
    return {"_target_": f"{__name__}.Named", "name": name}


def test_callbacks_are_called_in_the_order_of_the_configuration() -> None:
    CALLS.clear()
    group = group_of(second=named("b"), left_out=None, first=named("a"))
    group.on_train_start("model", iteration=3)
    group.on_train_end("model", iteration=4)
    assert CALLS == ["b model 3", "a model 3"]


def test_misspelt_hook_is_an_error() -> None:
    with pytest.raises(AttributeError, match="on_train_begin"):
        group_of().on_train_begin("model")


def test_what_is_no_callback_is_named() -> None:
    with pytest.raises(TypeError, match="trainer.callbacks.counter builds a Counter, .* set its _target_"):
        group_of(counter={"_target_": "collections.Counter"})
