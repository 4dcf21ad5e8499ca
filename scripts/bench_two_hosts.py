#!/usr/bin/env python
# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what each mode of gradient accumulation costs and saves between two hosts, on one machine.

    sudo "$(which python)" scripts/bench_two_hosts.py --calibrate
    sudo "$(which python)" scripts/bench_two_hosts.py --rate-mbit 100 --parallelisms hsdp --out /tmp/mine model.depth=4

Two network namespaces stand for the hosts, a shaped veth pair for the link; torchrun starts two ranks in each, which
share one core. The ranks train the real recipe with the real trainer. Overrides of its configuration may follow the
options. docs/benchmarks/README.md says how to read what is written. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from two_hosts import report
from two_hosts.cases import PARALLELISMS, Settings
from two_hosts.launch import RunError, measure
from two_hosts.network import Link, NetworkError

from cosmos_framework.scripts.arguments import count, not_negative, positive
from cosmos_framework.utils.config import ConfigError

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 if everything was measured and written, 1 if it was refused or failed, 130 after Ctrl-C.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    settings = Settings(
        link=Link(args.rate_mbit, args.latency_ms),
        calibrate=args.calibrate,
        rounds=args.rounds,
        parallelisms=tuple(args.parallelisms),
        accumulations=tuple(sorted(set(args.accumulations))),
        overrides=tuple(args.overrides),
    )
    try:
        measured = json.loads(measure(settings))
    except (NetworkError, RunError, ConfigError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; the hosts are removed, nothing is written", file=sys.stderr)
        return 130
    report.write({"machine": report.describe_machine(), **measured}, args.out)
    print(f"written to {args.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=positive, default=180, help="rate of the link, Mbit/s each way")
    parser.add_argument("--latency-ms", type=not_negative, default=0, help="delay of the link, each way; needs netem")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="find the rate at which compute and sync of a micro-step of HSDP are as 10.8 to 11.4, from --rate-mbit on",
    )
    parser.add_argument("--rounds", type=count, default=6, help="timed windows of each case")
    parser.add_argument("--parallelisms", nargs="+", choices=PARALLELISMS, default=list(PARALLELISMS))
    parser.add_argument("--accumulations", type=count, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder to write to")
    parser.add_argument("overrides", nargs="*", metavar="FIELD=VALUE", help="such as model.depth=4")
    return parser


if __name__ == "__main__":
    sys.exit(main())
