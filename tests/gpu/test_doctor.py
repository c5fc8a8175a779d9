"""The doctor on a real GPU: it computes, attention is right, and the link has a speed that links have."""

import pytest
import torch

from trunkline.plan import measurements
from trunkline.plan.checks import check_attention, check_devices

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_device() -> None:
    gpus = check_devices.devices()
    assert len(gpus) == torch.cuda.device_count()
    finding = check_devices.check_gpu(gpus[0])
    assert finding.state in ("ok", "warn")
    assert torch.cuda.get_device_name(gpus[0]) in finding.found


@pytest.mark.parametrize("short", list(check_attention.DTYPES))
def test_attention(short: str) -> None:
    finding = check_attention.check_attention(short, torch.device("cuda:0"))
    assert finding.state in ("ok", "warn"), finding
    assert finding.found.startswith("math" if short == "fp32" else "cuda_flash")


def test_link() -> None:
    rates = measurements.link(torch.device("cuda:0"))
    # From PCIe 3 with 4 lanes to NVLink-C2C of a GH200.
    assert all(2e9 < x < 1e12 for x in rates.values())
    # Both at once is not faster than alone, up to the clock of two measurements.
    assert rates["both_to_device"] <= 1.1 * rates["to_device"]
    assert rates["both_to_host"] <= 1.1 * rates["to_host"]
