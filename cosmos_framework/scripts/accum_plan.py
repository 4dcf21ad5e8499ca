# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Says what each mode of gradient accumulation takes and holds for a model on a mesh, and which one to choose."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cosmos_framework.scripts.arguments import count, not_negative, positive
from cosmos_framework.scripts.train import build_dataloaders
from cosmos_framework.trainer.trial import Measurement, Trial
from cosmos_framework.utils import distributed, misc
from cosmos_framework.utils.accum_cost import Figures, Job, Prediction, Way, choose, predict
from cosmos_framework.utils.config import ConfigError, check_config, load_config

GIB = 2**30
EXAMPLES = """examples:
  torchrun --nproc_per_node=4 -m cosmos_framework.scripts.accum_plan recipe=action_policy parallelism=hsdp
      measures a few windows on the mesh that torchrun starts; the overrides are those of cosmos-train
  cosmos-accum-plan --compute-s 10.8 --all-reduce-s 11.4 --parameters 2e9 --shard-degree 8 --replicate-degree 2
      works it out for a cluster that is not there yet, from the seconds of one micro-step
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Options and overrides; those of the command line if None.

    Returns:
        The exit code: 0, or 2 for options or a configuration that cannot be used; rank 0 has said on standard error
        what is wrong.
    """
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    is_rank0 = os.environ.get("RANK", "0") == "0"
    try:
        _check(args)
        memory_bytes = math.inf if args.memory_gib is None else args.memory_gib * GIB
        if args.compute_s:
            figures = _figures_of_job(args)
        else:
            figures = _measured_figures(args.overrides, args.repeats, memory_bytes)
    except ConfigError as error:
        if is_rank0:
            print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if is_rank0:
        windows = {accum: [predict(figures, way, accum) for way in figures.costs] for accum in args.accum}
        print(_table(windows))
        for predictions in windows.values():
            print(_advice(predictions, memory_bytes))
        if figures.too_large:
            print(_too_large(figures, memory_bytes))
        if args.plot:
            _plot(windows, args.plot)
            print(f"plot: {args.plot}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cosmos-accum-plan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--accum", type=_counts, default=[1, 2, 4, 8], metavar="N,N,…", help="micro-steps of a window")
    parser.add_argument("--memory-gib", type=not_negative, help="GiB that each rank can spare; no limit without it")
    parser.add_argument("--plot", type=_picture, metavar="FILE", help="draws the predictions, as .png, .svg or .pdf")
    measured = parser.add_argument_group("measured")
    measured.add_argument("--repeats", type=count, default=3, help="windows that a median is of")
    measured.add_argument("overrides", nargs="*", metavar="FIELD=VALUE", help="such as parallelism=hsdp")
    given = parser.add_argument_group("given", "seconds that one micro-step takes, or waits for all its collectives")
    given.add_argument("--compute-s", type=positive, help="forward and backward alone")
    given.add_argument("--all-reduce-s", type=not_negative, help="gradients over dp_replicate")
    given.add_argument("--reduce-scatter-s", type=not_negative, help="gradients over dp_shard")
    given.add_argument(
        "--all-gather-s", type=not_negative, help="parameters over dp_shard, once; resharding does it twice"
    )
    given.add_argument("--parameters", type=count, help="of the whole model, such as 2e9")
    given.add_argument("--shard-degree", type=count, help="ranks that hold one copy together")
    given.add_argument("--replicate-degree", type=count, help="number of copies")
    given.add_argument("--param-bytes", type=count, help="bytes of a gathered parameter (2: bfloat16)")
    given.add_argument("--reduce-bytes", type=count, help="bytes of a gradient when it is reduced (4: float32)")
    given.add_argument("--samples-per-micro-step", type=count, help="over all ranks")
    return parser


JOB_OPTIONS = (
    "all_reduce_s",
    "reduce_scatter_s",
    "all_gather_s",
    "parameters",
    "shard_degree",
    "replicate_degree",
    "param_bytes",
    "reduce_bytes",
    "samples_per_micro_step",
)


def _check(args: argparse.Namespace) -> None:
    given = [name for name in JOB_OPTIONS if getattr(args, name) is not None]
    if args.compute_s is None and given:
        raise ConfigError(
            f"{_option(given[0])} needs --compute-s, the seconds of forward and backward; or leave it out."
        )
    if args.compute_s is not None and args.overrides:
        raise ConfigError(
            f"{args.overrides[0]} is for a model that is measured, --compute-s for one that is not there: give either."
        )
    if args.compute_s is not None and args.memory_gib is not None and args.parameters is None:
        raise ConfigError(f"--memory-gib={args.memory_gib:g} needs --parameters to know what a mode holds.")
    if args.plot is not None:
        _pyplot()


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _figures_of_job(args: argparse.Namespace) -> Figures:
    given = {name: value for name in JOB_OPTIONS if (value := getattr(args, name)) is not None}
    return Job(compute_s=args.compute_s, **given).figures()


def _measured_figures(overrides: list[str], repeats: int, memory_bytes: float) -> Figures:
    """Measures on all ranks of torchrun, or in this process alone.

    Raises:
        ConfigError: The configuration, or its data set, cannot be used.
    """
    config = load_config(overrides)
    check_config(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    dataloader, _ = build_dataloaders(config)
    # The modes' warnings are what the table is about.
    logging.getLogger("cosmos_framework.utils.grad_sync").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, misc.repeatable_cpu_numerics():
        config.job.path_local = folder
        trial = Trial(config, dataloader)
        measurement = Measurement(trial, memory_bytes)
        for _ in range(1 + repeats):
            measurement.add_round()
        figures = measurement.figures()
        distributed.barrier()
        trial.close()
    return figures


def _table(windows: dict[int, list[Prediction]]) -> str:
    lines = ["grad_accum_iter  mode                          s/window  samples/s  against none  GiB per rank"]
    for accum, predictions in windows.items():
        lines += [
            f"{accum:15d}  {each.way!s:26s}  {each.window_s:10.4g}  {each.samples_per_s:9.4g}  "
            f"{f'x{each.speedup:.2f}':>12s}  {each.held_bytes / GIB:12.3f}"
            for each in predictions
        ]
    return "\n".join(lines)


def _advice(predictions: list[Prediction], memory_bytes: float) -> str:
    """Says what to choose for one accumulation."""
    best, fastest = choose(predictions, memory_bytes), choose(predictions, math.inf)
    line = f"grad_accum_iter={best.accum}: {_overrides(best.way)} takes {best.window_s:.4g} s (x{best.speedup:.2f})"
    if best == fastest:
        return line
    line += f"; without the limit of {memory_bytes / GIB:g} GiB {_overrides(fastest.way)} x{fastest.speedup:.2f}"
    return line + _in_between({each.way: each.held_bytes for each in predictions}, memory_bytes)


def _too_large(figures: Figures, memory_bytes: float) -> str:
    """Says what was not run."""
    sizes = ", ".join(f"{way} ({held_bytes / GIB:.3g} GiB)" for way, held_bytes in figures.too_large.items())
    held_bytes = {way: cost.held_bytes for way, cost in figures.costs.items()}
    return f"not run, over {memory_bytes / GIB:g} GiB: {sizes}{_in_between(held_bytes, memory_bytes)}"


def _in_between(held_bytes: dict[Way, int], memory_bytes: float) -> str:
    """Names the budget of mode "auto", which starts from all_reduce, where that fits."""
    left = memory_bytes - held_bytes.get(Way("all_reduce"), math.inf)
    if left <= 0:
        return ""
    return f"; in between trainer.fsdp_accum_mode=auto trainer.fsdp_accum_memory_gib={left / GIB:.3g}"


def _overrides(way: Way) -> str:
    return f"trainer.fsdp_accum_mode={way.mode} trainer.fsdp_accum_reshard={str(way.reshard).lower()}"


def _pyplot():  # type: ignore[no-untyped-def]
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'cosmos-framework[report]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _plot(windows: dict[int, list[Prediction]], path: Path) -> None:
    """Draws time against accumulation, and time against memory in the longest windows."""
    figure, (by_accum, by_memory) = _pyplot().subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for of_way in zip(*windows.values(), strict=True):
        style = {"marker": "o", "linestyle": "-" if of_way[0].way.reshard else "--", "label": str(of_way[0].way)}
        (line,) = by_accum.plot([each.accum for each in of_way], [each.window_s for each in of_way], **style)
        longest = max(of_way, key=lambda each: each.accum)
        by_memory.plot(longest.held_bytes / GIB, longest.window_s, "o", color=line.get_color(), label=str(longest.way))
    by_accum.set(xlabel="micro-steps of a window", ylabel="seconds per window", title="predicted time")
    by_memory.set(
        xlabel="GiB that a rank holds inside a window",
        ylabel="seconds per window",
        title=f"time against memory, {max(windows)} micro-steps",
    )
    for axes in (by_accum, by_memory):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    by_accum.legend()
    figure.savefig(path)


def _counts(text: str) -> list[int]:
    return sorted({count(each) for each in text.split(",")})


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf") or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} must end in .png, .svg or .pdf and lie in an existing folder")
    return path


if __name__ == "__main__":
    sys.exit(main())
