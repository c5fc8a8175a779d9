"""Real processes on gloo, started from a server that has everything imported: a rank is there in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "transformers",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
        "trunkline.streaming",
    ]
)


class RankFailedError(AssertionError):
    """A rank raised; the text is its traceback."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def _rank(rank: int, world: int, port: int, to: Connection, function: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    try:
        to.send((True, function(*args)))
    except BaseException as error:
        to.send((False, (type(error).__name__, str(error), traceback.format_exc())))
        raise SystemExit(1) from None
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def start(world: int, function: Callable[..., Any], *args: Any) -> list[tuple[Any, Connection]]:
    """Processes that run `function(*args)` as ranks of one job, each with the connection that its result comes over."""
    port = free_port()
    started = []
    for rank in range(world):
        mine, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_rank, args=(rank, world, port, theirs, function, *args), daemon=True)
        process.start()
        theirs.close()
        started.append((process, mine))
    return started


def outcomes(started: list[tuple[Any, Connection]], timeout: float = 120) -> list[tuple[bool, Any]]:
    """What each rank returned (True) or raised (False, with type, text and traceback; or None where it was killed)."""
    found: list[tuple[bool, Any]] = [(False, None)] * len(started)
    waiting = {connection: rank for rank, (_, connection) in enumerate(started)}
    while waiting:
        ready = wait(list(waiting), timeout)
        if not ready:
            for process, _ in started:
                process.kill()
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not end")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                found[rank] = connection.recv()
            except EOFError:
                found[rank] = (False, None)
    for process, _ in started:
        process.join(30)
        assert process.exitcode is not None, "a process did not end"
    return found


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
    """What `function(*args)` returns on each rank of a job.

    Raises:
        RankFailedError: with the traceback of the rank that failed for a reason of its own.
    """
    found = outcomes(start(world, function, *args), timeout)
    failed = [what for good, what in found if not good]
    if failed:
        own = [what for what in failed if what is not None and what[0] != "RankError"]
        raise RankFailedError((own or failed)[0][2] if (own or failed)[0] is not None else "a rank was killed")
    return [what for _, what in found]
