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
from omegaconf import DictConfig, OmegaConf

from cosmos_framework.checkpoint.dcp import CheckpointError, find_checkpoint, load_model
from cosmos_framework.data.lerobot import DatasetError, LeRobotDataset, read_dataset
from cosmos_framework.model.action_policy import ActionPolicyConfig, ActionPolicyModel, build_action_policy
from cosmos_framework.sim.metaworld import make_env, try_policy

# Mixed into the seeds, so that no goal is one of the demonstrations'.
EVALUATION = 1_000_000


def main() -> None:
    """Evaluates what the command line asks for."""
    args = parse_args()
    output = args.output or args.run / "evaluation.json"
    try:
        config = load_config(args.run, args.dataset)
        dataset = read_dataset(config.dataset.root)
        check(args.execute, output, config, dataset)
        find_checkpoint(args.run)
        trials = [
            (args, config, domain, task_index, dataset.tasks[task_index])
            for domain, members in enumerate(dataset.domains.values())
            for task_index in members
        ]
        with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
            rates = dict(pool.map(success_rate, trials))
    except DatasetError as error:
        sys.exit(f"{error} (--dataset names the folder of the data set, if it has moved)")
    except (CheckpointError, EvaluationError) as error:
        sys.exit(str(error))
    report = {"success": rates, "mean": sum(rates.values()) / len(rates), "episodes": args.episodes, "seed": args.seed}
    output.write_text(json.dumps(report, indent=2) + "\n")
    for task, rate in [*rates.items(), ("mean", report["mean"])]:
        print(f"{task:<28} {rate:6.0%}")


class EvaluationError(ValueError):
    """What is asked for cannot be evaluated; the message says why."""


def load_config(run: Path, dataset: Path | None) -> DictConfig:
    """Reads how a run was configured.

    Args:
        run: its folder.
        dataset: where its data set is now, if it has moved.

    Raises:
        EvaluationError: it is no run, or one of another model.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise EvaluationError(f"{run} has no config.yaml; --run is the folder of a training run")
    config = OmegaConf.load(file)
    assert isinstance(config, DictConfig)
    if config.model._target_ != ActionPolicyConfig._target_:
        raise EvaluationError(f"{run} trained {config.model._target_}; only {ActionPolicyConfig._target_} can be tried")
    if dataset:
        config.dataset.root = str(dataset)
    return config


def check(execute: int, output: Path, config: DictConfig, dataset: LeRobotDataset) -> None:
    """Finds out before the first trial what would fail in or after it.

    Args:
        execute: actions of a chunk that are carried out.
        output: file of the report.
        config: of the run.
        dataset: that it was trained on.

    Raises:
        EvaluationError: something would fail.
    """
    chunk = config.dataset.chunk
    if execute > chunk:
        raise EvaluationError(f"--execute {execute} is more than the {chunk} actions of a chunk that the policy gives")
    if not output.parent.is_dir():
        raise EvaluationError(f"--output {output}: there is no folder {output.parent}")
    for task in dataset.tasks:
        try:
            env = make_env(task)
        except ValueError as error:
            raise EvaluationError(str(error)) from error
        simulated = env.observation_space.shape[0], env.action_space.shape[0]
        recorded = dataset.state.shape[1], dataset.action.shape[1]
        if simulated != recorded:
            raise EvaluationError(
                f"{task} has states of {simulated[0]} numbers and actions of {simulated[1]}; "
                f"{config.dataset.root} has {recorded[0]} and {recorded[1]}"
            )


def success_rate(trial: tuple[argparse.Namespace, DictConfig, int, int, str]) -> tuple[str, float]:
    """Runs one task's trials; returns the task and the share of them that succeeded."""
    args, config, domain, task_index, task = trial
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = load_policy(args.run, config)

    def policy(states: np.ndarray) -> np.ndarray:
        batch = {
            "observation.state": torch.from_numpy(states),
            "task_index": torch.full((len(states),), task_index),
            "domain": domain,
        }
        return model.sample_actions(batch).numpy()

    seeds = np.random.SeedSequence((EVALUATION, args.seed)).generate_state(args.episodes).tolist()
    succeeded = try_policy(policy, task, seeds, config.dataset.history, args.execute)
    return task, sum(succeeded) / len(succeeded)


def load_policy(run: Path, config: DictConfig) -> ActionPolicyModel:
    """Builds a run's policy with the weights of its latest checkpoint."""
    model = build_action_policy(config.model, config.dataset)
    load_model(model, run)
    return model.eval()


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
