"""Real processes on gloo, started from a server that has everything imported: a rank is there in milliseconds."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch.distributed import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "transformers",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
        "trunkline.api",
    ]
)


class RankFailedError(AssertionError):
    """A rank raised; the text is its traceback."""


class Rank(NamedTuple):
    """A rank of a job that was started.

    Attributes:
        process: the process.
        result: what it returned or raised comes over this; a rank that returned leaves once this is closed.
        store: where the job's ranks find one another. Held by what starts them, as torchrun does: held by rank 0 it
            would end with that rank, also while another is still connecting. None where rank 0 has it all the same.
    """

    process: BaseProcess
    result: Connection
    store: TCPStore | None


def _rank(rank: int, environment: dict[str, str], to: Connection, function: Callable[..., Any], *args: Any) -> None:
    faulthandler.enable()  # a crash in native code says where it was: in Python, and each thread of the library, too
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    torch.set_num_threads(1)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        to.send((True, function(*args)))
        to.poll(None)  # another rank may still be in a collective with this one: all leave together
    except BaseException as error:
        to.send((False, (type(error).__name__, str(error), traceback.format_exc())))
        raise SystemExit(1) from None
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def start(world: int, function: Callable[..., Any], *args: Any, launcher: bool = True) -> list[Rank]:
    """Processes that run `function(*args)` as ranks of one job.

    Args:
        world: how many.
        function: of a module.
        args: of it.
        launcher: whether the store in which ranks meet is here, as under torchrun; else rank 0 has it.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(launcher),
    }
    if not launcher:
        del store  # its port is free now
    started = []
    for rank in range(world):
        mine, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_rank, args=(rank, environment, theirs, function, *args), daemon=True)
        process.start()
        theirs.close()
        started.append(Rank(process, mine, store if launcher else None))
    return started


def outcomes(ranks: Sequence[Rank], timeout: float = 120) -> list[tuple[bool, Any]]:
    """What each rank returned (True) or raised (False, with type, text and traceback; or None where it was killed)."""
    found: list[tuple[bool, Any]] = [(False, None)] * len(ranks)
    waiting = {each.result: rank for rank, each in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout)
        if not ready:
            for each in ranks:
                each.process.kill()
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not end")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                found[rank] = connection.recv()
            except EOFError:
                found[rank] = (False, None)
    for each in ranks:
        each.result.close()
    for each in ranks:
        each.process.join(30)
        assert each.process.exitcode is not None, "a process did not end"
    return found


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
    """What `function(*args)` returns on each rank of a job.

    Raises:
        RankFailedError: with the traceback of the rank that failed for a reason of its own.
    """
    found = outcomes(start(world, function, *args), timeout)
    failed = [what for good, what in found if not good]
    if failed:
        own = [what for what in failed if what is None or what[0] != "RankError"]
        raise RankFailedError("\n".join("a rank was killed" if what is None else what[2] for what in own or failed))
    return [what for _, what in found]
