# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Tries a trained action policy in closed loop in Meta-World, and reports each task's success rate."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

from cosmos_framework.checkpoint.dcp import CheckpointError, load_model
from cosmos_framework.data.lerobot import DatasetError, read_dataset
from cosmos_framework.model.action_policy import ActionPolicyModel, build_action_policy
from cosmos_framework.sim.metaworld import try_policy

# Far from the seeds of demonstrations, so that every goal is new.
FIRST_SEED = 1_000_000


def main() -> None:
    """Evaluates what the command line asks for."""
    args = parse_args()
    config_file = args.run / "config.yaml"
    if not config_file.is_file():
        sys.exit(f"{args.run} has no config.yaml; --run is the folder of a training run")
    try:
        dataset = read_dataset(dataset_root(args.run, args.dataset))
    except DatasetError as error:
        sys.exit(str(error))
    trials = [
        (args, domain, task_index, dataset.tasks[task_index])
        for domain, members in enumerate(dataset.domains.values())
        for task_index in members
    ]
    chunk = OmegaConf.load(config_file).dataset.chunk
    if args.execute > chunk:
        sys.exit(f"--execute {args.execute} is more than the {chunk} actions of a chunk that the policy gives")
    try:
        with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
            rates = dict(pool.map(success_rate, trials))
    except CheckpointError as error:
        sys.exit(str(error))
    report = {"success": rates, "mean": sum(rates.values()) / len(rates), "episodes": args.episodes, "seed": args.seed}
    args.output = args.output or args.run / "evaluation.json"
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    for task, rate in [*rates.items(), ("mean", report["mean"])]:
        print(f"{task:<28} {rate:6.0%}")


def dataset_root(run: Path, given: Path | None) -> Path:
    """Returns where the data set is: as given, or as the run had it."""
    return given or Path(OmegaConf.load(run / "config.yaml").dataset.root)


def success_rate(trial: tuple[argparse.Namespace, int, int, str]) -> tuple[str, float]:
    """Runs one task's trials; returns the task and the share of them that succeeded."""
    args, domain, task_index, task = trial
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model, history = load_policy(args.run, args.dataset)

    def policy(states: np.ndarray) -> np.ndarray:
        batch = {
            "observation.state": torch.from_numpy(states),
            "task_index": torch.full((len(states),), task_index),
            "domain": domain,
        }
        return model.sample_actions(batch).numpy()

    seeds = range(FIRST_SEED + args.seed, FIRST_SEED + args.seed + args.episodes)
    succeeded = try_policy(policy, task, seeds, history, args.execute)
    return task, sum(succeeded) / len(succeeded)


def load_policy(run: Path, dataset: Path | None) -> tuple[ActionPolicyModel, int]:
    """Builds the run's policy with the weights of its latest checkpoint; returns it and its history's length."""
    config = OmegaConf.load(run / "config.yaml")
    config.dataset.root = str(dataset_root(run, dataset))
    model = build_action_policy(config.model, config.dataset)
    load_model(model, run)
    return model.eval(), config.dataset.history


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a training run")
    parser.add_argument("--dataset", type=Path, help="folder of its data set, if it has moved")
    parser.add_argument("--episodes", type=int, default=20, help="trials of each task")
    parser.add_argument("--execute", type=int, default=8, help="actions of a chunk that are carried out")
    parser.add_argument("--seed", type=int, default=0, help="of goals and of sampling")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--output", type=Path, help="JSON file of the rates (default: RUN/evaluation.json)")
    args = parser.parse_args()
    if min(args.episodes, args.execute, args.workers) < 1:
        parser.error("--episodes, --execute and --workers must be at least 1")
    return args


if __name__ == "__main__":
    main()
