"""Dense routing to lanes of top-k and back, and counts of lanes, by the kernels and by operators of PyTorch."""

import pytest
import torch
from exchange_cases import default_dtype

from deepep_moe.ops import lanes, quantize_fp8
from deepep_moe.ops.lanes import LanesOfMap, count_lanes, dense_of_lanes, lanes_of_map, topk_from_map, weights_at

SIZES = [(0, 4, 2), (5, 1, 1), (7, 13, 3), (33, 64, 8), (4, 20, 20), (3, 8, 0), (9, 256, 32), (2, 1000, 8)]


def routing(device, num_tokens, num_experts, most, seed=0):
    """A map of 0 to `most` experts a token, and values that are not 0 elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most + 1, (num_tokens, 1), generator=generator)
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)
    return (order < counts).to(device), torch.rand(num_tokens, num_experts, generator=generator).to(device)


def test_by_hand(device):
    routing_map = torch.tensor([[False, True, False, True], [False] * 4, [True, True, True, False]], device=device)
    values = torch.tensor([[1.0, 0.0, 2.0, 3.0], [4.0] * 4, [5.0, 6.0, 7.0, 8.0]], device=device)
    topk_idx, weights = lanes_of_map(routing_map, values, 2)
    assert topk_idx.tolist() == [[1, 3], [-1, -1], [4, 1]]  # the last token has too many, which 4 says
    assert weights[:2].tolist() == [[0.0, 3.0], [0.0, 0.0]]
    assert dense_of_lanes(topk_idx[:2], weights[:2], 4).tolist() == [[0.0, 0.0, 0.0, 3.0], [0.0] * 4]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_operators(sizes, device, monkeypatch):
    num_tokens, num_experts, num_topk = sizes
    routing_map, values = routing(device, num_tokens, num_experts, num_topk)
    topk_idx, weights = lanes_of_map(routing_map, values, num_topk)
    assert topk_idx.dtype == torch.int64 and weights.dtype == torch.float32
    assert torch.equal(topk_idx, topk_from_map(routing_map, num_topk)) and torch.equal(weights, weights_at(values, topk_idx))
    assert torch.equal(lanes_of_map(routing_map, None, num_topk)[0], topk_idx)
    assert torch.equal(dense_of_lanes(topk_idx, weights, num_experts), torch.where(routing_map, values, 0.0))
    native = lanes.native_for(routing_map)
    if native is not None:  # which declines none of these
        assert native.lanes_of_map(routing_map, values, num_topk) is not None
        assert native.dense_of_lanes(topk_idx, weights, num_experts) is not None
        assert native.count_lanes(topk_idx, num_experts, 1) is not None
        assert native.lanes_of_map(routing_map, values[:, 1:], num_topk) is None, "values of another shape"
        assert native.dense_of_lanes(topk_idx, weights.clone().requires_grad_(), num_experts) is None, "a gradient is wanted"
    monkeypatch.setattr(lanes, "native_for", lambda tensor: None)  # as in a build without kernels
    assert all(map(torch.equal, lanes_of_map(routing_map, values, num_topk), (topk_idx, weights)))
    assert torch.equal(dense_of_lanes(topk_idx, weights, num_experts), torch.where(routing_map, values, 0.0))


def test_counts_by_hand(device):
    """A lane of no expert, an expert twice, numbers that are none, and two experts of one rank."""
    topk_idx = torch.tensor([[0, 1, -1], [5, 5, 3], [-1, -1, -1], [6, -2, 4]], device=device)
    per_rank, per_expert, in_rank = count_lanes(topk_idx, 6, 3)
    assert per_rank.tolist() == [1, 1, 2] and per_expert.tolist() == [1, 1, 0, 1, 1, 1]
    assert in_rank.tolist() == [[True, False, False], [False, True, True], [False] * 3, [False, False, True]]
    assert per_rank.dtype == per_expert.dtype == torch.int32 and in_rank.dtype == torch.bool


@pytest.mark.parametrize("is_int64", (True, False))
@pytest.mark.parametrize(
    "sizes", [(0, 4, 2, 2), (5, 1, 1, 1), (9, 12, 0, 3), (70, 256, 32, 8), (5000, 64, 8, 64), (33, 1000, 40, 40)], ids=str
)
def test_counts_equal_operators(sizes, is_int64, device, monkeypatch):
    num_tokens, num_experts, num_topk, num_ranks = sizes
    drawn = torch.randint(-2, num_experts + 2, (num_tokens, num_topk), generator=torch.Generator().manual_seed(1))
    topk_idx = (drawn if is_int64 else drawn.int()).to(device)
    actual = count_lanes(topk_idx.T.contiguous().T, num_experts, num_ranks)
    monkeypatch.setattr(lanes, "native_for", lambda tensor: None)
    assert all(map(torch.equal, actual, count_lanes(topk_idx, num_experts, num_ranks)))


def test_strides_and_dtypes(device):
    """Strides and dtypes of arguments do not matter, and no result has PyTorch's default dtype."""
    routing_map, values = routing(device, 12, 16, 4)
    values = values.bfloat16()
    want = lanes_of_map(routing_map, values.float(), 4)
    dense = dense_of_lanes(*want, 16)
    for dtype in (torch.bool, torch.int32, torch.float32):
        assert all(map(torch.equal, lanes_of_map(routing_map.to(dtype).T.contiguous().T, values.T.contiguous().T, 4), want))
    assert torch.equal(dense_of_lanes(*(lanes.T.contiguous().T for lanes in want), 16), dense)
    for default in (torch.bfloat16, torch.float64):
        with default_dtype(default):
            got = lanes_of_map(routing_map, values, 4)
            again = dense_of_lanes(*got, 16)
            scales = quantize_fp8(torch.ones(2, 256, dtype=torch.float32, device=device))[1]
        assert all(map(torch.equal, got, want)) and torch.equal(again, dense)
        assert scales.dtype == torch.float32 and scales.tolist() == [[pytest.approx(1 / 448)] * 2] * 2


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_gradients(device, dtype):
    """Chosen experts get the gradient of their lane, a refused token's no lane's that names no expert, and the others 0."""
    routing_map, values = routing(device, 33, 24, 3)
    routing_map[-1, :4] = True
    ours, theirs = (values.to(dtype).requires_grad_() for _ in range(2))
    topk_idx, weights = LanesOfMap.apply(routing_map, ours, 3)
    expected = weights_at(theirs, topk_idx)
    is_sent = topk_idx[:, 0] < 24
    assert weights.dtype == torch.float32 and torch.equal(weights[is_sent], expected[is_sent]) and is_sent.sum() == 32
    grad = torch.randn(33, 3, generator=torch.Generator().manual_seed(1)).to(device)
    weights.backward(grad)
    expected.backward(grad)
    assert ours.grad.dtype == dtype and torch.equal(ours.grad[is_sent], theirs.grad[is_sent]) and not topk_idx.requires_grad
