"""The whole parity suite once more, with every run's stores spread over tiers whose lanes are the adversary's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import test_parity
from adversary import AdversaryBackend
from cases import others_in_soak
from families import FAMILIES
from test_parity import *  # noqa: F403

from trunkline.offload.placement import FitHints, Placement, StoreRequest, _in_flight_bytes
from trunkline.offload.stores import Tiers

# Resident on purpose, or about something else than what a run keeps.
del test_any_batch_length_chunk_and_tile  # noqa: F821 - has a test of its own in test_budgets
del test_bf16_is_no_worse_than_transformers  # noqa: F821 - statistics over models, slow
del test_weight_gradients_are_summed_in_fp32  # noqa: F821 - 256 chunks for the sake of rounding, slow


del test_every_family_in_fp64, test_every_family_in_fp32  # noqa: F821 - of fewer families in every run, as follows
KEEP_OF_FAMILY = dict(zip(FAMILIES, itertools.cycle(test_parity.KEEPS), strict=False))


@pytest.mark.parametrize(
    ("family", "keep"), others_in_soak(itertools.product(FAMILIES, test_parity.KEEPS), list(KEEP_OF_FAMILY.items()))
)
def test_each_family_in_fp64(family: str, keep: tuple[str, ...]) -> None:
    test_parity.test_every_family_in_fp64(family, keep)


@pytest.mark.parametrize("family", others_in_soak(FAMILIES, ["llama", "gpt2", "cohere"]))
def test_each_family_in_fp32(family: str) -> None:
    test_parity.test_every_family_in_fp32(family)


class Squeezed(Tiers):
    """Every run gets a budget of its own: between what it needs at least and what it would like."""

    def __init__(self, seed: int, prefetch: int) -> None:
        super().__init__({"device": 2**40, "host": 20_000, "disk": 2**23}, AdversaryBackend(seed), prefetch)
        self._random = random.Random(seed)
        self._streams = False  # keys and values stay off the device

    def place(self, requests: Sequence[StoreRequest], advice: FitHints | None = None) -> Placement:
        if requests[0].group == "inner":  # another try for the same run
            if self._streams:
                raise ValueError("not by head groups this time")
            return super().place(requests, advice)
        self._streams = self._random.random() < 0.5
        if self._streams:
            requests = [replace(request, allow_resident=request.group != "live kv") for request in requests]
        everything = sum(request.nbytes for request in requests)
        least = _in_flight_bytes(requests)
        self.budgets["device"].budget = int(least + self._random.random() * max(everything - least, 0))
        for _ in range(20):
            try:
                return super().place(requests, advice)
            except ValueError:  # other runs are outstanding
                self.budgets["device"].budget += everything
        raise AssertionError("no budget is enough")


@pytest.fixture(autouse=True, params=others_in_soak(range(2), [0]))
def _adversary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiers_for(*args: object) -> Tiers:
        return Squeezed(request.param, 2 + request.param)

    monkeypatch.setattr("trunkline.forward.tiers_for", tiers_for)


assert test_parity.__doc__
