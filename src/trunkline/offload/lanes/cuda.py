"""Lanes as CUDA streams: one beside compute for each direction, with events between them.

To and from the host slab a move is one asynchronous copy, and the host waits for nothing. A file is reached in two legs
through pinned staging memory: the copy on the lane's stream, the file's own part in the lane's thread. There the host
waits, in `finish` for what has not been read yet, in `stash` for staging memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.cuda import Event, Stream

from trunkline.offload.lanes.base import LANES, LaneName, LaneTraffic, Move, TransferLog, flat_bytes, succeed
from trunkline.offload.storage import HostSlab, StorageBlock

_PIECES = 8  # of staging memory for each lane: what one chunk stashes, and what is fetched for one
_MARKS = 256  # pairs of events that wait to be read before they are read on the way


@dataclass(slots=True)
class _Handle:
    """What stands for a move: the end of its copy on the lane's stream, and its part in the lane's thread."""

    copied: Event | None = None
    file: Future[None] | None = None


class _Staging:
    """Pinned memory for the moves of one lane on their way to or from a file, in pieces that go round."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._slab = HostSlab(_PIECES * nbytes, device if nbytes else None)
        self._free = deque(range(0, _PIECES * nbytes, nbytes)) if nbytes else deque[int]()
        self._changed = threading.Condition()

    def take(self) -> int:
        """The offset of a free piece, as soon as there is one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free))
            return self._free.popleft()

    def give(self, offset: int) -> None:
        """Give a piece back."""
        with self._changed:
            self._free.append(offset)
            self._changed.notify()

    def piece(self, offset: int, nbytes: int) -> Tensor:
        """Its first bytes."""
        return self._slab.memory[offset : offset + nbytes]


class CudaLanes:
    """Lanes between a CUDA device, the host slab and a scratch file.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {lane: Stream(device) for lane in LANES}  # type: ignore[no-untyped-call]
        self._workers = {lane: ThreadPoolExecutor(1, thread_name_prefix=f"trunkline-{lane}") for lane in LANES}
        self._staging = {lane: _Staging(0, device) for lane in LANES}
        self._traffic: dict[LaneName, LaneTraffic] = {lane: LaneTraffic() for lane in LANES}
        # What is measured (`busy` or `exposed`), and the tier that it is drawn with.
        self._marks: deque[tuple[LaneName, str, str, Event, Event]] = deque()
        self.log: TransferLog | None = None

    @property
    def traffic(self) -> dict[LaneName, LaneTraffic]:
        """See `Lanes.traffic`. It waits for the device: read it between steps."""
        torch.cuda.synchronize(self._device)
        self._read_marks()
        return self._traffic

    def prepare(self, nbytes: int) -> None:
        """See `Lanes.prepare`."""
        if nbytes > self._staging["stash"].nbytes:
            torch.cuda.synchronize(self._device)
            self._staging = {lane: _Staging(nbytes, self._device) for lane in LANES}

    def stash(self, x: Tensor, block: StorageBlock) -> Move:
        """See `Lanes.stash`."""
        self._traffic["stash"].moved += x.nbytes
        self._streams["stash"].wait_stream(self._compute)
        if isinstance(block.storage, HostSlab):
            copied = self._copy("stash", flat_bytes(x), block.storage.bytes_of(block, x.nbytes), "host")
            return Move("stash", x, block, x.nbytes, _Handle(copied))
        staging, nbytes = self._staging["stash"], x.nbytes
        start = time.perf_counter()
        offset = staging.take()
        end = time.perf_counter()
        self._traffic["stash"].exposed += end - start
        if self.log is not None:
            self.log.wait("stash", start, end)
        copied = self._copy("stash", flat_bytes(x), staging.piece(offset, nbytes), "disk")

        def write() -> None:
            try:
                copied.synchronize()
                start = time.perf_counter()
                block.storage.write(block, staging.piece(offset, nbytes))
                self._worked("stash", start)
            finally:
                staging.give(offset)

        return Move("stash", x, block, nbytes, _Handle(copied, self._workers["stash"].submit(write)))

    def fetch(self, block: StorageBlock, into: Tensor, after: Move) -> Move:
        """See `Lanes.fetch`."""
        self._traffic["fetch"].moved += into.nbytes
        stream = self._streams["fetch"]
        if isinstance(block.storage, HostSlab):
            stream.wait_stream(self._compute)
            stream.wait_event(after.handle.copied)
            copied = self._copy("fetch", block.storage.bytes_of(block, into.nbytes), flat_bytes(into), "host")
            return Move("fetch", into, block, into.nbytes, _Handle(copied))
        staging, nbytes = self._staging["fetch"], into.nbytes
        ready, handle = self._compute.record_event(), _Handle()

        def read() -> None:
            after.handle.file.result()
            offset = staging.take()
            try:
                start = time.perf_counter()
                piece = staging.piece(offset, nbytes)
                block.storage.read(block, piece)
                self._worked("fetch", start)
                stream.wait_event(ready)
                with torch.inference_mode(into.is_inference()):
                    handle.copied = self._copy("fetch", piece, flat_bytes(into), "disk")
                handle.copied.synchronize()
            finally:
                staging.give(offset)

        handle.file = self._workers["fetch"].submit(read)
        return Move("fetch", into, block, nbytes, handle)

    def finish(self, move: Move) -> None:
        """See `Lanes.finish`."""
        begin, end = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(self._compute)
        if move.lane == "fetch" and move.handle.file is not None:
            succeed(move.handle.file)
        self._compute.wait_event(move.handle.copied)
        end.record(self._compute)
        self._marks.append((move.lane, "exposed", "", begin, end))
        if len(self._marks) > _MARKS:
            self._read_marks()
        move.tensor = None

    def drain(self) -> None:
        """See `Lanes.drain`."""
        for worker in self._workers.values():
            worker.submit(int).result()
        for stream in self._streams.values():
            self._compute.wait_stream(stream)

    @property
    def _compute(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def _worked(self, lane: LaneName, start: float) -> None:
        """A lane's thread has read or written a file since then."""
        end = time.perf_counter()
        self._traffic[lane].busy += end - start
        if self.log is not None:
            self.log.move(lane, start, end, "disk")

    def _copy(self, lane: LaneName, source: Tensor, target: Tensor, tier: str) -> Event:
        begin, end = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        stream = self._streams[lane]
        with torch.cuda.stream(stream):
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        self._marks.append((lane, "busy", tier, begin, end))
        return end

    def _read_marks(self) -> None:
        """Add up what is over, in the order in which it was begun."""
        while self._marks and self._marks[0][4].query():  # type: ignore[no-untyped-call]
            lane, what, tier, begin, end = self._marks.popleft()
            traffic, seconds = self._traffic[lane], begin.elapsed_time(end) / 1e3
            setattr(traffic, what, getattr(traffic, what) + seconds)
            if self.log is not None:
                at = self.log.event.elapsed_time(begin) / 1e3
                if what == "busy":
                    self.log.moves[lane].append((at, at + seconds, tier))
                else:
                    self.log.waits.append((at, at + seconds, lane))
