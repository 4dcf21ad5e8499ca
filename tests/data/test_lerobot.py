# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cosmos_framework.data.lerobot import ACTION, STATE, DatasetError, read_dataset, write_dataset
from tests.synthetic import DOMAINS, synthetic_episodes, write_synthetic


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_synthetic(tmp_path / "demos")


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_what_is_written_is_read(root: Path) -> None:
    episodes, found = synthetic_episodes(), read_dataset(root)
    assert found.tasks == ("reach left", "reach right", "lift")
    assert found.domains == {"reach": (0, 1), "lift": (2,)}
    assert found.splits == {"train": (0, 9), "val": (9, 12)}
    for (first, end), episode in zip(found.episode_bounds, episodes, strict=True):
        np.testing.assert_array_equal(found.state[first:end], episode.state)
        np.testing.assert_array_equal(found.action[first:end], episode.action)
        assert {found.tasks[index] for index in found.task_index[first:end]} == {episode.task}
    np.testing.assert_allclose(found.stats[STATE]["mean"], found.state.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.stats[ACTION]["std"], found.action.std(0), rtol=1e-5)


def test_the_layout_is_lerobots(root: Path) -> None:
    frames = pq.read_table(root / "data/chunk-000/file-000.parquet")
    wanted = {STATE, ACTION, "timestamp", "frame_index", "episode_index", "index", "task_index"}
    assert set(frames.column_names) == wanted
    info = json.loads((root / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert set(info["features"]) == wanted
    assert info["total_frames"] == frames.num_rows
    episodes = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [episode["dataset_to_index"] - episode["dataset_from_index"] for episode in episodes] == [20] * 12


def test_a_users_own_set(root: Path) -> None:
    """Several files, more columns, tasks as a pandas index, no domains and no split of ours."""
    data = root / "data/chunk-000"
    frames = pq.read_table(data / "file-000.parquet").append_column("next.reward", pa.array([0.0] * 240))
    pq.write_table(frames.slice(0, 100), data / "file-000.parquet")
    pq.write_table(frames.slice(100), data / "file-001.parquet")
    tasks = pq.read_table(root / "meta/tasks.parquet").rename_columns(["task_index", "__index_level_0__"])
    pq.write_table(tasks, root / "meta/tasks.parquet")
    (root / "meta/domains.json").unlink()
    edit_json(root / "meta/info.json", splits={"train": "0:12"})
    found = read_dataset(root)
    assert len(found.state) == 240
    assert found.domains == {"all": (0, 1, 2)}
    assert found.splits == {"train": (0, 11), "val": (11, 12)}


def test_a_feature_of_one_number_is_stored_as_a_number(root: Path) -> None:
    action = read_dataset(root).action[:, :1]
    replace_column(root, ACTION, lambda rows: [row[0] for row in rows])
    features = json.loads((root / "meta/info.json").read_text())["features"]
    edit_json(root / "meta/info.json", features=features | {ACTION: {"dtype": "float32", "shape": [1]}})
    stats = {kind: [float(getattr(action, kind)())] for kind in ("mean", "std")}
    edit_json(root / "meta/stats.json", **{ACTION: stats})
    np.testing.assert_array_equal(read_dataset(root).action, action)


def test_the_held_out_tenth_is_of_the_training_split(root: Path) -> None:
    edit_json(root / "meta/info.json", splits={"train": "1:11"})
    assert read_dataset(root).splits == {"train": (1, 10), "val": (10, 11)}


def test_lerobot_finds_the_tasks(root: Path) -> None:
    """It looks the text up in the index of the pandas frame."""
    metadata = json.loads(pq.read_schema(root / "meta/tasks.parquet").metadata[b"pandas"])
    assert metadata["index_columns"] == ["task"]


def drop_column(root: Path, column: str) -> None:
    path = root / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).drop_columns([column]), path)


def replace_column(root: Path, column: str, change: Callable[[list[Any]], list[Any]]) -> None:
    path = root / "data/chunk-000/file-000.parquet"
    frames = pq.read_table(path)
    place = frames.column_names.index(column)
    pq.write_table(frames.set_column(place, column, pa.array(change(frames[column].to_pylist()))), path)


def ragged(rows: list[Any]) -> list[Any]:
    """Moves a number from one frame to the next: the count of all numbers stays."""
    return [rows[0][:-1], [rows[0][-1], *rows[1]], *rows[2:]]


def split_in_two_types(root: Path) -> None:
    path = root / "data/chunk-000/file-000.parquet"
    shutil.copy(path, path.with_name("file-001.parquet"))
    replace_column(root, ACTION, lambda rows: rows)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


DEFECTS = {
    "no folder": (lambda root: root.rename(root.with_name("elsewhere")), "demos is no folder; set dataset.root"),
    "no info": (lambda root: (root / "meta/info.json").unlink(), "has no meta/info.json"),
    "broken info": (lambda root: (root / "meta/info.json").write_text("{"), "info.json is no JSON"),
    "old version": (lambda root: edit_json(root / "meta/info.json", codebase_version="v2.1"), "'v2.1'; v3.0 is read"),
    "info is a list": (lambda root: (root / "meta/info.json").write_text("[]"), "holds a list"),
    "no fps": (lambda root: edit_json(root / "meta/info.json", fps=None), "has fps=None"),
    "no shape": (
        lambda root: edit_json(root / "meta/info.json", features={STATE: {"shape": [5]}, ACTION: {}}),
        "action has 3 numbers a frame, but meta/info.json gives the shape None",
    ),
    "no state": (
        lambda root: edit_json(root / "meta/info.json", features={ACTION: {}}),
        f"no feature {STATE}; it has action",
    ),
    "no action column": (lambda root: drop_column(root, ACTION), "has no column action; it has"),
    "truncated": (lambda root: truncate(root / "data/chunk-000/file-000.parquet"), "file-000.parquet cannot be read"),
    "ragged frames": (lambda root: replace_column(root, ACTION, ragged), "action has frames of different sizes"),
    "no number": (lambda root: replace_column(root, ACTION, lambda rows: ["up"] * len(rows)), "action holds string"),
    "unknown task": (
        lambda root: replace_column(root, "task_index", lambda rows: [-1, *rows[1:]]),
        "have task_index -1 to 2, meta/tasks.parquet has 0 to 2",
    ),
    "no episode": (
        lambda root: replace_column(root, "episode_index", lambda rows: [None, *rows[1:]]),
        "episode_index needs an integer",
    ),
    "files that differ": (lambda root: split_in_two_types(root), "files of data have columns of different types"),
    "broken tasks": (lambda root: truncate(root / "meta/tasks.parquet"), "tasks.parquet cannot be read"),
    "no data": (lambda root: (root / "data/chunk-000/file-000.parquet").unlink(), "has no data/chunk"),
    "no tasks": (lambda root: (root / "meta/tasks.parquet").unlink(), "has no meta/tasks.parquet"),
    "no stats": (
        lambda root: edit_json(root / "meta/stats.json", **{ACTION: None}),
        "has 0 numbers for action.mean, needs 3",
    ),
    "stats that are no numbers": (
        lambda root: edit_json(root / "meta/stats.json", **{ACTION: {"mean": ["a", "b", "c"]}}),
        "something else than numbers for action.mean",
    ),
    "stats that are not finite": (
        lambda root: edit_json(root / "meta/stats.json", **{ACTION: {"mean": [0, 0, float("nan")]}}),
        "not finite for action.mean",
    ),
    "no split to train on": (lambda root: edit_json(root / "meta/info.json", splits={"val": "9:12"}), "split 'train'"),
    "shared episodes": (
        lambda root: edit_json(root / "meta/info.json", splits={"train": "0:12", "val": "9:12"}),
        "train and val that share episodes",
    ),
    "wrong split": (
        lambda root: edit_json(root / "meta/info.json", splits={"val": "9:99"}),
        "val='9:99' of 12 episodes",
    ),
    "wrong domains": (lambda root: edit_json(root / "meta/domains.json", lift=["fly"]), "must name each task"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_what_is_missing_is_named(root: Path, defect: str) -> None:
    damage, message = DEFECTS[defect]
    damage(root)
    with pytest.raises(DatasetError) as caught:
        read_dataset(root)
    assert message in str(caught.value)


def test_nothing_is_overwritten_and_nothing_half_done_left(root: Path, tmp_path: Path) -> None:
    before = (root / "meta/info.json").read_bytes()
    with pytest.raises(FileExistsError):
        write_dataset(root, synthetic_episodes(2), fps=10)
    assert (root / "meta/info.json").read_bytes() == before
    ragged = [*synthetic_episodes(2), *synthetic_episodes(1, frames=4)]
    object.__setattr__(ragged[1], "action", ragged[1].action[:, :2])
    with pytest.raises(ValueError):
        write_dataset(tmp_path / "ragged", ragged, fps=10, domains=DOMAINS)
    assert not (tmp_path / "ragged").exists()
