"""The conditions a forward ran under, so that its replay in backward runs under the same.

Random state: every (layer, chunk) draws from a seed of its own, derived from one drawn at the start of the forward from
the user's generator; nothing is stored, and the user's generator moves on by that one draw. Autocast: as it was, but
without its cache of cast weights: filled while gradients are off, that cache cuts parameters out of the graph. The
training flag is checked, since a replay in another mode would differentiate another function.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import nn

from trunkline.attention.flash import activated, best_implementation

_SEEDS = 2**62


def autocast_type(device: torch.device) -> str:
    """The type of device whose autocast holds for tensors on `device`; those without contents follow the CPU's."""
    return "cpu" if device.type == "meta" else device.type


def draw_seed() -> int:
    """A seed from the user's generator, which moves on by that one draw."""
    return int(torch.randint(_SEEDS, ()))


class ReplayContext:
    """Conditions of one forward pass.

    Args:
        module: that is run.
        device: where.
        seed: of all its random states, from `draw_seed`.
        salt: a number that sets this rank's random states apart from those of other ranks.
    """

    def __init__(self, module: nn.Module, device: torch.device, seed: int, salt: int = 0) -> None:
        self.module = module
        self._device = device
        self._training = module.training
        self._seed = f"{seed} {salt}"
        self._autocast = torch.is_autocast_enabled(autocast_type(device))
        self._autocast_dtype = torch.get_autocast_dtype(autocast_type(device))
        self._flash = best_implementation(device)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run a sweep, forward or backward, under these conditions; afterwards all is as it was.

        Raises:
            RuntimeError: the model has changed between training and evaluation mode since its forward.
        """
        if self.module.training != self._training:
            raise RuntimeError(
                "the model changed between train() and eval() after this forward: call backward() before changing "
                "the mode, or run the forward again."
            )
        devices = [self._device] if self._device.type == "cuda" else []
        autocast = torch.autocast(
            autocast_type(self._device), dtype=self._autocast_dtype, enabled=self._autocast, cache_enabled=False
        )
        with torch.random.fork_rng(devices), autocast, activated(self._flash):
            yield

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which matrix products on tensors of `dtype` run."""
        return self._autocast_dtype if self._autocast and dtype != torch.float64 else dtype

    def seed(self, stage: int, chunk: int, half: int = 0) -> None:
        """Set the random state for one chunk of one stage (-1 the embedding, then the layers).

        A layer has two halves, up to its attention and after it: between them another chunk may draw.
        """
        # Hashed, because the CPU's generator looks at 32 bits of a seed only: no stage may share its lower half.
        digest = hashlib.blake2b(f"{self._seed} {stage} {chunk} {half}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)
