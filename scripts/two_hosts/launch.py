# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""One torchrun on each of the two hosts, with two ranks each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cosmos_framework.scripts.train  # noqa: F401  (Hydra learns the recipes' fields)
from cosmos_framework.utils.config import check_config, load_config
from two_hosts.cases import PARALLELISMS, RECIPE, Settings
from two_hosts.network import INTERFACE, Host, require_tools, two_hosts

RANKS_PER_HOST = 2

_SCRIPTS = Path(__file__).resolve().parents[1]
_PORT = 29500


class RunError(RuntimeError):
    """A host's ranks failed; what they printed says why."""


def measure(settings: Settings) -> str:
    """Makes the hosts, lets their ranks measure, and takes the hosts down again, also after an error or a signal.

    Args:
        settings: What to measure.

    Returns:
        What rank 0 measured, as JSON text.

    Raises:
        NetworkError: The hosts cannot be made.
        ConfigError: The configuration cannot be trained.
        RunError: A rank failed.
        SystemExit: SIGTERM or SIGHUP came.
    """
    with _termination_raises(), tempfile.TemporaryDirectory(prefix="two-hosts-") as folder:
        require_tools()
        _require_trainable(settings, folder)
        (Path(folder) / "settings.json").write_text(settings.to_json())
        with two_hosts(settings.link) as hosts:
            _wait([_torchrun(host, index, hosts[0].address, folder) for index, host in enumerate(hosts)])
        return (Path(folder) / "measured.json").read_text()


def _require_trainable(settings: Settings, folder: str) -> None:
    """A rank would say the same, amid what torchrun has to say about ranks that end."""
    for name in settings.parallelisms:
        config = load_config([*RECIPE, f"dataset.root={folder}", *PARALLELISMS[name], *settings.overrides])
        check_config(config, world_size=2 * RANKS_PER_HOST)


def _torchrun(host: Host, index: int, master_address: str, folder: str) -> subprocess.Popen[bytes]:
    nodes = ["--nnodes=2", f"--node_rank={index}", f"--nproc_per_node={RANKS_PER_HOST}"]
    meeting_point = [f"--master_addr={master_address}", f"--master_port={_PORT}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes, *meeting_point]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_SCRIPTS), os.environ.get("PYTHONPATH")])),
        "IMAGINAIRE_OUTPUT_ROOT": folder,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        # NCCL would find a way around the link.
        "CUDA_VISIBLE_DEVICES": "",
        # The hosts have addresses and no names; torch would warn of that at every connection.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return host.start([*torchrun, "-m", "two_hosts.worker", folder], environment)


def _wait(torchruns: list[subprocess.Popen[bytes]]) -> None:
    running = dict(enumerate(torchruns))
    while running:
        for index, torchrun in list(running.items()):
            code = torchrun.poll()
            if code:
                raise RunError(f"the ranks of host {index} ended with code {code}; what they said stands above.")
            if code == 0:
                del running[index]
        time.sleep(0.2)


@contextmanager
def _termination_raises() -> Iterator[None]:
    """Makes the signals that end a process run the `finally` blocks as well, as Ctrl-C does."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda received, _: sys.exit(128 + received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
