"""Extra peak memory of one step, in a fresh process (Linux).

`measure` starts this file as a program. The program loads the model and runs one tiny step, which does all lazy
initialisation and allocates the gradients. It then runs one step, reads the peak of the resident set from the Linux
kernel (`VmHWM`, reset by writing 5 to `/proc/self/clear_refs`), and subtracts the resident set before the step.

For Trunkline, the peak is reset before each chunk, and the bytes of the activation stores are subtracted. The largest
remainder, "memory outside stores", must not grow with the sequence.
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
        `extra_peak` in bytes and `step_seconds`; for Trunkline also `stores_at_peak` and `beyond_stores` in bytes. If
        the process was killed, for example out of memory, only `failed` with the reason.
    """
    task = {"setup": dataclasses.asdict(setup), "variant": variant, "length": length, "dtype": dtype}
    return in_own_process(__file__, task)


class Watch:
    """Monitor of the resident set and of the engine's activation stores, chunk by chunk.

    Attributes:
        stores: budget of the stores on the device; None if the variant is not Trunkline.
        peak: highest resident set so far, in bytes.
        stores_at_peak: bytes of the stores at that time.
        beyond: highest resident set minus stores so far, over all chunks.
    """

    def __init__(self) -> None:
        self.stores: TierBudget | None = None
        self.peak = self.stores_at_peak = self.beyond = 0
        self._before = 0
        self._active = False

    def start(self) -> None:
        """Start measuring."""
        self._active = True
        self._before = self._held()
        reset_peak()

    def __call__(self, progress: Progress | None = None) -> None:
        """Record the chunk that ends and start the next one; `stream(progress=...)` calls this."""
        if not self._active:
            return
        peak, after = status("VmHWM"), self._held()
        stores = max(self._before, after)  # a store may be allocated or freed at any time within a chunk
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
