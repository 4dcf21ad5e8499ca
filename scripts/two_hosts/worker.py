# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""What each of the four ranks runs: `torchrun … -m two_hosts.worker FOLDER`, inside its host.

FOLDER, which both hosts see, has `settings.json`; rank 0 adds `measured.json`.
"""

from __future__ import annotations

import json
import logging
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos_framework.data.lerobot import Episode, write_dataset
from cosmos_framework.scripts.train import build_dataloaders
from cosmos_framework.trainer.trial import Measurement, Trial
from cosmos_framework.utils import distributed, misc
from cosmos_framework.utils.accum_cost import Figures, Way, predict
from cosmos_framework.utils.config import load_config
from two_hosts.cases import PARALLELISMS, RECIPE, Case, Settings, cases_of
from two_hosts.network import Link, shape
from two_hosts.windows import Timing, Weight, keep_freed_memory, parameter_bytes, time_window, weigh_window

# Compute and sync of one micro-batch, in seconds, on the two hosts that the user measured.
USERS_SYNC_TO_COMPUTE = 11.4 / 10.8
CALIBRATION_TOLERANCE = 0.03
CALIBRATION_ATTEMPTS = 8


@dataclass(frozen=True)
class MicroStep:
    """What a micro-step of HSDP takes in mode "none".

    Attributes:
        compute_s: Seconds without the all-reduce between the hosts.
        sync_s: Seconds that the all-reduce adds.
    """

    compute_s: float
    sync_s: float


def main(folder: Path) -> None:
    """Measures what the settings ask for.

    Args:
        folder: Has the settings, and gets what was measured.
    """
    settings = Settings.from_json((folder / "settings.json").read_text())
    torch.set_num_threads(1)
    keep_freed_memory()
    # What a mode cannot save here is what is being measured.
    logging.disable(logging.WARNING)
    distributed.init(timeout=timedelta(minutes=5))
    with misc.repeatable_cpu_numerics():
        measured = _measure(settings, folder)
    if distributed.is_rank0():
        (folder / "measured.json").write_text(json.dumps(measured))
    distributed.barrier()
    distributed.destroy_process_group()


def _measure(settings: Settings, folder: Path) -> dict[str, Any]:
    _write_demonstrations(folder / "dataset")
    trials = {name: _trial(name, settings, folder) for name in settings.parallelisms}
    link = settings.link
    if settings.calibrate:
        link = calibrate(trials.get("hsdp") or _trial("hsdp", settings, folder), link)
    any_trial = next(iter(trials.values()))
    cases = cases_of(settings, parameter_bytes(any_trial))
    measurements = {name: Measurement(trial) for name, trial in trials.items()}
    weights = _warm_up(trials, cases, measurements)
    timings = _time(trials, cases, measurements, settings.rounds)
    figures = {name: measurement.figures() for name, measurement in measurements.items()}
    return {
        "link": asdict(link),
        "recipe": [*RECIPE, *settings.overrides],
        "parameters": sum(parameter.numel() for parameter in any_trial.model.parameters()),
        "samples_per_micro_step": any_trial.samples_per_micro_step,
        "cases": [
            {
                **case.to_dict(),
                "predicted_s": predicted_s(figures[case.parallelism], case),
                "weight": asdict(weights[case]),
                "windows": [asdict(timing) for timing in timings[case]],
            }
            for case in cases
        ],
    }


def predicted_s(figures: Figures, case: Case) -> float | None:
    """Returns what `cosmos-accum-plan` says that a window of `case` takes; nothing of mode "auto"."""
    way = Way(case.mode, case.reshard)
    return predict(figures, way, case.accum).window_s if way in figures.costs else None


def _write_demonstrations(root: Path) -> None:
    """Noise in the shapes of Meta-World's demonstrations: what is learned takes no part in the time."""
    if distributed.is_rank0():
        random_numbers = np.random.default_rng(0)
        states = random_numbers.normal(size=(16, 100, 39)).astype(np.float32)
        actions = random_numbers.normal(size=(16, 100, 4)).astype(np.float32)
        write_dataset(root, [Episode(*pair, "noise") for pair in zip(states, actions, strict=True)], fps=80)
    distributed.barrier()


def _trial(name: str, settings: Settings, folder: Path) -> Trial:
    job = [f"dataset.root={folder / 'dataset'}", f"job.name={name}"]
    config = load_config([*RECIPE, *job, *PARALLELISMS[name], *settings.overrides])
    dataloader, _ = build_dataloaders(config)
    trial = Trial(config, dataloader)
    # The optimizer makes its state, and DDP's static graph records itself.
    time_window(trial, Case(name, "none", True, 1))
    return trial


def calibrate(trial: Trial, link: Link) -> Link:
    """Finds the rate at which compute and sync are in the user's proportion, and leaves the link at it.

    Args:
        trial: Under HSDP.
        link: Where to start.

    Returns:
        The link as it is then; on a busy machine its proportion can be off, which the results tell.
    """
    estimates: list[float] = []
    for _ in range(CALIBRATION_ATTEMPTS):
        step = measure_micro_step(trial)
        # A sync too short to be measured tells no more than that the link is far too fast.
        excess = max(step.sync_s / step.compute_s / USERS_SYNC_TO_COMPUTE, 0.1)
        _say(f"{link.rate_mbit:.1f} Mbit/s: compute {step.compute_s:.3f} s, sync {step.sync_s:.3f} s a micro-step")
        if abs(excess - 1) <= CALIBRATION_TOLERANCE:
            return link
        estimates.append(link.rate_mbit * excess)
        link = replace(link, rate_mbit=statistics.median(estimates[-3:]))
        distributed.barrier()
        if int(os.environ["LOCAL_RANK"]) == 0:
            shape(link)
        distributed.barrier()
    _say(f"no rate within {CALIBRATION_TOLERANCE:.0%} of the proportion: is something else running on this machine?")
    return link


def measure_micro_step(trial: Trial, windows: int = 8) -> MicroStep:
    """Measures compute and sync of one micro-step, medians over `windows` windows of each kind in turns."""
    waits, syncs = Case("hsdp", "all_reduce", True, 6), Case("hsdp", "none", True, 6)
    pairs = [(time_window(trial, waits).inner_s, time_window(trial, syncs).inner_s) for _ in range(windows)]
    compute_s, both_s = map(statistics.median, zip(*pairs, strict=True))
    return MicroStep(compute_s, both_s - compute_s)


def _warm_up(trials: dict[str, Trial], cases: list[Case], measurements: dict[str, Measurement]) -> dict[Case, Weight]:
    """Weighs every case, which warms it up for the timed windows as well."""
    begin = time.perf_counter()
    weights = {case: weigh_window(trials[case.parallelism], case) for case in cases}
    for measurement in measurements.values():
        measurement.add_round()
    _say(f"warm-up, in which memory is measured: {len(cases)} windows, {time.perf_counter() - begin:.0f} s")
    return weights


def _time(
    trials: dict[str, Trial], cases: list[Case], measurements: dict[str, Measurement], rounds: int
) -> dict[Case, list[Timing]]:
    """Times one window of each case a round, in an order that is the same on all ranks and another each round.

    What the predictions are made from is measured in between, so that a slow minute of the machine hits both alike.
    """
    timings = defaultdict(list)
    steps: list[Case | Measurement] = [*cases, *measurements.values()]
    for index in range(rounds):
        begin = time.perf_counter()
        for step in random.Random(index).sample(steps, len(steps)):
            if isinstance(step, Case):
                timings[step].append(time_window(trials[step.parallelism], step))
            else:
                step.add_round()
        _say(f"round {index + 1} of {rounds}: {len(cases)} windows, {time.perf_counter() - begin:.0f} s")
    return timings


@distributed.rank0_only
def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
