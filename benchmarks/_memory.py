"""Extra peak memory of one step, in a fresh process of its own (Linux).

`measure` starts this file as a program. There the model is loaded, one tiny step makes every lazy initialisation
happen and allocates the gradients, and then the peak of the resident set during one step is read from the kernel
(`VmHWM`, after writing 5 to `/proc/self/clear_refs`) and what was resident before is taken off.

For Trunkline the kernel's mark is reset before each chunk, and the bytes of the stores that the engine holds are taken
off: what remains at its worst, "beyond stores", must not grow with the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from _variants import KEEPS, Setup, build, prepare, step, tokens

from trunkline.attention.core import Core
from trunkline.config import Progress
from trunkline.sequence import ChunkedSequence

WARM_UP_TOKENS = 256

# Freed memory goes back to the kernel at once, for every variant alike: otherwise the resident set shows what malloc
# hoards and not what the step needs. One arena, because hoards are per arena.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


def measure(setup: Setup, variant: str, length: int, dtype: str) -> dict[str, Any]:
    """Extra peak memory of a step of `variant`.

    Returns:
        `extra_peak`, and for Trunkline `stores_at_peak` and `beyond_stores` (bytes); `step_seconds`. If the process was
        killed, which is how running out of memory looks, `failed` alone, with the reason.
    """
    task = {"setup": dataclasses.asdict(setup), "variant": variant, "length": length, "dtype": dtype}
    child = subprocess.run(
        [sys.executable, __file__, json.dumps(task)],
        env={**os.environ, **_MALLOC},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if child.returncode == -9:
        return {"failed": "killed: out of memory"}
    child.check_returncode()
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


def _status(field: str) -> int:
    """A field of this process's status, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None, f"this kernel does not report {field}"
    return int(match[1]) * 1024


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Watch:
    """Follows the resident set through a step, chunk by chunk, against the bytes of the engine's stores.

    Attributes:
        peak: highest resident set so far, in bytes.
        stores_at_peak: bytes of stores at that time.
        beyond: highest resident set less stores so far, over all chunks.
    """

    def __init__(self) -> None:
        self.peak = self.stores_at_peak = self.beyond = 0
        self._sequences: WeakSet[ChunkedSequence] = WeakSet()
        self._cores: WeakSet[Core] = WeakSet()
        self._before = 0
        self._active = False
        _register(ChunkedSequence, self._sequences)
        _register(Core, self._cores)

    def start(self) -> None:
        """Begin to follow."""
        self._active = True
        self._before = self._nbytes()
        _reset_peak()

    def __call__(self, progress: Progress | None = None) -> None:
        """Close one chunk's work and begin the next: what `stream(progress=...)` calls."""
        if not self._active:
            return
        peak, after = _status("VmHWM"), self._nbytes()
        stores = max(self._before, after)  # a store may be allocated, or let go, anywhere within a chunk's work
        if peak > self.peak:
            self.peak, self.stores_at_peak = peak, stores
        self.beyond = max(self.beyond, peak - stores)
        self._before = after
        _reset_peak()

    def _nbytes(self) -> int:
        sequences = sum(x.nbytes for x in self._sequences)
        return sequences + sum(core.nbytes for core in self._cores)


def _register(kind: type, instances: WeakSet[Any]) -> None:
    """Have every instance of `kind` made from now on be found in `instances` while it lives."""
    original = kind.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        instances.add(self)

    kind.__init__ = init  # type: ignore[misc]


def _main(setup: Setup, variant: str, length: int, dtype: str) -> dict[str, Any]:
    torch.set_num_threads(setup.threads)
    watch = Watch()
    streamed = variant in KEEPS
    model = prepare(build(setup, dtype), variant, setup, **({"progress": watch} if streamed else {}))
    step(model, tokens(setup, WARM_UP_TOKENS))
    model.zero_grad(set_to_none=False)
    ids_BS = tokens(setup, length)
    idle = _status("VmRSS")
    watch.start()
    done = step(model, ids_BS, keep_grads=True)
    watch()
    found: dict[str, Any] = {"extra_peak": watch.peak - idle, "step_seconds": done.seconds}
    if streamed:
        found |= {"stores_at_peak": watch.stores_at_peak, "beyond_stores": watch.beyond - idle}
    return found


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    print(json.dumps(_main(Setup(**task.pop("setup")), **task)))
