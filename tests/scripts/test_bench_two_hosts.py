# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="extra `report`")
pytest.importorskip("pyarrow", reason="extra `data`")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench_two_hosts.py"
TINY = ["--rate-mbit=1000", "--rounds=1", "--parallelisms=hsdp", "--accumulations=2", "--out"]
TINY_MODEL = ["model.depth=1", "model.head_width=8", "dataloader_train.batch_size=2"]


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python has it for a script."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def module(name: str) -> ModuleType:
    return importlib.import_module(f"two_hosts.{name}")


# What is measured


def test_every_combination_that_differs_is_a_case() -> None:
    cases = module("cases")
    settings = cases.Settings(
        link=module("network").Link(100),
        calibrate=False,
        rounds=1,
        parallelisms=("ddp", "fsdp", "hsdp"),
        accumulations=(1, 4),
        overrides=("model.depth=2",),
    )
    found = cases.cases_of(settings, parameter_bytes=2**29)
    assert len(found) == len(set(found)) == 2 * (2 + 6 + 6) + 5
    assert {case.mode for case in found if case.parallelism == "ddp"} == {"none", "all_reduce"}
    assert [case.memory_gib for case in found if case.mode == "auto"] == [0, 0.25, 0.5, 0.75, math.inf]
    assert all(case.baseline in found for case in found)
    assert [cases.Case.from_dict(json.loads(strict_json(case.to_dict()))) for case in found] == found
    assert cases.Settings.from_json(settings.to_json()) == settings


def strict_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


# What is shown


def entry(
    mode: str, accum: int, seconds: list[float], inner_s: list[float] | None = None, reshard: bool = True
) -> dict[str, Any]:
    inner: list[Any] = inner_s or [0.0] * len(seconds)
    return {
        "parallelism": "hsdp",
        "mode": mode,
        "reshard": reshard,
        "accum": accum,
        "memory_gib": None,
        "weight": {"held_bytes": 2**20, "gathered_bytes": 0, "peak_bytes": 3 * 2**20},
        "windows": [
            {"seconds": window_s, "inner_s": step_s, "link_bytes": 2**21}
            for window_s, step_s in zip(seconds, inner, strict=True)
        ],
    }


def users_measurement() -> dict[str, Any]:
    """Two hosts of eight GPUs; compute 10.8 s and sync 11.4 s a micro-batch."""
    return {
        "machine": {"cpu": "some", "cores": 2, "memory_gib": 8.0, "kernel": "6", "python": "3", "torch": "2"},
        "link": {"rate_mbit": 100.0, "latency_ms": 0.0},
        "parameters": 10**6,
        "samples_per_micro_step": 16,
        "cases": [
            entry("none", 1, [22.2, 22.1, 30.0]),
            entry("none", 4, [88.8, 88.8, 88.8], [22.2, 22.2, 22.2]),
            entry("all_reduce", 4, [54.9, 54.3, 54.3], [10.8, 11.0, 10.7]) | {"predicted_s": 54.6},
        ],
    }


def test_medians_ratios_and_the_ideal_are_those_of_the_users_measurement() -> None:
    none_1, none_4, all_reduce_4 = module("summary").rows(users_measurement())
    assert (none_1.seconds, none_1.fastest_s, none_1.slowest_s, none_1.speedup) == (22.2, 22.1, 30.0, 1)
    assert none_4.ideal_s == all_reduce_4.ideal_s == pytest.approx(4 * 10.8 + 11.4)
    assert all_reduce_4.speedup == pytest.approx(88.8 / 54.3)
    assert all_reduce_4.over_ideal == pytest.approx(54.3 / 54.6 - 1)
    assert all_reduce_4.prediction_error == pytest.approx(54.6 / 54.3 - 1)
    assert all_reduce_4.samples_per_s == pytest.approx(4 * 16 / 54.3)
    assert (all_reduce_4.link_mib, all_reduce_4.held_mib, all_reduce_4.peak_mib) == (2, 1, 3)


def test_without_a_long_window_there_is_no_ideal() -> None:
    measured = users_measurement()
    measured["cases"] = measured["cases"][:2]
    assert module("summary").ideals_of(measured) == {}
    assert all(row.over_ideal is None for row in module("summary").rows(measured))


def test_the_report_has_tables_and_plots(tmp_path: Path) -> None:
    measured = users_measurement()
    budgets = [entry("auto", 4, [seconds] * 3) | {"memory_gib": gib} for gib, seconds in ((0, 54.3), ("inf", 54.0))]
    measured["cases"] += budgets
    module("report").write(measured, tmp_path / "out")

    page = (tmp_path / "out" / "README.md").read_text()
    assert "| HSDP | all_reduce | 4 | 54.30 (54.30–54.90) | 1 | x1.64 | 54.60 (-1%) | 54.60 (+1%) |" in page
    assert "| HSDP | auto, all that saves | 4 |" in page
    with (tmp_path / "out" / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [float(line["seconds"]) for line in lines] == [22.2, 88.8, 54.3, 54.3, 54.0]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == measured
    for plot in ("window_time", "time_memory", "budgets"):
        assert f"({plot}.svg)" in page
        assert "<svg" in (tmp_path / "out" / f"{plot}.svg").read_text()


# The hosts


def test_what_is_missing_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert importlib.import_module("bench_two_hosts").main(["--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    for words in ("root", "sudo", "apt-get install iproute2"):
        assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture
def hosts_can_be_made() -> None:
    network = module("network")
    try:
        with network.two_hosts(network.Link(100)):
            pass
    except network.NetworkError as error:
        pytest.skip(str(error))


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def pids_in(namespace: str) -> list[str]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return found.stdout.split()


def is_running(pid: str) -> bool:
    """A process that has ended and that nobody has waited for has no command line any more."""
    try:
        return Path("/proc", pid, "cmdline").read_bytes() != b""
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("hosts_can_be_made")
def test_a_setting_that_cannot_be_trained_ends_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = importlib.import_module("bench_two_hosts").main([*TINY, str(tmp_path / "out"), "model.depth=0"])
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (1, 1)
    assert "model.depth=0" in said


@pytest.mark.usefixtures("hosts_can_be_made")
def test_hosts_are_removed_with_what_runs_on_them() -> None:
    network = module("network")
    with pytest.raises(ZeroDivisionError):
        with network.two_hosts(network.Link(25)) as hosts:
            shaped = subprocess.run(
                ["tc", "-netns", hosts[1].namespace, "qdisc"], capture_output=True, text=True, check=True
            )
            assert "rate 25Mbit" in shaped.stdout
            for host in hosts:  # it does not help to leave the process group
                host.start(["setsid", "sleep", "600"], dict(os.environ)).wait()
            pids = [pid for host in hosts for pid in pids_in(host.namespace)]
            _ = 1 / 0
    assert len(pids) == 2 and not any(map(is_running, pids))
    assert not any(host.namespace in namespaces() for host in hosts)


@pytest.mark.usefixtures("hosts_can_be_made")
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    network = module("network")
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = f"two-hosts-{ended.pid}-0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with network.two_hosts(network.Link(25)) as hosts:
        assert left not in namespaces()
        assert hosts[0].namespace in namespaces()


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("hosts_can_be_made")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_takes_everything_down(number: signal.Signals, code: int, tmp_path: Path) -> None:
    bench = start(*TINY, str(tmp_path / "out"), *TINY_MODEL)
    second_host = f"two-hosts-{bench.pid}-1"
    for _ in range(600):
        if (pids := pids_in(second_host)) or bench.poll() is not None:
            break
        time.sleep(0.1)
    bench.send_signal(number)
    bench.communicate(timeout=60)
    assert bench.returncode == code
    assert f"two-hosts-{bench.pid}-" not in namespaces()
    assert pids and not any(map(is_running, pids))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("hosts_can_be_made")
def test_a_failing_rank_takes_everything_down(tmp_path: Path) -> None:
    (tmp_path / "no dataset").mkdir()
    bench = start(*TINY, str(tmp_path / "out"), f"dataset.root='{tmp_path / 'no dataset'}'")
    _, said = bench.communicate(timeout=120)
    assert bench.returncode == 1
    assert "DatasetError" in said and "ended with code 1" in said.splitlines()[-1]
    assert f"two-hosts-{bench.pid}-" not in namespaces()


@pytest.mark.slow
@pytest.mark.usefixtures("hosts_can_be_made")
def test_a_tiny_run_counts_what_crosses_the_link(tmp_path: Path) -> None:
    bench = start(*TINY, str(tmp_path / "out"), *TINY_MODEL)
    _, said = bench.communicate(timeout=240)
    assert bench.returncode == 0, said
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = {(row.case.mode, row.case.reshard, row.case.accum): row for row in module("summary").rows(results)}
    assert len(rows) == 6
    gradient_mib = results["parameters"] * 4 / 2**20
    none, waits = rows["none", True, 2], rows["all_reduce", True, 2]
    # Each host sends the whole gradient once a sync: two ranks, each its shard. Clipping and headers come on top.
    assert none.link_mib - waits.link_mib == pytest.approx(2 * gradient_mib, rel=0.5)
    assert (none.held_mib, none.gathered_mib) == (0, 0)
    assert waits.held_mib == pytest.approx(gradient_mib / 2, rel=0.1)
    assert rows["grad_sync", False, 2].held_mib == pytest.approx(gradient_mib, rel=0.1)
    assert rows["grad_sync", False, 2].gathered_mib == pytest.approx(gradient_mib, rel=0.1)
