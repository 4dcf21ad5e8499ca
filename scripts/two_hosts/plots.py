# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""The plots, as SVG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import matplotlib

matplotlib.use("svg")
# Text stays text; the same numbers give the same file.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "two-hosts", "axes.grid": True, "grid.alpha": 0.3})

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from two_hosts.cases import Case  # noqa: E402
from two_hosts.summary import Ideal, Row  # noqa: E402

K = TypeVar("K")

COLOURS = {"none": "tab:gray", "all_reduce": "tab:blue", "grad_sync": "tab:orange"}
HELD = "gradient held and parameters kept, MiB per rank"
TITLES = {"ddp": "DDP", "ddp_static_graph": "DDP, static_graph", "fsdp": "FSDP", "hsdp": "HSDP"}


def plot_window_time(rows: Sequence[Row], ideals: dict[str, Ideal], path: Path) -> None:
    """Draws seconds per window against accumulation, a panel for each parallelism, with the ideal line."""

    def draw(axes: Axes, parallelism: str, shown: list[Row]) -> None:
        for (mode, reshard), line in _grouped(shown, lambda row: (row.case.mode, row.case.reshard)):
            accums, seconds = [row.case.accum for row in line], [row.seconds for row in line]
            axes.plot(accums, seconds, **_style(mode, reshard), label=_label(mode, reshard))
            axes.fill_between(
                accums,
                [row.fastest_s for row in line],
                [row.slowest_s for row in line],
                color=COLOURS[mode],
                alpha=0.15,
            )
        accums = sorted({row.case.accum for row in shown})
        if parallelism in ideals:
            ideal = [ideals[parallelism].window_s(accum) for accum in accums]
            axes.plot(accums, ideal, color="black", linestyle=":", label="N x compute + 1 x sync")
        axes.set(xlabel="micro-steps of a window, N", xticks=accums)

    _panels(_of_the_grid(rows), draw, "seconds per window", path)


def plot_time_against_memory(rows: Sequence[Row], accum: int, path: Path) -> None:
    """Draws, for windows of `accum` micro-steps, their seconds against what a rank holds before the boundary."""

    def draw(axes: Axes, parallelism: str, shown: list[Row]) -> None:
        for row in shown:
            mode, reshard = row.case.mode, row.case.reshard
            style = _style(mode, reshard) | {"linestyle": "none"}
            axes.errorbar([_held_mib(row)], [row.seconds], yerr=_spread([row]), **style, label=_label(mode, reshard))
        axes.set(xlabel=HELD)

    shown = [row for row in _of_the_grid(rows) if row.case.accum == accum]
    _panels(shown, draw, f"seconds per window of {accum}", path)


def plot_budgets(rows: Sequence[Row], path: Path) -> None:
    """Draws the seconds of a window in mode "auto" against what its budget let it hold, with the modes at both ends."""
    curve = sorted((row for row in rows if row.case.mode == "auto"), key=_held_mib)
    case = curve[0].case
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.errorbar(
        [*map(_held_mib, curve)],
        [row.seconds for row in curve],
        yerr=_spread(curve),
        marker="o",
        color="tab:green",
        label="auto",
    )
    for mode, reshard in (("all_reduce", True), ("grad_sync", False)):
        for row in rows:
            if row.case == Case(case.parallelism, mode, reshard, case.accum):
                style = _style(mode, reshard) | {"linestyle": "none", "markersize": 10, "fillstyle": "none"}
                axes.plot([_held_mib(row)], [row.seconds], **style, label=_label(mode, reshard))
    axes.set(
        title=f"{TITLES[case.parallelism]}, mode auto, {case.accum} micro-steps",
        xlabel=HELD,
        ylabel="seconds per window",
        ylim=(0, None),
    )
    axes.legend()
    _save(figure, path)


def _held_mib(row: Row) -> float:
    return row.held_mib + row.gathered_mib


def _spread(shown: Sequence[Row]) -> list[list[float]]:
    return [[row.seconds - row.fastest_s for row in shown], [row.slowest_s - row.seconds for row in shown]]


def _of_the_grid(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.case.mode in COLOURS]


def _panels(rows: Sequence[Row], draw: Callable[[Axes, str, list[Row]], None], ylabel: str, path: Path) -> None:
    by_parallelism = _grouped(rows, lambda row: row.case.parallelism)
    figure, all_axes = plt.subplots(
        1, len(by_parallelism), figsize=(4 * len(by_parallelism), 4), layout="constrained", squeeze=False
    )
    for axes, (parallelism, shown) in zip(all_axes[0], by_parallelism, strict=True):
        draw(axes, parallelism, shown)
        axes.set(title=TITLES[parallelism], ylim=(0, None))
        axes.legend(fontsize="small")
    all_axes[0][0].set_ylabel(ylabel)
    _save(figure, path)


def _grouped(rows: Sequence[Row], key: Callable[[Row], K]) -> list[tuple[K, list[Row]]]:
    groups: dict[K, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())


def _style(mode: str, reshard: bool) -> dict[str, Any]:
    return {"color": COLOURS[mode], "linestyle": "-" if reshard else "--", "marker": "o" if reshard else "s"}


def _label(mode: str, reshard: bool) -> str:
    return mode if reshard else f"{mode}, kept gathered"


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
