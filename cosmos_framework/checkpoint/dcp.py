# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Sharded checkpoints with torch.distributed.checkpoint (DCP).

    <job folder>/checkpoints/
        iter_000000005/          one DCP checkpoint: every rank's shards and `.metadata`, which lists them
        latest_checkpoint.txt    the name of the checkpoint to resume from, written last

DCP fits what it reads to the mesh of the run that reads: another number of ranks, another layout, or one process. The
folder must be one that all hosts share.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from cosmos_framework.checkpoint import optimizer_state
from cosmos_framework.utils import distributed, misc
from cosmos_framework.utils.callback import CallBackGroup

if TYPE_CHECKING:
    from cosmos_framework.model._base import ImaginaireModel
    from cosmos_framework.utils.config import CheckpointConfig, JobConfig

_LATEST = "latest_checkpoint.txt"
_METADATA = ".metadata"
_START_ANEW = "To start anew, choose another job.name; to start from another model, set checkpoint.load_path there."


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, or does not fit; the message names it and what would work."""


@dataclass
class TrainingProgress:
    """What a job has done so far, over all its restarts.

    Attributes:
        micro_batches: Number of micro-batches that each rank has trained on. It is not the number of optimizer steps
            times `trainer.grad_accum_iter`, which a restart may change.
    """

    micro_batches: int = 0


class DistributedCheckpointer:
    """Writes the checkpoints of a job and resumes from the latest."""

    def __init__(
        self,
        config_checkpoint: CheckpointConfig,
        config_job: JobConfig,
        callbacks: CallBackGroup,
        progress: TrainingProgress,
    ) -> None:
        """Takes note of where the job's checkpoints are; touches nothing.

        Args:
            config_checkpoint: `load_path` names the checkpoint whose model a fresh job starts from, if any.
            config_job: Its folder holds the checkpoints.
            callbacks: Told before and after each save and load.
            progress: Written with each checkpoint, filled from the one that is resumed from.
        """
        self._folder = Path(config_job.path_local) / "checkpoints"
        self._load_path = config_checkpoint.load_path
        self._callbacks = callbacks
        self._progress = progress

    def save(
        self,
        model: ImaginaireModel,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        grad_scaler: torch.amp.GradScaler,
        iteration: int,
    ) -> None:
        """Writes a checkpoint from which training goes on bit for bit; every rank calls.

        Args:
            model: The model without a DDP wrapper.
            optimizer: Its optimizer.
            scheduler: Its scheduler.
            grad_scaler: The gradient scaler.
            iteration: Number of optimizer steps done.

        Raises:
            HeldBackGradientError: A window is open, whose gradients no checkpoint holds.
        """
        distributed.require_nothing_held_back(model, "a checkpoint")
        started = time.monotonic()
        self._callbacks.on_save_checkpoint_start(model, iteration)
        state = {
            "model": get_model_state_dict(model),
            "optimizer": optimizer_state.collect(model, optimizer),
            "trainer": _pack(
                {
                    "iteration": iteration,
                    "micro_batches": self._progress.micro_batches,
                    "world_size": distributed.get_world_size(),
                    "optimizer": optimizer_state.describe(model, optimizer),
                    "scheduler": scheduler.state_dict(),
                    "grad_scaler": grad_scaler.state_dict(),
                }
            ),
            _random_key(): _pack(misc.get_random_state()),
        }
        self._callbacks.on_save_checkpoint(model, state)
        self._write(state, f"iter_{iteration:09}")
        self._callbacks.on_save_checkpoint_end(model, iteration)
        self._callbacks.on_save_checkpoint_success(iteration, elapsed_time=time.monotonic() - started)

    def _write(self, state: dict[str, Any], name: str) -> None:
        """Writes beside the final place and moves the whole, so that an interrupted save leaves nothing to resume."""
        partial, final = self._folder / f"{name}.partial", self._folder / name
        if distributed.is_rank0():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        distributed.barrier()
        try:
            dcp.save(state, checkpoint_id=partial)
        except CheckpointException as error:
            raise CheckpointError(
                f"{final} could not be written ({_reason(error)}); {self._folder / _LATEST} {self._latest_now()}."
            ) from error
        if distributed.is_rank0():
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _write_atomically(self._folder / _LATEST, f"{name}\n")
        distributed.barrier()

    def _latest_now(self) -> str:
        latest = self._folder / _LATEST
        return f"still names {latest.read_text().strip()}" if latest.exists() else "does not exist yet"

    def load(
        self,
        model: ImaginaireModel,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> int:
        """Resumes from the job's latest checkpoint; a job that has none starts from the model in `load_path`, if set.

        Args:
            model: The model without a DDP wrapper, sharded already if it will be.
            optimizer: Its optimizer; with it the progress and the random numbers are restored too, the latter if the
                number of ranks is the same. None leaves these out.
            scheduler: Its scheduler, or None to leave that out.
            grad_scaler: The gradient scaler, or None to leave that out.

        Returns:
            Number of optimizer steps that the job has done: 0 if it starts anew.

        Raises:
            CheckpointError: The checkpoint is missing, damaged, or does not fit.
        """
        self._callbacks.on_load_checkpoint_start(model)
        iteration, source = 0, None
        if (self._folder / _LATEST).exists():
            source = find_checkpoint(self._folder)
            iteration = self._resume(source, model, optimizer, scheduler, grad_scaler)
        elif self._load_path:
            source = find_checkpoint(self._load_path)
            load_model(model, source)
        self._callbacks.on_load_checkpoint_end(model, iteration, None if source is None else str(source))
        return iteration

    def _resume(
        self,
        source: Path,
        model: ImaginaireModel,
        optimizer: torch.optim.Optimizer | None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> int:
        metadata = _read_metadata(source)
        trainer = _read_trainer(source)
        state: dict[str, Any] = {"model": _model_template(model, source, metadata)}
        if optimizer is not None:
            mismatch = optimizer_state.difference(trainer["optimizer"], optimizer_state.describe(model, optimizer))
            if mismatch:
                raise CheckpointError(f"cannot resume from {source}: {mismatch}. {_START_ANEW}")
            state["optimizer"] = optimizer_state.template(model, metadata)
            if trainer["world_size"] == distributed.get_world_size():
                state[_random_key()] = b""
        self._callbacks.on_load_checkpoint(model, state)
        _read(state, source)
        set_model_state_dict(model, state["model"])
        if optimizer is not None:
            optimizer_state.restore(optimizer, trainer["optimizer"], state["optimizer"])
            self._progress.micro_batches = trainer["micro_batches"]
        if _random_key() in state:
            misc.set_random_state(_unpack(state[_random_key()]))
        if scheduler is not None:
            scheduler.load_state_dict(trainer["scheduler"])
        if grad_scaler is not None:
            grad_scaler.load_state_dict(trainer["grad_scaler"])
        return trainer["iteration"]

    def finalize(self) -> None:
        """Returns when every rank has left its last save."""
        distributed.barrier()


def load_model(model: torch.nn.Module, source: str | os.PathLike[str]) -> int:
    """Reads the model alone from a checkpoint, to evaluate it or to start another run from it.

    Args:
        model: A model with the parameters and buffers of the one that was saved, on any mesh or on none.
        source: As `find_checkpoint` takes it.

    Returns:
        Number of optimizer steps that the model was trained for.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or of another model.
    """
    found = find_checkpoint(source)
    state = {"model": _model_template(model, found, _read_metadata(found))}
    _read(state, found)
    set_model_state_dict(model, state["model"])
    return _read_trainer(found)["iteration"]


def find_checkpoint(source: str | os.PathLike[str]) -> Path:
    """Finds the checkpoint that a path means.

    Args:
        source: A checkpoint, a folder of checkpoints (their latest is meant), or the folder of a job.

    Returns:
        The checkpoint's own folder.

    Raises:
        CheckpointError: There is none.
    """
    path = Path(source)
    if (path / _METADATA).exists():
        return path
    for folder in (path, path / "checkpoints"):
        if (folder / _LATEST).exists():
            found = folder / (folder / _LATEST).read_text().strip()
            if (found / _METADATA).exists():
                return found
            complete = sorted(other.parent.name for other in folder.glob(f"iter_*[0-9]/{_METADATA}"))
            raise CheckpointError(
                f"{folder / _LATEST} names {found.name}, which is no complete checkpoint. "
                f"Write the name of a complete one into it: {', '.join(complete) or 'there is none; remove the file'}."
            )
    raise CheckpointError(f"no checkpoint in {path}: neither {_METADATA} nor {_LATEST} is there.")


def _read_metadata(source: Path) -> Metadata:
    """Reads what a checkpoint should hold, and sees that its files are long enough to hold it."""
    try:
        metadata = dcp.FileSystemReader(source).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{source / _METADATA} cannot be read ({error}). {_use_another(source)}") from error
    needed: dict[str, int] = defaultdict(int)
    for part in metadata.storage_data.values():
        needed[part.relative_path] = max(needed[part.relative_path], part.offset + part.length)
    for name, size in needed.items():
        file = source / name
        found = file.stat().st_size if file.exists() else 0
        if found < size:
            raise CheckpointError(f"{file} is damaged: {found} of {size} bytes are there. {_use_another(source)}")
    return metadata


def _use_another(source: Path) -> str:
    return f"Write the name of an older checkpoint into {source.parent / _LATEST}, or choose another job.name."


def _model_template(model: torch.nn.Module, source: Path, metadata: Metadata) -> dict[str, Any]:
    """Returns the model's own tensors, for DCP to fill, once it is sure that the checkpoint has all of them."""
    state: dict[str, Any] = get_model_state_dict(model)
    saved = {
        path[1]: metadata.state_dict_metadata[key] for key, path in metadata.planner_data.items() if path[0] == "model"
    }
    problems = [f"it lacks {name}" for name in state if name not in saved]
    problems += [f"it has {name}, unknown to this model" for name in saved if name not in state]
    problems += [
        f"{name} has shape {tuple(entry.size)} there and {tuple(state[name].shape)} here"
        for name, entry in saved.items()
        if name in state and isinstance(entry, TensorStorageMetadata) and entry.size != state[name].shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"{source} is of another model: {shown}. {_START_ANEW}")
    return state


def _read_trainer(source: Path) -> dict[str, Any]:
    state = {"trainer": b""}
    _read(state, source)
    return _unpack(state["trainer"])


def _read(state: dict[str, Any], source: Path) -> None:
    try:
        with warnings.catch_warnings():
            # One process without a process group is meant where there is none, as in an evaluation.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, checkpoint_id=source, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise CheckpointError(f"{source} cannot be read ({_reason(error)}). {_use_another(source)}") from error


def _reason(error: CheckpointException) -> BaseException:
    """Returns what went wrong on the first rank on which something did."""
    return next(iter(error.failures.values()))[0]


def _random_key() -> str:
    return f"random_rank{distributed.get_rank()}"


def _pack(state: dict[str, Any]) -> bytes:
    """Makes one value of a dict, which DCP would otherwise take apart and ask for key by key."""
    packed = io.BytesIO()
    torch.save(state, packed)
    return packed.getvalue()


def _unpack(packed: bytes) -> dict[str, Any]:
    # Schedulers and optimizers keep objects of their own. DCP itself unpickles, too: a checkpoint is trusted like code.
    return torch.load(io.BytesIO(packed), weights_only=False)


def _write_atomically(path: Path, text: str) -> None:
    written = path.with_suffix(".tmp")
    with open(written, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
