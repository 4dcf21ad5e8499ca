# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Records Meta-World's scripted experts into a LeRobot data set: successful episodes of several tasks."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from cosmos_framework.data.lerobot import write_dataset
from cosmos_framework.sim.metaworld import DOMAINS, FPS, record_expert

ARGUMENTS_FILE = "collect_demos.json"


def main() -> None:
    """Records what the command line asks for, unless it is there already."""
    args = parse_args()
    domains = {name: [task for task in tasks if task in args.tasks] for name, tasks in DOMAINS.items()}
    domains = {name: tasks for name, tasks in domains.items() if tasks}
    wanted = {"domains": domains, "episodes": args.episodes, "held_out": args.held_out, "seed": args.seed}
    recorded_as = args.root / "meta" / ARGUMENTS_FILE
    if args.root.exists():
        if recorded_as.is_file() and json.loads(recorded_as.read_text()) == wanted:
            print(f"{args.root} is there already")
            return
        sys.exit(f"{args.root} exists and was recorded with other arguments; remove it or choose another --root")
    per_task = args.episodes + args.held_out
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        by_task = list(pool.map(record_expert, args.tasks, [per_task] * len(args.tasks), [args.seed] * len(args.tasks)))
    training = [episode for episodes in by_task for episode in episodes[: args.episodes]]
    held_out = [episode for episodes in by_task for episode in episodes[args.episodes :]]
    write_dataset(
        args.root,
        training + held_out,
        fps=FPS,
        domains=domains,
        validation_episodes=len(held_out),
        robot_type="metaworld sawyer",
        more_meta={ARGUMENTS_FILE: wanted},
    )
    print(f"{args.root}: {len(training)} episodes to train on, {len(held_out)} held out, {len(args.tasks)} tasks")


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    known = [task for tasks in DOMAINS.values() for task in tasks]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("datasets/metaworld"), help="folder of the data set")
    parser.add_argument("--tasks", nargs="+", choices=known, default=known, help="Meta-World tasks")
    parser.add_argument("--episodes", type=int, default=30, help="successful episodes of each task to train on")
    parser.add_argument(
        "--held-out",
        type=int,
        default=2,
        help="more of each task for validation; without any, training holds out the last tenth of what there is",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of goals and placements")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    args = parser.parse_args()
    if args.episodes < 1 or args.held_out < 0 or args.workers < 1:
        parser.error("--episodes and --workers must be at least 1, --held-out at least 0")
    return args


if __name__ == "__main__":
    main()
