# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces that stand for two hosts, and the shaped link between them.

Each namespace has a loopback, over which its own ranks talk at full speed, and one end of a veth pair. Both ends are
shaped where packets leave: `tc tbf` holds the rate. What it lacks is distance: its own "latency" is how long a packet
may queue. A real delay takes `netem`, which not every kernel has, and is added only where it is asked for.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "slow0"
NEEDED = {"ip": "iproute2", "tc": "iproute2", "taskset": "util-linux"}

_PREFIX = "two-hosts"
# Enough for the timer ticks of any rate below 10 Gbit/s, and little beside what one micro-step sends.
_BURST = "64kb"
# Nothing is dropped: TCP itself keeps the queue of its own host much shorter.
_LONGEST_QUEUE = "2s"


class NetworkError(RuntimeError):
    """The two hosts cannot be made here; the message says why and what would help."""


@dataclass(frozen=True)
class Link:
    """What joins the hosts.

    Attributes:
        rate_mbit: Mbit/s in each direction.
        latency_ms: Time on the way, in ms, each way; what the kernel itself needs comes on top.
    """

    rate_mbit: float
    latency_ms: float = 0.0


@dataclass(frozen=True)
class Host:
    """One of the two.

    Attributes:
        namespace: Name of its network namespace.
        address: Its end of the link.
        core: The processor core that all of its processes share.
    """

    namespace: str
    address: str
    core: int

    def start(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Starts a command on this host, in a process group of its own: Ctrl-C is for the caller to handle."""
        inside = ["ip", "netns", "exec", self.namespace, "taskset", "--cpu-list", str(self.core), *command]
        return subprocess.Popen(inside, env=environment, start_new_session=True)


def require_tools() -> None:
    """Makes sure that this process may make namespaces, and has the programs for it.

    Raises:
        NetworkError: It has not; the message names all that is missing.
    """
    packages = sorted({package for program, package in NEEDED.items() if shutil.which(program) is None})
    problems = [] if os.geteuid() == 0 else ["root (network namespaces are made): start it with sudo"]
    if packages:
        problems.append(f"{' and '.join(packages)}: apt-get install {' '.join(packages)}")
    if len(os.sched_getaffinity(0)) < 2:
        problems.append("two processor cores, one for each host")
    if problems:
        raise NetworkError(f"this needs {'; and '.join(problems)}.")


@contextmanager
def two_hosts(link: Link) -> Iterator[tuple[Host, Host]]:
    """Makes two hosts that are joined by `link`, and removes them with all that runs on them, however the block ends.

    What a run that was killed left behind is removed first.

    Args:
        link: What joins them.

    Yields:
        The hosts. Nobody else uses their names.

    Raises:
        NetworkError: See `require_tools`; or the kernel refused.
    """
    require_tools()
    _remove_abandoned()
    cores = sorted(os.sched_getaffinity(0))
    first, second = (
        Host(f"{_PREFIX}-{os.getpid()}-{index}", address=f"10.0.0.{index + 1}", core=cores[index]) for index in (0, 1)
    )
    try:
        _make(first, second, link)
        yield first, second
    finally:
        with _signals_wait():
            _remove(first.namespace)
            _remove(second.namespace)


def shape(link: Link, namespace: str | None = None) -> None:
    """Gives one end of the link a rate and a latency; to be called for both.

    Args:
        link: What it shall be like.
        namespace: Whose end; that of this process if None.

    Raises:
        NetworkError: The kernel refused.
    """
    tc = ["tc"] if namespace is None else ["tc", "-netns", namespace]
    device = ["dev", INTERFACE]
    rate = ["rate", f"{link.rate_mbit * 1e6:.0f}bit", "burst", _BURST, "latency", _LONGEST_QUEUE]
    _run(*tc, "qdisc", "replace", *device, "root", "handle", "1:", "tbf", *rate)
    if link.latency_ms:
        delay = ["delay", f"{link.latency_ms}ms", "limit", "100000"]
        _run(*tc, "qdisc", "replace", *device, "parent", "1:1", "handle", "10:", "netem", *delay)


def sent_bytes() -> int:
    """Returns the bytes that this process's host has sent over the link, as its interface counts them."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _make(first: Host, second: Host, link: Link) -> None:
    for host in (first, second):
        _run("ip", "netns", "add", host.namespace)
    _run(
        *("ip", "link", "add", INTERFACE, "netns", first.namespace, "type", "veth"),
        *("peer", "name", INTERFACE, "netns", second.namespace),
    )
    for host in (first, second):
        ip = ("ip", "-netns", host.namespace)
        _run(*ip, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _run(*ip, "link", "set", interface, "up")
        shape(link, host.namespace)


def _remove_abandoned() -> None:
    for namespace in _namespaces():
        owner = re.fullmatch(rf"{_PREFIX}-(\d+)-\d", namespace)
        if owner and not Path("/proc", owner[1]).exists():
            _remove(namespace)


def _remove(namespace: str) -> None:
    """Ends what runs in a namespace, and removes it with its end of the link."""
    if namespace not in _namespaces():
        return
    while pids := _run("ip", "netns", "pids", namespace).split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    _run("ip", "netns", "delete", namespace)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Lets a second Ctrl-C come too late to leave half of it behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().rstrip(".")
        hint = " (this kernel has no netem: leave --latency-ms at 0)" if "netem" in command else ""
        raise NetworkError(f"`{' '.join(command)}` failed: {reason}{hint}.")
    return done.stdout
