"""Online softmax against softmax over all keys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trunkline.attention.online_softmax import OnlineSoftmax, merge_


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
    """The error of 1,024 parts merged in fp32 is that of a few roundings."""
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


@given(calls=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=6))
def test_calls_may_be_of_some_of_the_rows(calls: list[tuple[int, int, bool]]) -> None:
    """A row's result is the softmax over the keys of its calls, whichever rows each call is of."""
    torch.manual_seed(0)
    rows = [(0, 6) if whole else (start, min(start + length, 6)) for start, length, whole in calls] + [(0, 6)]
    merged, scores, values = (
        OnlineSoftmax(6),
        torch.full((len(rows), 6), -torch.inf),
        torch.randn(len(rows), 1, 1, 6, 2),
    )
    for i, at in enumerate(rows):
        within = slice(*at)
        scores[i, within] = 20 * torch.randn(6)[within]
        merged.add(at, values[i, :, :, within].clone(), scores[i, within].reshape(1, 1, -1).clone())
    o, lse = merged.result()
    torch.testing.assert_close(lse[0, 0], torch.logsumexp(scores, 0))
    torch.testing.assert_close(o[0, 0], torch.einsum("nc,ncd->cd", torch.softmax(scores, 0), values[:, 0, 0]))


def test_a_row_without_keys_is_an_error() -> None:
    merged = OnlineSoftmax(3)
    merged.add((1, 3), torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2))
    with pytest.raises(AssertionError, match="no keys"):
        merged.result()


def test_half_precision_accumulators_are_an_error() -> None:
    o = torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="fp32"):
        merge_(o, o[..., 0], o, o[..., 0])


def test_unseen_rows_have_weight_zero_where_other_ranks_hold_their_keys() -> None:
    """Without other ranks they are an error."""
    generator = torch.Generator().manual_seed(0)
    o, lse = torch.randn(1, 2, 3, 4, generator=generator), torch.randn(1, 2, 3, generator=generator)
    merged = OnlineSoftmax(8)
    merged.add((2, 5), o.clone(), lse.clone())
    with pytest.raises(AssertionError, match="has no keys"):
        merged.result()
    found, weight = merged.result(allow_unseen=True)
    assert torch.equal(found[:, :, 2:5], o)
    assert torch.equal(weight[:, :, 2:5], lse)
    for rows in (slice(0, 2), slice(5, 8)):
        assert not found[:, :, rows].any()
        assert (weight[:, :, rows] == -torch.inf).all()
