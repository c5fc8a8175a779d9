"""Failure of one rank, reported on all ranks with its reason instead of a time-out.

A rank that fails writes its reason to the store that the job's processes share. The others read it when their
connection breaks. A rank that waits in a collective for a failed rank whose process lives on is ended by a watching
thread, since nothing else can interrupt a collective.

Failures belong to an epoch: each forward that all ranks begin together opens a new one, in which older failures
(a ValueError that was caught, say) no longer count.
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
_GRACE = 5.0  # seconds in which a waiting rank may fail by itself, before it is ended
_POLL = 0.5
_CONNECTION_ERRORS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "gloo",
    "nccl error",
    "timed out",
)
_STORE_ERRORS = (RuntimeError, ValueError)  # PyTorch raises these without a store, or when its process has ended
_MAY_GO_ON = "~"  # prefix of a ValueError: all ranks may raise it alike and go on, so it ends nobody


class RankError(RuntimeError):
    """Failure or end of another rank of the job."""


class _JobState:
    """Counters of this process (nested guards, epoch, broadcasts), and its watcher thread."""

    depth = 0  # nested guards
    epoch = 0
    num_broadcasts = 0
    watcher: threading.Thread | None = None


def first_failure() -> str | None:
    """Return the reason of the first rank that failed in this epoch, this rank included; None if none has."""
    reason = _stored_reason()
    return None if reason is None else reason.removeprefix(_MAY_GO_ON)


def _stored_reason() -> str | None:
    store, key = distributed_c10d._get_default_store(), f"{_KEY}/{_JobState.epoch}"
    return store.get(key).decode() if store.check([key]) else None


def begin_epoch() -> None:
    """Start a new epoch, in which earlier failures do not count. All ranks call it, after a collective of all."""
    _JobState.epoch += 1


def report(error: BaseException) -> None:
    """Tell the other ranks that this one has failed, unless another one failed first; do nothing outside a job.

    A ValueError ends no other rank: all may raise it alike and go on.
    """
    with contextlib.suppress(*_STORE_ERRORS):
        text = str(error).strip() or "no message"
        prefix = _MAY_GO_ON if isinstance(error, ValueError) else ""
        reason = f"{prefix}rank {dist.get_rank()} failed: {type(error).__name__}: {text}"
        distributed_c10d._get_default_store().compare_set(f"{_KEY}/{_JobState.epoch}", "", reason)


def broadcast_text(name: str, value: str | None) -> str:
    """Return a text from the one rank that gives it; the others give None and wait for it.

    All ranks of the job call it, in the same order.

    Args:
        name: name of the text, equal on all ranks.
        value: the text, on one rank; None on all others.

    Raises:
        RankError: a rank failed before the text came.
    """
    store = distributed_c10d._get_default_store()
    key = f"trunkline/{name}/{_JobState.epoch}/{_JobState.num_broadcasts}"
    if value is not None:
        store.set(key, value)
    # `store.wait` would hold the store's lock, and the watching thread could not read a failure.
    while not store.check([key]):
        if (reason := first_failure()) is not None:
            raise RankError(f"{reason} (this was rank {dist.get_rank()}, which had to stop)")
        time.sleep(0.05)
    _JobState.num_broadcasts += 1  # a second run in these processes must not read the first one's text
    return store.get(key).decode()


def in_job() -> bool:
    """Tell whether this process has joined a process group."""
    return dist.is_available() and dist.is_initialized()


def failed_first() -> bool:
    """Tell whether this rank was the first to fail; True also if no failure is known."""
    with contextlib.suppress(*_STORE_ERRORS):
        reason = first_failure()
        return reason is None or reason.startswith(f"rank {dist.get_rank()} failed")
    return True


def publish_refusal(error: BaseException) -> None:
    """Store the reason why this rank refuses its inputs; the others read it with `refusal_of` in the next epoch."""
    with contextlib.suppress(*_STORE_ERRORS):
        distributed_c10d._get_default_store().set(f"{_KEY}/{_JobState.epoch}/{dist.get_rank()}", str(error))


def refusal_of(rank: int) -> str:
    """Return why a rank refused its inputs in the previous epoch; a generic text if it published no reason."""
    with contextlib.suppress(*_STORE_ERRORS):
        store, key = distributed_c10d._get_default_store(), f"{_KEY}/{_JobState.epoch - 1}/{rank}"
        if store.check([key]):
            return store.get(key).decode().rstrip(".")
    return "its own output says why"


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Run code with collectives: report this rank's error to the others, or raise another rank's error here.

    This rank's own error is raised as it is. If a connection breaks, this waits up to 2 seconds for the reason of the
    rank that failed. While a rank is in this context, `watch` may end its process.

    Raises:
        RankError: another rank has failed or ended; the text has its reason, if it gave one.
    """
    _JobState.depth += 1
    try:
        yield
    except RankError as error:
        report(error)
        raise
    except BaseException as error:
        reason = _reason_of_another(error)
        if reason is None:
            report(error)
            raise
        rank_error = RankError(f"{reason} (this was rank {dist.get_rank()}, which had to stop)")
        report(rank_error)
        raise rank_error from error
    finally:
        _JobState.depth -= 1


def _reason_of_another(error: BaseException) -> str | None:
    """Return the failure of another rank that caused an error here; None if the error is this rank's own."""
    if not isinstance(error, RuntimeError) or not any(sign in str(error).lower() for sign in _CONNECTION_ERRORS):
        return None
    deadline = time.monotonic() + 2.0  # a connection may break before the other rank has written its reason
    while time.monotonic() < deadline:
        try:
            reason = first_failure()
        except _STORE_ERRORS:
            break
        if reason is not None and not reason.startswith(f"rank {dist.get_rank()} failed"):
            return reason
        time.sleep(0.05)
    first_line = str(error).strip().splitlines()[0]
    return (
        "another rank has ended: it had fewer batches, failed outside the model, was killed, or ran out of memory; its "
        f"own output says more ({first_line})"
    )


def raise_on_sigterm() -> None:
    """Raise RankError in the main thread on SIGTERM, which torchrun sends to all processes when one has failed.

    Call it in the main thread.
    """

    def raise_error(*_: object) -> None:
        raise RankError(
            "the run was ended (SIGTERM): another process of it has failed or was killed, which its own output and "
            "torchrun's summary say more of; or it was stopped from outside."
        )

    signal.signal(signal.SIGTERM, raise_error)


def watch() -> None:
    """Start the thread that ends this process if it waits in a collective for a rank that has failed.

    It ends a process only inside `guard`, 5 seconds after the failure, and not for a ValueError. With one rank, or a
    thread that runs already, nothing is started.
    """
    running = _JobState.watcher is not None and _JobState.watcher.is_alive()
    if not running and dist.get_world_size() > 1:
        _JobState.watcher = threading.Thread(target=_watch, name="trunkline-failure-watch", daemon=True)
        _JobState.watcher.start()


def _watch() -> None:
    seen: float | None = None
    rank = dist.get_rank()
    while dist.is_initialized():
        time.sleep(_POLL)
        if not _JobState.depth:
            seen = None
            continue
        try:
            reason = _stored_reason()
        except _STORE_ERRORS:  # the store has ended with its process: connections break by themselves
            return
        if reason is None or reason.startswith((f"rank {rank} failed", _MAY_GO_ON)):
            seen = None
            continue
        seen = seen or time.monotonic()
        if time.monotonic() - seen > _GRACE:
            print(f"error: {reason} (rank {rank} was waiting for it and has been ended)", file=sys.stderr, flush=True)
            os._exit(1)  # the main thread is inside a collective, where no exception reaches it
