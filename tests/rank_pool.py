# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""A pool of gloo ranks that lives as long as the test session, so that torch is imported once and not once a test."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# What tests of the trainer import, torch._dynamo among it at the first optimizer: once here, not once in each rank.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch._dynamo",
    "tests.tiny",
    "cosmos_framework.scripts.train",
]
GRACE_S = 5.0
COLLECTIVE_TIMEOUT = timedelta(seconds=60)


class RankError(AssertionError):
    """What a rank raised, with its traceback as text."""


class RankPool:
    """Up to `size` processes that run a function as the ranks of a fresh gloo process group."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._ranks: list[tuple[Any, Connection]] = []

    def run(
        self, fn: Callable[..., Any], *args: Any, world_size: int | None = None, timeout_s: float = 240
    ) -> list[Any]:
        """Runs `fn(*args)` in every rank and returns the results by rank.

        Args:
            fn: a function at a module's top level; the process group is initialised when it runs.
            args: picklable arguments, the same for every rank.
            world_size: how many of the pool's ranks take part; all by default.
            timeout_s: seconds after which a run that hangs is ended.

        Raises:
            RankError: a rank raised or hung; the pool starts afresh at the next run.
        """
        world_size = world_size or self.size
        if not self._ranks:
            self._ranks = [self._start(rank) for rank in range(self.size)]
        connections = [connection for _, connection in self._ranks[:world_size]]
        with tempfile.TemporaryDirectory() as folder:
            for rank, connection in enumerate(connections):
                connection.send_bytes(pickle.dumps((fn, args, rank, world_size, str(Path(folder) / "store"))))
            answers = self._collect(connections, timeout_s)
        failures = [f"rank {rank}:\n{answer[1]}" for rank, answer in enumerate(answers) if not answer[0]]
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        return [value for _, value in answers]

    def run_cases(
        self, fn: Callable[..., Any], cases: Mapping[str, tuple[Any, ...]], world_size: int | None = None
    ) -> dict[str, list[Any]]:
        """Runs `fn(*args)` for the arguments of each case, one after another in one process group.

        Args:
            fn: a function at a module's top level.
            cases: picklable arguments by the name of the case.
            world_size: how many of the pool's ranks take part; all by default.

        Returns:
            The results by rank, by the name of the case.

        Raises:
            RankError: a rank raised, in the case that the message names, or hung.
        """
        by_rank = self.run(_each_case, fn, dict(cases), world_size=world_size)
        return {name: [results[name] for results in by_rank] for name in cases}

    def close(self) -> None:
        """Ends the ranks."""
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks = []

    def _start(self, rank: int) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, rank), daemon=True)
        process.start()
        there.close()
        return process, here

    @staticmethod
    def _collect(connections: list[Connection], timeout_s: float) -> list[tuple[bool, Any]]:
        answers: list[tuple[bool, Any]] = [(False, "did not answer: it hung or died")] * len(connections)
        pending = dict(enumerate(connections))
        deadline = time.monotonic() + timeout_s
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(pending.values()), timeout=left)
            for rank in [rank for rank, connection in pending.items() if connection in ready]:
                try:
                    answers[rank] = pickle.loads(pending.pop(rank).recv_bytes())
                except EOFError:
                    answers[rank] = (False, "the process died")
                if not answers[rank][0]:  # the others may wait for this rank for ever
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers


def _each_case(fn: Callable[..., Any], cases: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    results = {}
    for name, args in cases.items():
        try:
            results[name] = fn(*args)
        except Exception as error:
            raise AssertionError(f"in the case {name}") from error
    return results


def _serve(connection: Connection, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    # A collective of gloo takes a third less time where its threads wake each other on the core that they are on.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(task))


def _answer(task: bytes) -> bytes:
    import torch.distributed as dist

    try:
        fn, args, rank, world_size, store_path = pickle.loads(task)
        store = dist.FileStore(store_path, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
        try:
            # A rank that is done must not leave while others still connect to it, in this group or in one that fn made.
            dist.barrier()
            answer = pickle.dumps((True, fn(*args)))
            if dist.is_initialized():
                dist.barrier()
            return answer
        finally:
            dist.destroy_process_group()
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
