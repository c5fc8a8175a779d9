"""Rank processes on gloo, forked from a server that has everything imported.

`run` keeps its ranks for the tests that follow in the same file (tests/conftest.py closes them after it), since a new
process imports the test's module and fills every cache again. A test that kills ranks, or patches what it does not
restore, calls `start` or `run(..., fresh=True)`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "torch", "transformers", "peft", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama",
     "trunkline.api"]
)  # fmt: skip


class RankFailedError(AssertionError):
    """A rank raised; the text is its traceback."""


def _serve(rank: int, connection: Connection) -> None:
    """Run one function after another as a rank of a new job, until the connection closes or a function raises."""
    faulthandler.enable()  # a crash in native code prints where it was, in Python and in each thread of the library
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    torch.set_num_threads(1)
    try:
        # The next job, or None, comes when every rank has finished: none leaves a group that others still exchange in.
        while (job := connection.recv()) is not None:
            environment, function, args = job
            _forget_last_job()
            os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
            connection.send((True, function(*args)))
    except BaseException as error:
        connection.send((False, (type(error).__name__, str(error), traceback.format_exc())))
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _forget_last_job() -> None:
    """Leave the process group, and clear caches of DTensor, which hold meshes of it."""
    if dist.is_initialized():
        from torch.distributed.tensor._redistribute import _gen_transform_infos
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        dist.destroy_process_group()
        _clear_sharding_prop_cache()
        _gen_transform_infos.cache_clear()
    gc.collect()
    torch.manual_seed(0)


class RankPool:
    """Processes that run functions together, as the ranks of one job a function.

    Attributes:
        processes: the ranks, in order.
    """

    def __init__(self, world: int) -> None:
        self.processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._store: TCPStore | None = None
        for rank in range(world):
            connection, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._connections.append(connection)

    def submit(self, function: Callable[..., Any], *args: Any, launcher: bool = True) -> None:
        """Run `function(*args)`, a function of a module, on every rank.

        Args:
            function: the function.
            args: its arguments.
            launcher: hold the store in which ranks meet in this process, as torchrun does. Held by rank 0 it ends with
                that rank, also while another is still connecting.
        """
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {
            "WORLD_SIZE": str(len(self.processes)),
            "LOCAL_WORLD_SIZE": str(len(self.processes)),
            "MASTER_ADDR": self._store.host,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(launcher),
        }
        if not launcher:
            self._store = None  # frees its port for rank 0
        for connection in self._connections:
            connection.send((environment, function, args))

    def outcomes(self, timeout: float = 120) -> list[tuple[bool, Any]]:
        """Return per rank (True, result), (False, (type, text, traceback)) of an error, or (False, None) if killed."""
        found: list[tuple[bool, Any]] = [(False, None)] * len(self.processes)
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), deadline - time.monotonic())
            if not ready:
                self.kill()
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not end")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    found[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    found[rank] = (False, None)
        return found

    def close(self) -> None:
        """End all ranks."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # that rank has ended
                connection.send(None)
            connection.close()
        for process in self.processes:
            process.join(30)
            assert process.exitcode is not None, "a process did not end"

    def kill(self) -> None:
        """End all ranks, whatever they do."""
        for process in self.processes:
            process.kill()


_pool: RankPool | None = None


def close_pool() -> None:
    """End the ranks that `run` has kept."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        pool.close()


def start(world: int, function: Callable[..., Any], *args: Any, launcher: bool = True) -> RankPool:
    """Start new processes that run `function(*args)` as ranks of one job; see `RankPool.submit`."""
    pool = RankPool(world)
    pool.submit(function, *args, launcher=launcher)
    return pool


def outcomes(pool: RankPool, timeout: float = 120) -> list[tuple[bool, Any]]:
    """Return `RankPool.outcomes` of ranks from `start`, and end them."""
    found = pool.outcomes(timeout)
    pool.close()
    return found


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 240, fresh: bool = False) -> list[Any]:
    """Return the results of `function(*args)` on each rank of a job.

    Args:
        world: number of ranks.
        function: a function of a module. It restores whatever it patches.
        args: its arguments.
        timeout: seconds after which all ranks are killed.
        fresh: start new processes for this function, and end them after it.

    Raises:
        RankFailedError: with the traceback of the rank that failed first. The next call starts new processes.
    """
    global _pool
    if fresh or _pool is None or len(_pool.processes) != world:
        close_pool()
        _pool = RankPool(world)
    pool, _pool = _pool, None  # kept again if all goes well
    pool.submit(function, *args)
    found = pool.outcomes(timeout)
    failed = [result for good, result in found if not good]
    if failed or fresh:
        pool.close()
    else:
        _pool = pool
    if failed:
        own = [result for result in failed if result is None or result[0] != "RankError"]
        texts = ["a rank was killed" if result is None else result[2] for result in own or failed]
        raise RankFailedError("\n".join(texts))
    return [result for _, result in found]
