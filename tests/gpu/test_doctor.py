"""The doctor on a real GPU: it computes, attention is right, and the link has a speed that links have."""

import pytest
import torch

from trunkline.plan.checks import attention, device, link

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_device() -> None:
    gpus = device.devices()
    assert len(gpus) == torch.cuda.device_count()
    found = device.gpu(gpus[0])
    assert found.state in ("ok", "warn")
    assert torch.cuda.get_device_name(gpus[0]) in found.found


@pytest.mark.parametrize("short", list(attention.DTYPES))
def test_attention(short: str) -> None:
    found = attention.attention(short, torch.device("cuda:0"))
    assert found.state in ("ok", "warn"), found
    assert found.found.startswith("math" if short == "fp32" else "cuda_flash")


def test_link() -> None:
    speed = link.measure_link(torch.device("cuda:0"))
    # From PCIe 3 with 4 lanes to NVLink-C2C of a GH200.
    assert all(2e9 < x < 1e12 for x in (speed.fetch, speed.stash))
    # Both at once is not faster than alone, up to the clock of two measurements.
    assert speed.fetch_both <= 1.1 * speed.fetch
    assert speed.stash_both <= 1.1 * speed.stash
