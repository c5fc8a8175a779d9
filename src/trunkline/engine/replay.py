"""Replay context: random state, autocast and kernel choice of a forward, restored for its replay in backward.

Random state: every (layer, chunk) draws from a seed of its own, derived from one that the forward draws from the user's
generator. Nothing is stored, and the user's generator moves on by that one draw. Autocast: as it was, but without its
cache of cast weights: filled while gradients are off, that cache cuts parameters out of the graph. The training flag is
checked, since a replay in another mode would differentiate another function.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import nn

from trunkline.attention.kernels import activated, best_implementation

_SEEDS = 2**62


def autocast_type(device: torch.device) -> str:
    """Return the device type whose autocast applies to tensors on a device; `meta` tensors follow the CPU's."""
    return "cpu" if device.type == "meta" else device.type


def draw_seed() -> int:
    """Draw a seed from the user's generator, which moves on by that one draw."""
    return int(torch.randint(_SEEDS, ()))


class ReplayContext:
    """Random state, autocast and kernel choice of one forward pass, recorded when it begins.

    Args:
        module: model that is run; its training flag is recorded.
        device: device that it runs on.
        seed: seed of all its random states, from `draw_seed`; the same on all ranks that share the sequence.
        seed_offset: number that makes the random states of this rank differ from other ranks'.
    """

    def __init__(self, module: nn.Module, device: torch.device, seed: int, seed_offset: int = 0) -> None:
        self.module = module
        self._device = device
        self._training = module.training
        self._seed = f"{seed} {seed_offset}"
        self._autocast = torch.is_autocast_enabled(autocast_type(device))
        self._autocast_dtype = torch.get_autocast_dtype(autocast_type(device))
        self._flash = best_implementation(device)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the recorded context for the duration of a `with`; reset the caller's own at its end.

        Raises:
            RuntimeError: the model changed between training and evaluation mode since its forward.
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
        """Return the dtype of matrix products of tensors of `dtype`, under the recorded autocast."""
        return self._autocast_dtype if self._autocast and dtype != torch.float64 else dtype

    def seed(self, stage: int, chunk: int, half: int = 0) -> None:
        """Set the random state for one chunk.

        Args:
            stage: layer; -1 is the embedding.
            chunk: index of the chunk.
            half: 0 up to the layer's attention, 1 after it: between them another chunk may draw.
        """
        # Hashed, because the CPU's generator looks at 32 bits of a seed only: no stage may share its lower half.
        digest = hashlib.blake2b(f"{self._seed} {stage} {chunk} {half}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)
