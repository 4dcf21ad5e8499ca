# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""LeRobot data sets, version 3.0, of states and actions: reading and writing the layout on disk.

The layout (source: LeRobotDataset v3.0, https://huggingface.co/docs/lerobot/lerobot-dataset-v3)::

    meta/info.json                             version, fps, features with their shapes, splits
    meta/stats.json                            mean, std, min, max of each feature
    meta/tasks.parquet                         task_index, task
    meta/episodes/chunk-000/file-000.parquet   episode_index, tasks, length, dataset_from_index, dataset_to_index
    data/chunk-000/file-000.parquet            a row a frame: observation.state, action, timestamp, indices
    meta/domains.json                          ours, optional: {domain: [task, ...]}
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cosmos_framework.utils.config import ConfigError

VERSION = "v3.0"
STATE, ACTION = "observation.state", "action"
FRAME_COLUMNS = (STATE, ACTION, "episode_index", "task_index")
# LeRobot writes the text as a pandas index, which parquet names so if it has no name of its own.
TASK_TEXT = ("task", "__index_level_0__")
HELD_OUT = 0.1
# LeRobot finds a task's text in the index of the pandas frame (source: pandas' developer guide, "Storing metadata").
TASK_IS_PANDAS_INDEX = {
    "pandas": json.dumps(
        {
            "index_columns": ["task"],
            "column_indexes": [],
            "columns": [
                {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": stored, "metadata": None}
                for name, kind, stored in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
            ],
            "pandas_version": "2.0.0",
        }
    )
}


class DatasetError(ConfigError):
    """A data set lacks something, or has it in a shape that cannot be used; the message names it."""


@dataclass(frozen=True)
class Episode:
    """One demonstration.

    Attributes:
        state: observations, (frames, state size), float32.
        action: what was done after each observation, (frames, action size), float32.
        task: the task's text.
    """

    state: np.ndarray
    action: np.ndarray
    task: str


@dataclass(frozen=True)
class LeRobotDataset:
    """A data set in memory.

    Attributes:
        root: its folder.
        state: observations of all frames, (frames, state size), float32.
        action: actions of all frames, (frames, action size), float32.
        task_index: the task of each frame, (frames,), int64.
        episode_bounds: first and past-the-last frame of each episode, (episodes, 2), int64.
        tasks: the tasks' texts, by task index.
        stats: {feature: {"mean" | "std" | "min" | "max": (size,) float32}}.
        splits: {split: (first, past-the-last) episode}.
        domains: the indices of each domain's tasks; one domain holds all where the data set names none.
        fps: frames per second.
    """

    root: Path
    state: np.ndarray
    action: np.ndarray
    task_index: np.ndarray
    episode_bounds: np.ndarray
    tasks: tuple[str, ...]
    stats: dict[str, dict[str, np.ndarray]]
    splits: dict[str, tuple[int, int]]
    domains: dict[str, tuple[int, ...]]
    fps: float


def read_dataset(root: str | Path) -> LeRobotDataset:
    """Reads a data set with state and action columns; other columns, such as images, are left alone.

    Without a split "val" in `info.json` the last tenth of the split "train" is held out.

    Args:
        root: its folder.

    Raises:
        DatasetError: the folder, a file, a column or a statistic is missing, or has a shape that cannot be used.
    """
    root = Path(root)
    info = _read_info(root)
    frames = _read_tables(root, "data", FRAME_COLUMNS)
    state, action = (_matrix(frames, name, root) for name in (STATE, ACTION))
    for name, values in ((STATE, state), (ACTION, action)):
        shape = info["features"][name].get("shape")
        if shape != [values.shape[1]]:
            raise DatasetError(
                f"{root}: {name} has {values.shape[1]} numbers a frame, but meta/info.json gives the shape {shape}"
            )
    bounds = _episode_bounds(_indices(frames, "episode_index", root), root)
    tasks = _read_tasks(root)
    task_index = _indices(frames, "task_index", root)
    if not 0 <= task_index.min() <= task_index.max() < len(tasks):
        raise DatasetError(
            f"{root}: the frames have task_index {task_index.min()} to {task_index.max()}, "
            f"meta/tasks.parquet has 0 to {len(tasks) - 1}"
        )
    return LeRobotDataset(
        root=root,
        state=state,
        action=action,
        task_index=task_index,
        episode_bounds=bounds,
        tasks=tasks,
        stats=_read_stats(root, {STATE: state.shape[1], ACTION: action.shape[1]}),
        splits=_splits(info, len(bounds), root),
        domains=_read_domains(root, tasks),
        fps=float(info["fps"]),
    )


def write_dataset(
    root: str | Path,
    episodes: Sequence[Episode],
    *,
    fps: int,
    domains: dict[str, list[str]] | None = None,
    validation_episodes: int = 0,
    robot_type: str = "unknown",
    more_meta: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Writes a data set, completely or not at all: it is built beside `root` and then renamed.

    Args:
        root: its folder, which must not exist.
        episodes: the demonstrations; the last `validation_episodes` become the split "val".
        fps: frames per second.
        domains: which tasks belong together; None writes no `domains.json`.
        validation_episodes: number of held-out episodes.
        robot_type: for `info.json`.
        more_meta: further JSON files of `meta/`, by name.

    Raises:
        FileExistsError: `root` exists.
        DatasetError: there are no episodes, or none is left to train on.
    """
    root = Path(root)
    if root.exists():
        raise FileExistsError(f"{root} exists; remove it or choose another folder")
    if not 0 <= validation_episodes < len(episodes):
        raise DatasetError(f"{len(episodes)} episodes cannot have {validation_episodes} held out")
    partial = root.with_name(root.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tasks = list(dict.fromkeys(episode.task for episode in episodes))
    state = np.concatenate([episode.state for episode in episodes]).astype(np.float32)
    action = np.concatenate([episode.action for episode in episodes]).astype(np.float32)
    lengths = [len(episode.state) for episode in episodes]
    _write_table(partial / "data/chunk-000/file-000.parquet", _frame_columns(state, action, episodes, tasks, fps))
    _write_table(partial / "meta/episodes/chunk-000/file-000.parquet", _episode_columns(episodes, lengths))
    _write_table(
        partial / "meta/tasks.parquet", {"task_index": list(range(len(tasks))), "task": tasks}, TASK_IS_PANDAS_INDEX
    )
    _write_json(partial / "meta/stats.json", {STATE: _stats_of(state), ACTION: _stats_of(action)})
    _write_json(
        partial / "meta/info.json",
        _info(state, action, len(tasks), len(episodes), fps, validation_episodes, robot_type),
    )
    if domains is not None:
        _write_json(partial / "meta/domains.json", domains)
    for name, content in (more_meta or {}).items():
        _write_json(partial / "meta" / name, content)
    partial.rename(root)


def _read_info(root: Path) -> dict[str, Any]:
    if not root.is_dir():
        raise DatasetError(f"{root} is no folder; set dataset.root to a LeRobot {VERSION} data set")
    info = _read_json(root, "info.json")
    if info.get("codebase_version") != VERSION:
        raise DatasetError(
            f"{root}: meta/info.json has codebase_version {info.get('codebase_version')!r}; {VERSION} is read here "
            "(LeRobot converts older ones)"
        )
    features = info.get("features") or {}
    for name in (STATE, ACTION):
        if name not in features:
            raise DatasetError(f"{root}: meta/info.json has no feature {name}; it has {', '.join(features) or 'none'}")
    if not isinstance(info.get("fps"), int | float) or info["fps"] <= 0:
        raise DatasetError(f"{root}: meta/info.json has fps={info.get('fps')!r}; a positive number is needed")
    return info


def _read_json(root: Path, name: str) -> dict[str, Any]:
    path = root / "meta" / name
    if not path.is_file():
        raise DatasetError(f"{root} has no meta/{name}; a LeRobot {VERSION} data set needs it")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise DatasetError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise DatasetError(f"{path} holds a {type(content).__name__}; a JSON object is needed")
    return content


def _read_tables(root: Path, folder: str, columns: Sequence[str]) -> pa.Table:
    files = sorted((root / folder).glob("chunk-*/file-*.parquet"))
    if not files:
        raise DatasetError(f"{root} has no {folder}/chunk-*/file-*.parquet")
    try:
        return pa.concat_tables([_read_table(file, columns) for file in files])
    except pa.ArrowInvalid as error:
        raise DatasetError(f"{root}: the files of {folder} have columns of different types: {error}") from error


def _read_table(path: Path, columns: Sequence[str], any_of: Sequence[str] = ()) -> pa.Table:
    """Reads `columns`, and the first of `any_of` that there is."""
    try:
        known = pq.read_schema(path).names
        if any_of:
            columns = [*columns, next((name for name in any_of if name in known), any_of[0])]
        missing = [column for column in columns if column not in known]
        if missing:
            raise DatasetError(f"{path} has no column {', '.join(missing)}; it has {', '.join(known)}")
        return pq.read_table(path, columns=list(columns))
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error


def _matrix(frames: pa.Table, name: str, root: Path) -> np.ndarray:
    column = frames[name].combine_chunks()
    if len(column) == 0:
        raise DatasetError(f"{root}: the column {name} has no frames")
    if _is_list(column.type):
        # A frame of other or no size would shift all later ones; null has the size NaN.
        sizes = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        if not (sizes == sizes[0]).all():
            raise DatasetError(f"{root}: the column {name} has frames of different sizes, or empty ones")
        column = column.flatten()
    # LeRobot stores a feature of one number as the number.
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise DatasetError(f"{root}: the column {name} holds {column.type}; a list of numbers a frame is needed")
    values = column.to_numpy(zero_copy_only=False).astype(np.float32)
    if not np.isfinite(values).all():
        raise DatasetError(f"{root}: the column {name} has values that are not finite")
    return values.reshape(frames.num_rows, -1)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind)


def _indices(frames: pa.Table, name: str, root: Path) -> np.ndarray:
    if not pa.types.is_integer(frames[name].type) or frames[name].null_count:
        raise DatasetError(f"{root}: the column {name} needs an integer in each frame; it holds {frames[name].type}")
    return frames[name].to_numpy().astype(np.int64)


def _episode_bounds(episode_index: np.ndarray, root: Path) -> np.ndarray:
    starts = np.flatnonzero(np.diff(episode_index, prepend=episode_index[0] - 1))
    if len(set(episode_index[starts].tolist())) != len(starts):
        raise DatasetError(f"{root}: the frames of an episode do not lie together")
    return np.stack([starts, np.append(starts[1:], len(episode_index))], axis=1)


def _read_tasks(root: Path) -> tuple[str, ...]:
    path = root / "meta/tasks.parquet"
    if not path.is_file():
        raise DatasetError(f"{root} has no meta/tasks.parquet")
    table = _read_table(path, ["task_index"], any_of=TASK_TEXT)
    text = table.column_names[-1]
    by_index = dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))
    if sorted(by_index) != list(range(len(by_index))):
        raise DatasetError(f"{path}: task_index does not count from 0")
    return tuple(str(by_index[index]) for index in range(len(by_index)))


def _read_stats(root: Path, sizes: dict[str, int]) -> dict[str, dict[str, np.ndarray]]:
    stats = _read_json(root, "stats.json")
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, size in sizes.items():
        for kind in ("mean", "std"):
            try:
                values = np.asarray(stats.get(name, {}).get(kind, []), dtype=np.float32).reshape(-1)
            except (ValueError, TypeError, AttributeError):
                raise DatasetError(
                    f"{root}: meta/stats.json has something else than numbers for {name}.{kind}"
                ) from None
            if values.size != size:
                raise DatasetError(f"{root}: meta/stats.json has {values.size} numbers for {name}.{kind}, needs {size}")
            if not np.isfinite(values).all():
                raise DatasetError(f"{root}: meta/stats.json has numbers that are not finite for {name}.{kind}")
            found.setdefault(name, {})[kind] = values
    return found


def _splits(info: dict[str, Any], episodes: int, root: Path) -> dict[str, tuple[int, int]]:
    named = info.get("splits") or {"train": f"0:{episodes}"}
    splits = {name: _split(name, named[name], episodes, root) for name in ("train", "val") if name in named}
    if "train" not in splits:
        raise DatasetError(f"{root}: meta/info.json has no split 'train'; it has {', '.join(named)}")
    first, end = splits["train"]
    if "val" not in splits and end - first > 1:
        first_held_out = min(end - 1, first + round((end - first) * (1 - HELD_OUT)))
        splits = {"train": (first, first_held_out), "val": (first_held_out, end)}
    elif "val" in splits and max(first, splits["val"][0]) < min(end, splits["val"][1]):
        raise DatasetError(f"{root}: meta/info.json has splits train and val that share episodes: {named}")
    return splits


def _split(name: str, text: str, episodes: int, root: Path) -> tuple[int, int]:
    try:
        first, last = (int(part) for part in text.split(":"))
    except (ValueError, AttributeError):
        raise DatasetError(f"{root}: meta/info.json has the split {name}={text!r}; FIRST:LAST is needed") from None
    if not 0 <= first < last <= episodes:
        raise DatasetError(f"{root}: meta/info.json has the split {name}={text!r} of {episodes} episodes")
    return first, last


def _read_domains(root: Path, tasks: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    if not (root / "meta/domains.json").is_file():
        return {"all": tuple(range(len(tasks)))}
    domains = _read_json(root, "domains.json")
    for name, members in domains.items():
        if not isinstance(members, list):
            raise DatasetError(f"{root}: meta/domains.json has {name}={members!r}; a list of tasks is needed")
    named = [task for members in domains.values() for task in members]
    if sorted(map(str, named)) != sorted(tasks):
        raise DatasetError(f"{root}: meta/domains.json must name each task of meta/tasks.parquet once, and no other")
    return {name: tuple(tasks.index(task) for task in members) for name, members in domains.items()}


def _frame_columns(
    state: np.ndarray, action: np.ndarray, episodes: Sequence[Episode], tasks: list[str], fps: int
) -> dict[str, Any]:
    frame = np.concatenate([np.arange(len(episode.state)) for episode in episodes])
    return {
        STATE: pa.FixedSizeListArray.from_arrays(pa.array(state.reshape(-1)), state.shape[1]),
        ACTION: pa.FixedSizeListArray.from_arrays(pa.array(action.reshape(-1)), action.shape[1]),
        "timestamp": (frame / fps).astype(np.float32),
        "frame_index": frame,
        "episode_index": np.concatenate([np.full(len(e.state), index) for index, e in enumerate(episodes)]),
        "index": np.arange(len(frame)),
        "task_index": np.concatenate([np.full(len(e.state), tasks.index(e.task)) for e in episodes]),
    }


def _episode_columns(episodes: Sequence[Episode], lengths: list[int]) -> dict[str, Any]:
    ends = np.cumsum(lengths)
    count = len(episodes)
    return {
        "episode_index": list(range(count)),
        "tasks": [[episode.task] for episode in episodes],
        "length": lengths,
        "dataset_from_index": ends - lengths,
        "dataset_to_index": ends,
        "data/chunk_index": [0] * count,
        "data/file_index": [0] * count,
        "meta/episodes/chunk_index": [0] * count,
        "meta/episodes/file_index": [0] * count,
    }


def _stats_of(values: np.ndarray) -> dict[str, list[float]]:
    kinds = {"mean": values.mean(0), "std": values.std(0), "min": values.min(0), "max": values.max(0)}
    return {kind: figures.tolist() for kind, figures in kinds.items()} | {"count": [len(values)]}


def _info(
    state: np.ndarray, action: np.ndarray, tasks: int, episodes: int, fps: int, held_out: int, robot_type: str
) -> dict[str, Any]:
    features = {
        name: {"dtype": "float32", "shape": [v.shape[1]], "names": None}
        for name, v in ((STATE, state), (ACTION, action))
    }
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    for name in ("frame_index", "episode_index", "index", "task_index"):
        features[name] = {"dtype": "int64", "shape": [1], "names": None}
    splits = {"train": f"0:{episodes - held_out}"}
    if held_out:
        splits["val"] = f"{episodes - held_out}:{episodes}"
    return {
        "codebase_version": VERSION,
        "robot_type": robot_type,
        "total_episodes": episodes,
        "total_frames": len(state),
        "total_tasks": tasks,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 500,
        "fps": fps,
        "splits": splits,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "features": features,
    }


def _write_table(path: Path, columns: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
