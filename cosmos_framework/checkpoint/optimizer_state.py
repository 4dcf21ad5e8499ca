# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""An optimizer's state by parameter name, exactly as far as it exists.

torch's `get_optimizer_state_dict` gives a state to every parameter before it loads. A parameter that has never had a
gradient (a head whose domain was not drawn yet) has none, and a checkpoint must neither ask for one nor make one up:
Adam's step count, for one, starts with the first gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

# Wrappers that torch.compile and activation checkpointing put into names; DCP's model state leaves them out too.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def parameters_by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the model's parameters under the names that checkpoints use; a tied one under its first."""
    by_name = {}
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        by_name[name] = parameter
    return by_name


def describe(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Describes the optimizer without its state.

    Returns:
        "class": its name; "groups": its parameter groups, with names in place of parameters.
    """
    names = {parameter: name for name, parameter in parameters_by_name(model).items()}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


def difference(saved: dict[str, Any], present: dict[str, Any]) -> str | None:
    """Compares two descriptions.

    Returns:
        Why a state that was saved with the one cannot be loaded into the other, or None if it can.
    """
    if saved["class"] != present["class"]:
        return f"it was saved with optimizer {saved['class']}, this run has {present['class']}"
    saved_names = [group["params"] for group in saved["groups"]]
    present_names = [group["params"] for group in present["groups"]]
    if saved_names != present_names:
        return "its optimizer's parameter groups hold other parameters, or in another order, than this run's"
    return None


def collect(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Returns the state of each parameter that has one, by the parameter's name."""
    return {
        name: dict(optimizer.state[parameter])
        for name, parameter in parameters_by_name(model).items()
        if optimizer.state.get(parameter)
    }


def template(model: torch.nn.Module, metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Returns what DCP fills with the state that a checkpoint has under "optimizer".

    Args:
        model: Its parameters give the mesh on which state of their shape is laid out.
        metadata: The checkpoint's.
    """
    parameters = parameters_by_name(model)
    state: dict[str, dict[str, Any]] = {}
    for key, path in metadata.planner_data.items():
        if path[0] == "optimizer":
            _, name, entry = path
            saved = metadata.state_dict_metadata[key]
            state.setdefault(name, {})[entry] = (
                _empty_like_saved(saved, parameters[name]) if isinstance(saved, TensorStorageMetadata) else None
            )
    return state


def _empty_like_saved(saved: TensorStorageMetadata, parameter: torch.nn.Parameter) -> torch.Tensor:
    if saved.size == parameter.shape:
        return torch.empty_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def restore(optimizer: torch.optim.Optimizer, saved: dict[str, Any], state: dict[str, dict[str, Any]]) -> None:
    """Puts a state into the optimizer; parameters without one are left without.

    Args:
        optimizer: Of the class and the groups of `saved`.
        saved: What `describe` returned at the save.
        state: What `collect` returned there, laid out on this run's mesh.
    """
    names = [name for group in saved["groups"] for name in group["params"]]
    positions = {name: position for position, name in enumerate(names)}
    groups = [{**group, "params": [positions[name] for name in group["params"]]} for group in saved["groups"]]
    optimizer.load_state_dict(
        {"state": {positions[name]: entries for name, entries in state.items()}, "param_groups": groups}
    )
