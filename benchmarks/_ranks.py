"""Jobs of several ranks that stay alive between tasks, so that tasks of several jobs can alternate."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("spawn")


def _rank(rank: int, world: int, port: int, threads: int, serve: Callable[..., Any], to: Connection) -> None:
    torch.set_num_threads(threads)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    while True:
        task = to.recv()
        if task is None:
            break
        to.send(serve(**task))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Job:
    """Job of several ranks, each in its own process.

    Args:
        world: number of ranks.
        threads: threads per rank.
        serve: module-level function; every rank calls it with the fields of each task.
    """

    def __init__(self, world: int, threads: int, serve: Callable[..., Any]) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self._ranks = []
        for rank in range(world):
            mine, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_rank, args=(rank, world, port, threads, serve, theirs), daemon=True)
            process.start()
            self._ranks.append((process, mine))

    def do(self, **task: Any) -> list[Any]:
        """Run a task on all ranks and return their answers."""
        for _, connection in self._ranks:
            connection.send(task)
        return [connection.recv() for _, connection in self._ranks]

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._ranks:
            connection.send(None)
            process.join()
