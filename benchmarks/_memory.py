"""Extra peak memory of one step, in a fresh process of its own (Linux).

`measure` starts this file as a program. There the model is loaded, one tiny step makes every lazy initialisation
happen and allocates the gradients, and then the peak of the resident set during one step is read from the kernel
(`VmHWM`, after writing 5 to `/proc/self/clear_refs`) and what was resident before is taken off.

For Trunkline the kernel's mark is reset before each chunk, and the bytes of the stores that the engine holds are taken
off: what remains at its worst, "beyond stores", must not grow with the sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from _resident import answered, in_own_process, reset_peak, status
from _variants import STREAMED, Setup, build, prepare, step, tokens

from trunkline.config import Progress
from trunkline.offload.stats import TierBudget

WARM_UP_TOKENS = 256


def measure(setup: Setup, variant: str, length: int, dtype: str) -> dict[str, Any]:
    """Measure the extra peak memory of a step of `variant`.

    Returns:
        `extra_peak`, `step_seconds`, and for Trunkline `stores_at_peak` and `outside_stores`, in bytes and seconds; or
        `failed` with the reason, if the process was killed, such as by running out of memory.
    """
    task = {"setup": dataclasses.asdict(setup), "variant": variant, "length": length, "dtype": dtype}
    return in_own_process(__file__, task)


class Watch:
    """Gauge of the resident set through a step, chunk by chunk, beside the bytes of the engine's stores.

    Attributes:
        stores: the account of those on the device; None for others than Trunkline.
        peak: highest resident set so far, in bytes.
        stores_at_peak: bytes of stores at that time.
        beyond: highest resident set less stores so far, over all chunks.
    """

    def __init__(self) -> None:
        self.stores: TierBudget | None = None
        self.peak = self.stores_at_peak = self.beyond = 0
        self._before = 0
        self._active = False

    def start(self) -> None:
        """Begin to measure."""
        self._active = True
        self._before = self._held()
        reset_peak()

    def __call__(self, progress: Progress | None = None) -> None:
        """End one chunk and begin the next; `stream(progress=...)` calls this."""
        if not self._active:
            return
        peak, after = status("VmHWM"), self._held()
        stores = max(self._before, after)  # a store may be allocated, or let go, anywhere within a chunk's work
        if peak > self.peak:
            self.peak, self.stores_at_peak = peak, stores
        self.beyond = max(self.beyond, peak - stores)
        self._before = after
        reset_peak()

    def _held(self) -> int:
        return 0 if self.stores is None else self.stores.held


def _main(setup: Setup, variant: str, length: int, dtype: str) -> dict[str, Any]:
    torch.set_num_threads(setup.threads)
    watch = Watch()
    streamed = variant in STREAMED
    model = prepare(build(setup, dtype), variant, setup, **({"progress": watch} if streamed else {}))
    step(model, tokens(setup, WARM_UP_TOKENS))
    model.zero_grad(set_to_none=False)
    ids_BS = tokens(setup, length)
    if streamed:
        watch.stores = model.forward.tiers.budgets["device"]
    idle = status("VmRSS")
    watch.start()
    done = step(model, ids_BS, keep_grads=True)
    watch()
    found: dict[str, Any] = {"extra_peak": watch.peak - idle, "step_seconds": done.seconds}
    if streamed:
        found |= {"stores_at_peak": watch.stores_at_peak, "beyond_stores": watch.beyond - idle}
    return found


if __name__ == "__main__":
    answered(_main)
