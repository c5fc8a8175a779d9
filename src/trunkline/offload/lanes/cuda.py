"""Lanes as CUDA streams: one beside the compute stream for each direction, ordered by events.

A move to or from the host slab is one asynchronous copy, and the host never waits for it. A move to or from the
scratch file has two legs through pinned staging memory: a copy on the lane's stream, and file I/O in the lane's thread.
During a step the host waits only in `finish` of a fetch that has not been read from the file yet, and in `stash` when
all staging memory is in use.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.cuda import Event, Stream
from typing_extensions import override

from trunkline.offload.lanes.base import LANES, LaneName, Lanes, LaneTraffic, Move, TransferLog, flat_bytes, wait_for
from trunkline.offload.storage import HostSlab, StorageBlock

_NUM_STAGING_BUFFERS = 8  # per lane: enough for the tensors that one chunk stashes or fetches
_MAX_PENDING_TIMINGS = 256  # event pairs kept before finished ones are read during a step


@dataclass(slots=True)
class _MoveState:
    """Handle of a move: the event at the end of its copy, and the future of its file I/O (None for the host slab)."""

    copied: Event | None = None
    file_io: Future[None] | None = None


@dataclass(slots=True)
class _Timing:
    """A pair of events whose distance is added to a counter of `LaneTraffic` once both have passed."""

    lane: LaneName
    counter: Literal["busy", "exposed"]
    tier: str
    begin: Event
    end: Event


class _StagingBuffers:
    """Pinned buffers of one lane between the device and a file.

    Args:
        nbytes: bytes of each buffer; 0 allocates none.
        device: the CUDA device.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._slab = HostSlab(_NUM_STAGING_BUFFERS * nbytes, device if nbytes else None)
        self._free = deque(range(0, _NUM_STAGING_BUFFERS * nbytes, nbytes)) if nbytes else deque[int]()
        self._changed = threading.Condition()

    def acquire(self) -> int:
        """Return the offset of a free buffer; wait until there is one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free))
            return self._free.popleft()

    def release(self, offset: int) -> None:
        """Return a buffer to the free ones."""
        with self._changed:
            self._free.append(offset)
            self._changed.notify()

    def view(self, offset: int, nbytes: int) -> Tensor:
        """Return the first bytes of a buffer, uint8 (nbytes,)."""
        return self._slab.memory[offset : offset + nbytes]


class CudaLanes(Lanes):
    """Lanes between a CUDA device, the host slab and a scratch file.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.log: TransferLog | None = None
        self._device = device
        self._streams = {lane: Stream(device) for lane in LANES}  # type: ignore[no-untyped-call]
        self._workers = {lane: ThreadPoolExecutor(1, thread_name_prefix=f"trunkline-{lane}") for lane in LANES}
        self._staging = {lane: _StagingBuffers(0, device) for lane in LANES}
        self._traffic: dict[LaneName, LaneTraffic] = {lane: LaneTraffic() for lane in LANES}
        self._timings: deque[_Timing] = deque()

    @property
    @override
    def traffic(self) -> dict[LaneName, LaneTraffic]:
        torch.cuda.synchronize(self._device)  # so that every event has passed; callers read between steps
        self._read_timings()
        return self._traffic

    @override
    def prepare(self, nbytes: int) -> None:
        if nbytes > self._staging["stash"].nbytes:
            torch.cuda.synchronize(self._device)  # copies into the old buffers may be in flight
            self._staging = {lane: _StagingBuffers(nbytes, self._device) for lane in LANES}

    @override
    def stash(self, x: Tensor, block: StorageBlock) -> Move:
        self._traffic["stash"].moved += x.nbytes
        # The copy must not begin before the kernels that write `x`. `x` itself stays alive in the Move until `finish`
        # has made compute wait for the copy: only then may the allocator give its memory to a later kernel.
        self._streams["stash"].wait_stream(self._compute)
        if isinstance(block.storage, HostSlab):
            copied = self._copy("stash", flat_bytes(x), block.storage.view(block, x.nbytes), "host")
            return Move("stash", x, block, x.nbytes, _MoveState(copied))
        staging, nbytes = self._staging["stash"], x.nbytes
        start = time.perf_counter()
        offset = staging.acquire()
        end = time.perf_counter()
        self._traffic["stash"].exposed += end - start
        if self.log is not None:
            self.log.wait("stash", start, end)
        copied = self._copy("stash", flat_bytes(x), staging.view(offset, nbytes), "disk")

        def write() -> None:
            try:
                copied.synchronize()  # this thread waits, not compute's
                start = time.perf_counter()
                block.storage.write(block, staging.view(offset, nbytes))
                self._count_file_io("stash", start)
            finally:
                staging.release(offset)

        return Move("stash", x, block, nbytes, _MoveState(copied, self._workers["stash"].submit(write)))

    @override
    def fetch(self, block: StorageBlock, into: Tensor, after: Move) -> Move:
        self._traffic["fetch"].moved += into.nbytes
        stream = self._streams["fetch"]
        if isinstance(block.storage, HostSlab):
            # `into` may reuse memory that kernels launched earlier still read: wait for them before overwriting it.
            stream.wait_stream(self._compute)
            stream.wait_event(after.handle.copied)
            copied = self._copy("fetch", block.storage.view(block, into.nbytes), flat_bytes(into), "host")
            return Move("fetch", into, block, into.nbytes, _MoveState(copied))
        staging, nbytes = self._staging["fetch"], into.nbytes
        # Recorded now, in compute's thread: recorded later, it would also cover kernels launched after this call, and
        # the copy would wait for them, too.
        ready, handle = self._compute.record_event(), _MoveState()

        def read() -> None:
            after.handle.file_io.result()  # the stash thread may still write the block; raises if the write failed
            offset = staging.acquire()
            try:
                start = time.perf_counter()
                buffer = staging.view(offset, nbytes)
                block.storage.read(block, buffer)
                self._count_file_io("fetch", start)
                stream.wait_event(ready)
                with torch.inference_mode(into.is_inference()):  # the mode belongs to a thread; `into` has the caller's
                    handle.copied = self._copy("fetch", buffer, flat_bytes(into), "disk")
                handle.copied.synchronize()  # the buffer is free once the copy has read it
            finally:
                staging.release(offset)

        handle.file_io = self._workers["fetch"].submit(read)
        return Move("fetch", into, block, nbytes, handle)

    @override
    def finish(self, move: Move) -> None:
        begin, end = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(self._compute)
        # A stash need not be in its file yet: the tensor may be freed as soon as it is in staging memory.
        if move.lane == "fetch" and move.handle.file_io is not None:
            wait_for(move.handle.file_io)
        self._compute.wait_event(move.handle.copied)
        end.record(self._compute)
        self._timings.append(_Timing(move.lane, "exposed", "", begin, end))
        if len(self._timings) > _MAX_PENDING_TIMINGS:
            self._read_timings()
        move.tensor = None

    @override
    def drain(self) -> None:
        for worker in self._workers.values():
            worker.submit(int).result()  # a thread runs its work in order: all that was given before is over
        # Later copies wait for compute, and with it for all copies before: another step may get the same memory.
        for stream in self._streams.values():
            self._compute.wait_stream(stream)

    @property
    def _compute(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def _count_file_io(self, lane: LaneName, start: float) -> None:
        """Count file I/O that began at `start` and has just ended, in seconds of `time.perf_counter`."""
        end = time.perf_counter()
        self._traffic[lane].busy += end - start
        if self.log is not None:
            self.log.move(lane, start, end, "disk")

    def _copy(self, lane: LaneName, source: Tensor, target: Tensor, tier: str) -> Event:
        """Copy on the lane's stream and return the event at its end."""
        begin, end = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        stream = self._streams[lane]
        with torch.cuda.stream(stream):
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        self._timings.append(_Timing(lane, "busy", tier, begin, end))
        return end

    def _read_timings(self) -> None:
        """Add finished timings to the counters, oldest first, up to the first that is not finished."""
        while self._timings and self._timings[0].end.query():  # type: ignore[no-untyped-call]
            timing = self._timings.popleft()
            traffic, seconds = self._traffic[timing.lane], timing.begin.elapsed_time(timing.end) / 1e3
            setattr(traffic, timing.counter, getattr(traffic, timing.counter) + seconds)
            if self.log is not None:
                at = self.log.event.elapsed_time(timing.begin) / 1e3
                if timing.counter == "busy":
                    self.log.moves[timing.lane].append((at, at + seconds, timing.tier))
                else:
                    self.log.waits.append((at, at + seconds, timing.lane))
