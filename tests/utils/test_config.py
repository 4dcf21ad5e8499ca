# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

import cosmos_framework.scripts.train  # noqa: F401  The recipes' dataclasses are stored there.
from cosmos_framework.utils import config as config_module
from cosmos_framework.utils.config import Config, ConfigError, check_config, config_choices, load_config

FOLDER = tempfile.gettempdir()
# Whatever the recipe trains, these tests do not build it.
RUNNABLE = [
    f"dataset.root={FOLDER}",
    "trainer.run_validation=false",
    "model._target_=builtins.dict",
    "dataloader_train._target_=builtins.list",
]


def load_and_check(*overrides: str, world_size: int = 4) -> DictConfig:
    config = load_config([*RUNNABLE, *overrides])
    check_config(config, world_size)
    return config


def message(*overrides: str, world_size: int = 4) -> str:
    with pytest.raises(ConfigError) as caught:
        load_and_check(*overrides, world_size=world_size)
    text = str(caught.value)
    assert "\n" not in text and text
    return text


@functools.cache
def runnable_config() -> DictConfig:
    return load_and_check()


def message_of_value(field: str, value: object) -> str:
    """Returns the error for one value, without the time that composing takes."""
    config = copy.deepcopy(runnable_config())
    OmegaConf.update(config, field, value)
    with pytest.raises(ConfigError) as caught:
        check_config(config, world_size=4)
    return str(caught.value)


def structured_nodes(config: DictConfig) -> dict[str, Any]:
    return {name: OmegaConf.get_type(node) for name, node in config_module._structured_nodes(config)}


def test_the_command_of_the_readme() -> None:
    config = load_and_check(
        "recipe=action_policy", "parallelism=hsdp", "trainer.grad_accum_iter=4", "trainer.fsdp_accum_mode=grad_sync"
    )
    assert config.trainer.distributed_parallelism == "fsdp"
    assert config.trainer.grad_accum_iter == 4
    assert config.trainer.fsdp_accum_mode == "grad_sync"
    assert config.model.parallelism == {"data_parallel_shard_degree": -1, "data_parallel_replicate_degree": 2}


def test_defaults_that_upstream_has() -> None:
    trainer = OmegaConf.structured(Config).trainer
    assert trainer.ddp == {"find_unused_parameters": False, "static_graph": True, "broadcast_buffers": True}
    assert (trainer.fsdp_accum_mode, trainer.fsdp_accum_reshard, trainer.fsdp_reduce_unused_params) == (
        "all_reduce",
        True,
        False,
    )


@pytest.mark.parametrize(
    "group, choice", [(group, name) for group, names in config_choices().items() for name in names]
)
def test_every_choice_runs(group: str, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    load_and_check(f"{group}={choice}")


def test_replicate_makes_one_copy_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    config = load_and_check("parallelism=replicate", world_size=6)
    assert config.model.parallelism == {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 6}


def test_every_field_is_documented() -> None:
    for name, kind in structured_nodes(load_and_check()).items():
        attributes = (kind.__doc__ or "").partition("Attributes:")[2]
        own = [entry.name for entry in dataclasses.fields(kind) if entry.name in vars(kind).get("__annotations__", {})]
        for field in own:
            if field != "_target_" or kind.__mro__[1] is object:
                assert f"\n        {field}: " in attributes, f"{name}.{field} of {kind.__name__}"


def test_ddp_of_the_recipe_expects_heads_without_gradients() -> None:
    ddp = load_and_check("recipe=action_policy", "parallelism=ddp").trainer.ddp
    assert (ddp.find_unused_parameters, ddp.static_graph) == (True, False)


def test_callbacks_count_before_they_clip() -> None:
    names = list(load_and_check().trainer.callbacks)
    assert names.index("comm_ledger") < names.index("grad_clip")


def test_job_folder_is_below_the_output_root(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["job.project=p", "job.group=g", "job.name=n"]
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", "/somewhere")
    assert load_config([*RUNNABLE, *names]).job.path_local == "/somewhere/p/g/n"
    monkeypatch.delenv("IMAGINAIRE_OUTPUT_ROOT")
    assert load_config([*RUNNABLE, *names]).job.path_local == "outputs/p/g/n"


def test_nothing_is_left_to_resolve() -> None:
    config = load_and_check("trainer.max_iter=7", "scheduler=warmup_cosine")
    assert "${" not in OmegaConf.to_yaml(config)
    assert config.scheduler.max_iter == 7


def test_none_is_a_mode_and_stays_text(tmp_path: Path) -> None:
    config = load_and_check("trainer.fsdp_accum_mode=none")
    assert config.trainer.fsdp_accum_mode == "none"
    OmegaConf.save(config, tmp_path / "config.yaml")
    assert OmegaConf.load(tmp_path / "config.yaml").trainer.fsdp_accum_mode == "none"


@pytest.mark.parametrize("value", ["null", "false", "off", "NONE", "reduce_scatter", "0", "''"])
def test_accum_mode(value: str) -> None:
    text = message(f"trainer.fsdp_accum_mode={value}")
    assert "trainer.fsdp_accum_mode" in text and value.strip("'").lower() in text.lower()
    assert "all_reduce, grad_sync, none, auto" in text


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["trainer.fsdp_accum_memory_gib=-1"], "trainer.fsdp_accum_memory_gib=-1.0 must be a number of at least 0"),
        (["trainer.fsdp_accum_memory_gib=nan"], "must be a number of at least 0"),
        (["trainer.fsdp_accum_memory_gib=2"], "set fsdp_accum_mode='auto'"),
        (["trainer.fsdp_accum_mode=auto", "trainer.fsdp_accum_reshard=false"], "leave it at True"),
    ],
)
def test_memory_budget_goes_with_mode_auto(overrides: list[str], expected: str) -> None:
    assert expected in message(*overrides)


def test_a_memory_budget_may_be_infinite() -> None:
    config = load_and_check("trainer.fsdp_accum_mode=auto", "trainer.fsdp_accum_memory_gib=inf")
    assert config.trainer.fsdp_accum_memory_gib == float("inf")


@pytest.mark.parametrize(
    "override, choices",
    [
        ("trainer.distributed_parallelism=tp", "ddp, fsdp"),
        ("model.precision=float8", "float32, bfloat16, float16, float64"),
        ("model.fsdp_master_dtype=int8", "float32, bfloat16, float16, float64"),
        ("trainer.memory_format=nhwc", "preserve_format, contiguous_format, channels_last, channels_last_3d"),
        ("job.wandb_mode=maybe", "online, offline, disabled"),
        ("recipe=unknown", "action_policy"),
        ("parallelism=unknown", "ddp, fsdp, hsdp, replicate"),
        ("parallelism=sub/unknown", "ddp, fsdp, hsdp, replicate"),
        ("optimizer=unknown", "adamw"),
        ("scheduler=unknown", "constant, warmup_cosine"),
    ],
)
def test_choices_are_listed(override: str, choices: str) -> None:
    text = message(override)
    assert override in text and choices in text


COUNTS = [
    "trainer.grad_accum_iter",
    "trainer.max_iter",
    "trainer.logging_iter",
    "trainer.validation_iter",
    "trainer.max_val_iter",
    "trainer.timeout_period",
    "checkpoint.save_iter",
]


@given(field=st.sampled_from(COUNTS), value=st.integers(max_value=0))
def test_counts_are_positive(field: str, value: int) -> None:
    assert f"{field}={value} must be a whole number" in message_of_value(field, value)


@pytest.mark.parametrize("value", ["1.5", "2.0", "nan", "true", "many", "[1]", "{a: 1}", "1e3", "''"])
def test_counts_are_whole(value: str) -> None:
    field = COUNTS[len(value) % len(COUNTS)]
    assert f"{field}={value} must be a whole number" in message(f"{field}={value}")


@given(replicate=st.integers(-3, 9), shard=st.integers(-3, 9), world_size=st.integers(1, 8))
def test_degrees_fit_the_ranks_or_are_refused(replicate: int, shard: int, world_size: int) -> None:
    config = copy.deepcopy(runnable_config())
    config.trainer.distributed_parallelism = "fsdp"
    config.model.parallelism.data_parallel_replicate_degree = replicate
    config.model.parallelism.data_parallel_shard_degree = shard
    fits = replicate >= 1 and (replicate * shard == world_size or (shard == -1 and world_size % replicate == 0))
    if fits:
        check_config(config, world_size)
    else:
        with pytest.raises(ConfigError, match=r"model\.parallelism\.data_parallel_(shard|replicate)_degree=-?\d+"):
            check_config(config, world_size)


@given(lr=st.floats().filter(lambda lr: not 0 < lr < float("inf")))
def test_learning_rate_is_positive_and_finite(lr: float) -> None:
    assert f"optimizer.lr={lr} must be a finite number above 0" in message_of_value("optimizer.lr", lr)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lr=st.floats(1e-12, 1e6), name=st.from_regex(r"\A[a-z0-9_][a-z0-9_.-]*\Z"))
def test_good_values_arrive_as_they_are(seed: int, lr: float, name: str) -> None:
    config = load_and_check(f"trainer.seed={seed}", f"optimizer.lr={lr!r}", f"job.name='{name}'")
    assert (config.trainer.seed, config.optimizer.lr, config.job.name) == (seed, lr, name)


@pytest.mark.parametrize("name", ["''", "..", ".", "a/b", "'a b'"])
def test_names_are_folder_names(name: str) -> None:
    assert "job.name=" in message(f"job.name={name}")


@pytest.mark.parametrize(
    "override, expected",
    [
        ("trainer.fsdp_acum_mode=none", "did you mean trainer.fsdp_accum_mode?"),
        ("+trainer.fsdp_acum_mode=none", "did you mean trainer.fsdp_accum_mode?"),
        ("grad_accum_iter=4", "did you mean trainer.grad_accum_iter?"),
        ("rcipe=action_policy", "did you mean recipe?"),
        ("trainer.callbacks.grad_clip.clip_nrm=1", "did you mean trainer.callbacks.grad_clip.clip_norm?"),
        ("optimizer.momentum=0.9", "choose from optimizer._target_, optimizer.lr, optimizer.betas"),
        ("+colour=red", "choose from job, trainer, model"),
        ("hydra.x=1", "choose from job, trainer, model"),
        ("dataset={root: ., bar: 1}", "dataset.bar"),
    ],
)
def test_unknown_fields(override: str, expected: str) -> None:
    text = message(override)
    assert "does not exist" in text and expected in text


@pytest.mark.parametrize(
    "override, expected",
    [
        ("trainer.run_validation=maybe", "trainer.run_validation=maybe must be true or false"),
        ("trainer.seed=null", "trainer.seed=null must be a whole number from 0 to 4294967295"),
        ("optimizer.betas=[0.9,a]", "optimizer.betas=[0.9,a] must be two numbers from 0 to below 1"),
        ("optimizer.betas=[0.9]", "must be two numbers from 0 to below 1"),
        ("trainer=3", "trainer=3"),
        ("trainer.max_iter.x=1", "trainer.max_iter"),
        ("~trainer.max_iter", "trainer.max_iter"),
        ("trainer.max_iter=${no.such}", "trainer.max_iter=${no.such}"),
        ("trainer.max_iter=${trainer.memory_format}", "trainer.max_iter=${trainer.memory_format}"),
        ("trainer.max_iter", "trainer.max_iter"),
        ("trainer.max_iter=[1", "[1"),
        ("trainer.max_iter=1,2", "trainer.max_iter=1,2"),
        ("dataset.root=/no/such", "dataset.root=/no/such must be an existing folder"),
        ("dataset.root=???", "dataset.root is not set"),
        ("checkpoint.load_path=/no/such", "checkpoint.load_path=/no/such must be an existing folder"),
        ("+trainer.grad_scaler_args.scale=2", "choose from enabled, init_scale"),
    ],
)
def test_other_values(override: str, expected: str) -> None:
    assert expected in message(override)


def test_data_set_folder_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demos").mkdir()
    monkeypatch.chdir(tmp_path)
    assert os.path.samefile(load_and_check("dataset.root=demos").dataset.root, tmp_path / "demos")


@pytest.mark.parametrize(
    "override, expected",
    [
        ("trainer.callbacks.grad_clip=3", "must be null, or have a _target_"),
        ("+trainer.callbacks.mine._target_=no.such.Callback", "trainer.callbacks.mine._target_=no.such.Callback"),
        ("+trainer.callbacks.grad_clip.nrm=1", "unexpected keyword argument 'nrm'"),
    ],
)
def test_callbacks_that_cannot_be_built(override: str, expected: str) -> None:
    assert expected in message(override)


@pytest.mark.parametrize("override", ["model._target_=no.such.Model", "optimizer._target_=torch.optim.AdamV"])
def test_targets_can_be_imported(override: str) -> None:
    assert f"{override} cannot be imported" in message(override)


def test_a_callback_may_be_left_out() -> None:
    assert load_and_check("trainer.callbacks.grad_clip=null").trainer.callbacks.grad_clip is None


def test_validation_needs_a_loader() -> None:
    assert "dataloader_val" in message("trainer.run_validation=true", "dataloader_val=null")


def test_ddp_does_not_shard() -> None:
    text = message("parallelism=hsdp", "trainer.distributed_parallelism=ddp")
    assert "trainer.distributed_parallelism=fsdp" in text and "parallelism=ddp" in text


def test_ddp_computes_in_what_autocast_gives() -> None:
    assert "model.fsdp_master_dtype=float64" in message("parallelism=ddp", "model.precision=float64")
    load_and_check("parallelism=ddp", "model.precision=bfloat16")
