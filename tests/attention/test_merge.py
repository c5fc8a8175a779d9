import pytest
import torch

from trunkline.attention.merge import merge_


@pytest.mark.parametrize("gap", [0.0, 3.0, -3.0, 88.0, -89.0, 1e3, -1e3, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merge_at_any_gap(gap: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    o, other = torch.randn(2, 1, 2, 3, 4, dtype=dtype)
    lse = torch.randn(1, 2, 3, dtype=dtype)
    other_lse = lse + gap
    weight = torch.softmax(torch.stack([lse.double(), other_lse.double()]), 0)
    expected = weight[0][..., None] * o.double() + weight[1][..., None] * other.double()
    expected_lse = torch.logaddexp(lse.double(), other_lse.double())
    merged, merged_lse = merge_(o.clone(), lse, other, other_lse)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(merged.double(), expected, rtol=0, atol=16 * eps * float(expected.abs().max()))
    torch.testing.assert_close(merged_lse.double(), expected_lse, rtol=16 * eps, atol=16 * eps)


def test_merge_does_not_lose_precision_with_the_number_of_parts() -> None:
    """1,024 parts merged in fp32: the error of the result stays that of a few roundings."""
    torch.manual_seed(0)
    scores, values = torch.randn(1024, dtype=torch.float64), torch.randn(1024, 4, dtype=torch.float64)
    o, lse = values[:1].float(), scores[:1].float()
    for i in range(1, 1024):
        o, lse = merge_(o, lse, values[i : i + 1].bfloat16().float(), scores[i : i + 1].float())
    exact_values = values.clone()
    exact_values[0], exact_values[1:] = values[0].float().double(), values[1:].bfloat16().double()
    expected = torch.softmax(scores, 0) @ exact_values
    assert float((o[0].double() - expected).norm() / expected.norm()) < 2e-6
    # Rounded at each of 1,024 merges to half a unit in the last place of about 7.4: a random walk of 32 steps' length.
    assert abs(float(lse) - float(torch.logsumexp(scores, 0))) < 32 * 2.4e-7


def test_half_precision_accumulators_are_an_error() -> None:
    o = torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="fp32"):
        merge_(o, o[..., 0], o, o[..., 0])
