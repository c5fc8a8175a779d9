"""A rank that fails takes the others down with its reason, not with a time-out.

It leaves its reason in the store that the job's processes share. The others find it when their connection breaks. A
rank that is held in a collective by one that failed and lives on is ended by a watching thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import distributed_c10d

_KEY = "trunkline/failed"
_GRACE = 5.0  # seconds in which a rank may find out by itself
_POLL = 0.5
_SIGNS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "gloo",
    "nccl error",
    "timed out",
)
_GONE = (RuntimeError, ValueError)  # what PyTorch raises where the store went with its process, or where there is none
_MILD = "~"  # before what was said of a ValueError, which all ranks may raise alike, and go on


class RankError(RuntimeError):
    """Another rank of the job has failed or is gone."""


class _State:
    """What this process knows."""

    depth = 0  # sweeps under way
    shared = 0  # texts that have been given
    epoch = 0  # forwards that all ranks began together: what failed before the last of these is over
    watching = False


def failure() -> str | None:
    """What the first rank that failed said; None where none did, or all have gone on since."""
    said = _said()
    return None if said is None else said.removeprefix(_MILD)


def _said() -> str | None:
    store, key = distributed_c10d._get_default_store(), f"{_KEY}/{_State.epoch}"
    return store.get(key).decode() if store.check([key]) else None


def all_go_on() -> None:
    """All ranks have come together: no failure of before holds any of them back."""
    _State.epoch += 1


def report(error: BaseException) -> None:
    """Tell the other ranks that this one has failed, unless another was first."""
    with contextlib.suppress(*_GONE):
        text = str(error).strip() or "no message"
        mild = _MILD if isinstance(error, ValueError) else ""
        said = f"{mild}rank {dist.get_rank()} failed: {type(error).__name__}: {text}"
        distributed_c10d._get_default_store().compare_set(f"{_KEY}/{_State.epoch}", "", said)


def shared(name: str, value: str | None) -> str:
    """A text that one rank gives (the others give None), once it has."""
    store, key = distributed_c10d._get_default_store(), f"trunkline/{name}/{_State.epoch}/{_State.shared}"
    if value is not None:
        store.set(key, value)
    while not store.check([key]):  # waiting in the store would lock the watching thread out
        if (said := failure()) is not None:
            raise RankError(f"{said} (this was rank {dist.get_rank()}, which had to stop)")
        time.sleep(0.05)
    _State.shared += 1  # the next run in these processes is not told what this one was
    return store.get(key).decode()


def in_job() -> bool:
    """Whether this process has joined others."""
    return dist.is_available() and dist.is_initialized()


def is_mine() -> bool:
    """Whether this rank was the first of its job that failed."""
    with contextlib.suppress(*_GONE):
        said = failure()
        return said is None or said.startswith(f"rank {dist.get_rank()} failed")
    return True


def explain(error: BaseException) -> None:
    """Leave word of why this rank refuses what all ranks are about to do."""
    with contextlib.suppress(*_GONE):
        distributed_c10d._get_default_store().set(f"{_KEY}/{_State.epoch}/{dist.get_rank()}", str(error))


def explanation(rank: int) -> str:
    """What `rank` said in `explain`, before all went on."""
    with contextlib.suppress(*_GONE):
        store, key = distributed_c10d._get_default_store(), f"{_KEY}/{_State.epoch - 1}/{rank}"
        if store.check([key]):
            return store.get(key).decode().rstrip(".")
    return "its own output says why"


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Run what has collectives in it.

    Raises:
        RankError: another rank has failed, with its reason.
    """
    _State.depth += 1
    try:
        yield
    except RankError as error:
        report(error)
        raise
    except BaseException as error:
        reason = _reason(error)
        if reason is None:
            report(error)
            raise
        found = RankError(f"{reason} (this was rank {dist.get_rank()}, which had to stop)")
        report(found)
        raise found from error
    finally:
        _State.depth -= 1


def _reason(error: BaseException) -> str | None:
    """Why another rank is to blame for an error; None where none is."""
    if not isinstance(error, RuntimeError) or not any(sign in str(error).lower() for sign in _SIGNS):
        return None
    deadline = time.monotonic() + 2.0  # the other may still be writing
    while time.monotonic() < deadline:
        try:
            said = failure()
        except _GONE:
            break
        if said is not None and not said.startswith(f"rank {dist.get_rank()} failed"):
            return said
        time.sleep(0.05)
    first = str(error).strip().splitlines()[0]
    return (
        "another rank has ended: it had fewer batches, failed outside the model, was killed, or ran out of memory; its "
        f"own output says more ({first})"
    )


def heed_termination() -> None:
    """Have SIGTERM, which torchrun sends to all others when one process has ended badly, say so before it ends this."""

    def ended(*_: object) -> None:
        raise RankError(
            "the run was ended (SIGTERM): another process of it has failed or was killed, which its own output and "
            "torchrun's summary say more of; or it was stopped from outside."
        )

    signal.signal(signal.SIGTERM, ended)


def watch() -> None:
    """End this process if it is held in a collective by a rank that has failed."""
    if not _State.watching and dist.get_world_size() > 1:
        _State.watching = True
        threading.Thread(target=_watch, name="trunkline-alarm", daemon=True).start()


def _watch() -> None:
    seen: float | None = None
    rank = dist.get_rank()
    while dist.is_initialized():
        time.sleep(_POLL)
        if not _State.depth:
            seen = None
            continue
        try:
            said = _said()
        except _GONE:  # connections break by themselves
            return
        if said is None or said.startswith((f"rank {rank} failed", _MILD)):
            seen = None
            continue
        seen = seen or time.monotonic()
        if time.monotonic() - seen > _GRACE:
            print(f"error: {said} (rank {rank} was waiting for it and has been ended)", file=sys.stderr, flush=True)
            os._exit(1)
