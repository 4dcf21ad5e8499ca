# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""The configuration: dataclasses that say what exists, the YAML in `configs/` that fills them, and all checks.

A recipe's model, data set and loaders bring their own dataclasses, which extend the ones here. Each field may say by
`one_of`, `within`, `positive` or `values` what it takes; `check_config` holds every field of every dataclass to that.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)

import cosmos_framework
from cosmos_framework.utils import parallelism
from cosmos_framework.utils.grad_sync import AccumMode, Settings


class ConfigError(ValueError):
    """The configuration cannot be run; the message names the field, its value and what would work, in one line."""


@dataclass(frozen=True)
class _Values:
    """What a field takes: in words that complete "must be …", and as a test."""

    words: str
    accept: Callable[[Any], bool]


def values(words: str, accept: Callable[[Any], bool]) -> dict[str, Any]:
    """Declares what a field takes, as the `metadata` of `dataclasses.field`.

    Args:
        words: What the values are, so that "must be <words>" reads well.
        accept: Tells whether a value, which already has the field's type, is one of them. Null is not asked about: a
            field that may be null takes it.
    """
    return {"values": _Values(words, accept)}


def one_of(*choices: str, default: str) -> Any:
    """Declares a field that takes one of `choices`."""
    return field(default=default, metadata=values(f"one of {', '.join(choices)}", lambda value: value in choices))


def within(low: int, high: int | None = None, *, default: int | str | None) -> Any:
    """Declares a whole number from `low` to `high` (both included; None: no upper limit)."""
    words = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    accept = values(words, lambda value: low <= value and (high is None or value <= high))
    return field(default=default, metadata=accept)


def positive(default: float) -> Any:
    """Declares a finite number above 0."""
    return field(default=default, metadata=values("a finite number above 0", lambda value: 0 < value < math.inf))


def non_negative(default: float) -> Any:
    """Declares a finite number of at least 0."""
    return field(default=default, metadata=values("a finite number of at least 0", lambda value: 0 <= value < math.inf))


def fraction(default: float) -> Any:
    """Declares a number from 0 to 1."""
    return field(default=default, metadata=values("a number from 0 to 1", lambda value: 0 <= value <= 1))


def folder(default: str | None) -> Any:
    """Declares the path of a folder that exists."""
    return field(default=default, metadata=values("an existing folder", os.path.isdir))


def _folder_name(default: str) -> Any:
    words = "a folder name of letters, digits and any of . _ + = , - that does not start with a dot"
    is_name = re.compile(r"[\w+=,-][\w.+=,-]*").fullmatch
    return field(default=default, metadata=values(words, lambda value: is_name(value) is not None))


@dataclass
class JobConfig:
    """What the run is called, which is also where it writes.

    Attributes:
        project: First folder below the output root.
        group: Folder of the experiment.
        name: Folder of the run; a run of the same name resumes where the last one stopped.
        wandb_mode: What a Weights & Biases callback does, if `trainer.callbacks` has one.
        path_local: The run's folder. The root is $IMAGINAIRE_OUTPUT_ROOT, or ./outputs without it.
    """

    project: str = _folder_name("cosmos_framework")
    group: str = _folder_name("debug")
    name: str = _folder_name("default")
    wandb_mode: str = one_of("online", "offline", "disabled", default="disabled")
    path_local: str = "${oc.env:IMAGINAIRE_OUTPUT_ROOT,outputs}/${.project}/${.group}/${.name}"


@dataclass
class DDPConfig:
    """Arguments of `torch.nn.parallel.DistributedDataParallel`; without effect under "fsdp".

    Attributes:
        find_unused_parameters: Look in each backward for parameters that get no gradient.
        static_graph: Promise that every micro-step uses the same parameters in the same way.
        broadcast_buffers: Copy rank 0's buffers to all ranks before each forward.
    """

    find_unused_parameters: bool = False
    static_graph: bool = True
    broadcast_buffers: bool = True


def _default_grad_scaler_args() -> dict[str, Any]:
    return {
        "enabled": True,
        "init_scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
    }


@dataclass
class TrainerConfig:
    """The training loop.

    Attributes:
        distributed_parallelism: "ddp" copies the model to every rank; "fsdp" lays it out as `model.parallelism` says.
        grad_accum_iter: Number of micro-steps of a window, which ends with one optimizer step.
        fsdp_accum_mode: Which collectives wait for the window's boundary. "all_reduce": HSDP's all-reduce over the
            replicas; "grad_sync": the reduce-scatter as well; "none": no collective, every micro-step synchronises;
            "auto": as "all_reduce", and more for the modules that `fsdp_accum_memory_gib` has room for. DDP has one
            collective, which waits in all but "none".
        fsdp_accum_reshard: Whether parameters are freed after each micro-step. If not, they stay gathered until the
            boundary: fewer all-gathers for more memory.
        fsdp_reduce_unused_params: Whether parameters that a rank did not use in a window count as zero gradient there,
            so that ranks may use different ones.
        fsdp_accum_memory_gib: GiB that fsdp_accum_mode=auto may hold on each rank inside a window, beyond what
            "all_reduce" holds; inf for all that saves something.
        max_iter: Number of optimizer steps to train for.
        logging_iter: Number of optimizer steps from one logged line to the next.
        run_validation: Whether to validate while training.
        validation_iter: Number of optimizer steps from one validation to the next.
        max_val_iter: Largest number of batches of a validation; null takes the whole held-out split.
        seed: Seed of all random numbers; rank r draws from seed + r.
        timeout_period: Seconds after which a window, or a collective, that has not finished ends the run.
        memory_format: Name of the `torch.memory_format` of the model's tensors.
        grad_scaler_args: Arguments of `torch.amp.GradScaler`, which acts on CUDA with model.precision=float16 only.
        callbacks: Callbacks by name, called in this order; each is null or has a `_target_` and its arguments.
        ddp: Arguments of DDP.
    """

    distributed_parallelism: str = one_of("ddp", "fsdp", default="ddp")
    grad_accum_iter: int = within(1, default=1)
    fsdp_accum_mode: str = one_of(*(mode.value for mode in AccumMode), default="all_reduce")
    fsdp_accum_reshard: bool = True
    fsdp_reduce_unused_params: bool = False
    fsdp_accum_memory_gib: float = field(
        default=0.0, metadata=values("a number of at least 0, or inf", lambda value: value >= 0)
    )
    max_iter: int = within(1, default=1000)
    logging_iter: int = within(1, default=10)
    run_validation: bool = True
    validation_iter: int = within(1, default=200)
    max_val_iter: int | None = within(1, default=None)
    seed: int = within(0, 2**32 - 1, default=0)
    timeout_period: int = within(1, 10**9, default=1800)
    memory_format: str = one_of(
        "preserve_format", "contiguous_format", "channels_last", "channels_last_3d", default="preserve_format"
    )
    grad_scaler_args: dict[str, Any] = field(default_factory=_default_grad_scaler_args)
    callbacks: dict[str, Any] = field(default_factory=dict)
    ddp: DDPConfig = field(default_factory=DDPConfig)


@dataclass
class ParallelismConfig:
    """How "fsdp" lays the ranks out: `replicate` copies of a model that `shard` ranks hold together.

    Attributes:
        data_parallel_shard_degree: Ranks that hold one copy together; -1 takes what the replicas leave.
        data_parallel_replicate_degree: Number of copies.
    """

    data_parallel_shard_degree: int = -1
    data_parallel_replicate_degree: int = 1


@dataclass
class ModelConfig:
    """What every model has; a recipe's model extends it.

    Attributes:
        _target_: Import path of what takes this node and the data set's, and gives the `ImaginaireModel`.
        parallelism: Layout of the ranks.
        precision: Dtype to compute in.
        fsdp_master_dtype: Dtype to store parameters in, and to reduce gradients in.
    """

    _target_: str = MISSING
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    precision: str = one_of("float32", "bfloat16", "float16", "float64", default="float32")
    fsdp_master_dtype: str = one_of("float32", "bfloat16", "float16", "float64", default="float32")


@dataclass
class OptimizerConfig:
    """What every optimizer has.

    Attributes:
        _target_: Import path of a function that takes the parameters and the other fields.
        lr: Learning rate, which the scheduler scales.
    """

    _target_: str = MISSING
    lr: float = positive(1e-3)


@dataclass
class AdamWConfig(OptimizerConfig):
    """`torch.optim.AdamW` (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019).

    Attributes:
        betas: Decay of the running means of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decay of the parameters, per step and unit of learning rate.
        fused: True steps each parameter in one kernel, also on CPU; null leaves the choice to torch.
    """

    _target_: str = "torch.optim.AdamW"
    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.999],
        metadata=values(
            "two numbers from 0 to below 1", lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        ),
    )
    eps: float = non_negative(1e-8)
    weight_decay: float = non_negative(1e-2)
    fused: bool | None = None


@dataclass
class SchedulerConfig:
    """What every learning rate schedule has.

    Attributes:
        _target_: Import path of a function that takes the optimizer and the other fields.
    """

    _target_: str = MISSING


@dataclass
class ConstantSchedulerConfig(SchedulerConfig):
    """The learning rate stays `optimizer.lr`, by `torch.optim.lr_scheduler.ConstantLR`.

    Attributes:
        factor: Scale of the learning rate for torch's `total_iters` steps.
    """

    _target_: str = "torch.optim.lr_scheduler.ConstantLR"
    factor: float = positive(1.0)


@dataclass
class WarmupCosineConfig(SchedulerConfig):
    """Linear warm-up, then half a cosine (Loshchilov and Hutter, "SGDR", 2017).

    Attributes:
        warmup_iter: Optimizer steps from 0 to the full learning rate.
        max_iter: Optimizer step at which the cosine ends.
        min_factor: The last learning rate, as a fraction of the full one.
    """

    _target_: str = "cosmos_framework.utils.lr_scheduler.warmup_cosine"
    warmup_iter: int = within(0, default=50)
    max_iter: int = within(1, default="${trainer.max_iter}")
    min_factor: float = fraction(0.0)


@dataclass
class CheckpointConfig:
    """Checkpoints.

    Attributes:
        save_iter: Number of optimizer steps from one checkpoint to the next; the end of a run has one anyway.
        load_path: Checkpoint whose model a fresh run starts from. A run that has checkpoints of its own resumes from
            the latest and ignores this.
    """

    save_iter: int = within(1, default=1000)
    load_path: str | None = folder(None)


@dataclass
class DatasetConfig:
    """What every data set has; a recipe's data set extends it.

    Attributes:
        root: Folder of the data set.
    """

    root: str = folder(MISSING)


@dataclass
class DataLoaderConfig:
    """What every loader has; a recipe's loader extends it.

    Attributes:
        _target_: Import path of what takes the data set's node and the other fields, and gives micro-batches.
    """

    _target_: str = MISSING


@dataclass
class Config:
    """The whole configuration.

    Attributes:
        job: Name and folder of the run.
        trainer: The training loop.
        model: The model, and how it is laid out over the ranks.
        optimizer: The optimizer.
        scheduler: Its learning rate schedule.
        checkpoint: When checkpoints are written, and which one a run starts from.
        dataset: The data set.
        dataloader_train: Loader of its training split.
        dataloader_val: Loader of its held-out split; null if there is none.
    """

    job: JobConfig = field(default_factory=JobConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    dataloader_train: DataLoaderConfig = field(default_factory=DataLoaderConfig)
    dataloader_val: DataLoaderConfig | None = None


def _store_schemas() -> None:
    store = ConfigStore.instance().store
    store(name="schema", node=Config)
    store(group="schema/optimizer", name="adamw", node=AdamWConfig)
    store(group="schema/scheduler", name="constant", node=ConstantSchedulerConfig)
    store(group="schema/scheduler", name="warmup_cosine", node=WarmupCosineConfig)


_store_schemas()


def config_folder() -> Path:
    """Returns the folder of the YAML files: beside the package in a checkout, inside of it when it is installed."""
    package = Path(cosmos_framework.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def config_choices() -> dict[str, list[str]]:
    """Returns the names that each group of `configs/` offers, such as {"parallelism": ["ddp", "fsdp", …], …}."""
    groups = sorted(entry for entry in config_folder().iterdir() if entry.is_dir())
    return {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in groups}


def load_config(overrides: list[str]) -> DictConfig:
    """Composes the configuration from `configs/`.

    Args:
        overrides: As on the command line, in Hydra's grammar: "recipe=action_policy", "trainer.max_iter=10".

    Returns:
        A node shaped like `Config`, without open interpolations. Values are not checked yet.

    Raises:
        ConfigError: An override cannot be read, chooses what is not there, names a field that does not exist, or has
            a value of the wrong type; or a field that has no default is not set.
    """
    try:
        config = _compose(overrides)
        _require_known_fields(config)
        _require_all_set(config)
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides)) from error
    return config


def _compose(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", overrides)


def _require_known_fields(config: DictConfig) -> None:
    """Hydra's `+field=value` adds whatever is asked for, to a dataclass as well."""
    for name, node in _structured_nodes(config):
        for key in node:
            if key not in _fields(node):
                raise ConfigError(_no_such_field(_join(name, str(key)), config))


def _require_all_set(config: DictConfig) -> None:
    for name in sorted(OmegaConf.missing_keys(config)):
        values = _values(config, name)
        raise ConfigError(f"{name} is not set: give {name}=VALUE, {values.words}.")


def check_config(config: DictConfig, world_size: int) -> None:
    """Makes sure that the configuration can be run; touches nothing.

    Args:
        config: From `load_config`.
        world_size: Number of ranks that will run it.

    Raises:
        ConfigError: It cannot.
    """
    _require_known_fields(config)
    for name, node in _structured_nodes(config):
        for key in _fields(node):
            _check_value(config, _join(name, key), node[key])
        if "_target_" in node:
            _import(_join(name, "_target_"), node._target_)
    _check_grad_scaler_args(config.trainer.grad_scaler_args)
    for name, callback in _children(config.trainer.callbacks):
        _check_callback(f"trainer.callbacks.{name}", callback)
    if config.trainer.run_validation and config.dataloader_val is None:
        raise ConfigError(
            "trainer.run_validation=true needs a dataloader_val, which is null; set it, or this to false."
        )
    _check_accumulation(config.trainer)
    _check_parallelism(config, world_size)


def _check_value(config: DictConfig, name: str, value: Any) -> None:
    values = _values(config, name)
    if value is not None and not values.accept(value):
        raise ConfigError(f"{name}={_text(value)} must be {values.words}.")


def _check_grad_scaler_args(args: DictConfig) -> None:
    known = list(_default_grad_scaler_args())
    for name, _ in _children(args):
        if name not in known:
            raise ConfigError(f"trainer.grad_scaler_args.{name} does not exist; choose from {', '.join(known)}.")


def _check_callback(name: str, callback: Any) -> None:
    if callback is None:
        return
    if not isinstance(callback, DictConfig) or "_target_" not in callback:
        raise ConfigError(f"{name}={_text(callback)} must be null, or have a _target_ and its arguments.")
    target = _import(f"{name}._target_", callback._target_)
    arguments = {key: value for key, value in _children(callback) if key != "_target_"}
    try:
        inspect.signature(target).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{name} does not fit {callback._target_}: {_one_line(error)}.") from error


def _import(name: str, target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name}={target} cannot be imported: {_one_line(error)}.") from error


def _check_accumulation(trainer: DictConfig) -> None:
    try:
        Settings(
            AccumMode(trainer.fsdp_accum_mode),
            trainer.fsdp_accum_reshard,
            memory_bytes=trainer.fsdp_accum_memory_gib * 2**30,
        )
    except ValueError as error:
        raise ConfigError(f"trainer.{error}.") from error


def _check_parallelism(config: DictConfig, world_size: int) -> None:
    degrees = config.model.parallelism
    shard, replicate = degrees.data_parallel_shard_degree, degrees.data_parallel_replicate_degree
    try:
        layout = parallelism.resolve_degrees(shard=shard, replicate=replicate, world_size=world_size)
        parallelism.forward_precision(config, "cpu")  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.trainer.distributed_parallelism == "ddp" and (shard, replicate) != (-1, 1) and layout.shard != 1:
        raise ConfigError(
            f"trainer.distributed_parallelism=ddp copies the model to every rank, but model.parallelism asks to shard "
            f"it over {layout.shard}: set trainer.distributed_parallelism=fsdp, or choose parallelism=ddp."
        )


def _structured_nodes(config: DictConfig, name: str = "") -> Iterator[tuple[str, DictConfig]]:
    """Yields the nodes that have a dataclass, with their dotted names, outer ones first."""
    if dataclasses.is_dataclass(OmegaConf.get_type(config)):
        yield name, config
    for key, node in _children(config):
        if isinstance(node, DictConfig):
            yield from _structured_nodes(node, _join(name, key))


def _children(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yields keys and values; None for a value that is missing or not resolved yet."""
    for key in config:
        is_open = OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, str(key))
        yield str(key), None if is_open else config[key]


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _fields(node: DictConfig) -> dict[str, dataclasses.Field[Any]]:
    kind = OmegaConf.get_type(node)
    return {entry.name: entry for entry in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}


def _values(config: DictConfig, name: str) -> _Values:
    """Returns what the field with this dotted name takes: what it declares, or all of its type."""
    parent, _, key = name.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    entry = _fields(node).get(key.partition("[")[0]) if isinstance(node, DictConfig) else None
    if entry is None:
        return _Values("a value", lambda value: True)
    if "values" in entry.metadata:
        return entry.metadata["values"]
    words = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a string"}
    # Annotations are text here.
    return _Values(words.get(str(entry.type), f"a value of type {entry.type}"), lambda value: True)


def _text(value: Any) -> str:
    """Returns a value as one would write it in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _one_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0].rstrip(".")


def _explain(error: Exception, overrides: list[str]) -> str:
    """Turns an error of Hydra or OmegaConf into one line."""
    cause = _omegaconf_error(error)
    if cause is None:
        return _explain_choice(error)
    name = cause.full_key or ""
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and not isinstance(
        cause, InterpolationResolutionError
    ):
        return _no_such_field(name, _choices_only(overrides))
    if isinstance(cause, ValidationError):
        given = _override_of(name, overrides) or f"{name} ({_one_line(cause)})"
        return f"{given} must be {_values(_choices_only(overrides), name).words}."
    return f"{_override_of(name, overrides) or name}: {_one_line(cause)}."


def _omegaconf_error(error: BaseException | None) -> OmegaConfBaseException | None:
    while error is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__ or error.__context__
    return error


def _explain_choice(error: Exception) -> str:
    """Hydra lists the choices of a group below one another, then the places that it searched."""
    text = str(error)
    missing = re.search(r"Could not find '([^/']+)/([^']+)'", text)
    if missing and missing[1] in config_choices():
        return f"{missing[1]}={missing[2]} does not exist; choose one of {', '.join(config_choices()[missing[1]])}."
    kept = text.partition("Config search path")[0].splitlines()
    return " ".join(line.strip() for line in kept if "hydra.cc" not in line).strip()


def _override_of(name: str, overrides: list[str]) -> str | None:
    """Returns the override that set the field, or a part of it."""
    for override in reversed(OverridesParser.create().parse_overrides(overrides)):
        if re.match(rf"{re.escape(override.key_or_group)}($|[.\[])", name) and override.input_line is not None:
            return override.input_line
    return None


def _choices_only(overrides: list[str]) -> DictConfig:
    """Composes what the overrides choose, without the fields that they set."""
    given = OverridesParser.create().parse_overrides(overrides)
    chosen = [override for override in given if override.key_or_group in config_choices()]
    try:
        return _compose([override.input_line for override in chosen if override.input_line is not None])
    except HydraException:
        return OmegaConf.structured(Config)  # It is a YAML file that is wrong.


def _no_such_field(name: str, config: DictConfig) -> str:
    known = [other for other in dict.fromkeys((*_names(config), *config_choices())) if other != name]
    parent, _, key = name.rpartition(".")
    siblings = [other for other in known if other.rpartition(".")[0] == parent]
    likely = _similar(key, siblings) or _similar(key, known)
    choices = siblings or [other for other in known if "." not in other]
    hint = f"did you mean {' or '.join(likely)}?" if likely else f"choose from {', '.join(choices)}."
    return f"the field {name} does not exist; {hint}"


def _similar(key: str, names: list[str]) -> list[str]:
    """Returns the names whose last part reads much like `key`."""
    last_parts = difflib.get_close_matches(key, {name.rpartition(".")[2] for name in names}, cutoff=0.75)
    return [name for name in names if name.rpartition(".")[2] in last_parts]


def _names(config: DictConfig, name: str = "") -> Iterator[str]:
    """Yields the dotted names of all fields."""
    for key, node in _children(config):
        yield _join(name, key)
        if isinstance(node, DictConfig):
            yield from _names(node, _join(name, key))
