"""Sums of weighted rows, and gradients of the weights."""

import emulated_gpu
import pytest
import torch

from deepep_moe.ops.weighted import weighted_sum, weighted_sum_backward

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_by_hand(device, dtype):
    rows = torch.arange(32, dtype=dtype, device=device).view(2, 2, 8)
    weights = torch.tensor([[1.0, 2.0], [0.5, 0.0]], device=device)
    sums = weighted_sum(rows, weights)
    assert sums.dtype == dtype
    assert sums.tolist() == [[i + (16 + i) / 2 for i in range(8)], [2.0 * (8 + i) for i in range(8)]]
    grad_rows, grad_weights = weighted_sum_backward(torch.ones_like(sums), rows, weights)
    assert grad_rows.dtype == dtype and grad_weights.dtype == torch.float32
    assert grad_rows.tolist() == [[[1.0] * 8, [2.0] * 8], [[0.5] * 8, [0.0] * 8]]
    assert grad_weights.tolist() == [[28.0, 92.0], [156.0, 220.0]]


def test_second_derivative():
    generator = torch.Generator().manual_seed(1)
    rows, weights = torch.randn(3, 5, 8, generator=generator).requires_grad_(), torch.rand(3, 5, generator=generator).requires_grad_()

    def second(sums):
        first = torch.autograd.grad(sums.square().sum(), (rows, weights), create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), (rows, weights))

    plain = second((rows * weights.unsqueeze(-1)).sum(0))
    torch.testing.assert_close(second(weighted_sum(rows, weights)), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_topk", "num_tokens", "hidden"), [(1, 5, 8), (2, 70, 264), (3, 0, 16), (4, 1, 16), (5, 9, 1032), (32, 3, 40)])
def test_sums_equal_the_definition(device, dtype, num_topk, num_tokens, hidden, by_token):
    """Top-k entries or tokens are contiguous in memory, and a gradient starts between two pieces of 16 bytes."""
    generator = torch.Generator().manual_seed(hidden)
    rows = torch.randn(num_topk, num_tokens, hidden, generator=generator).to(dtype)
    weights = torch.randn(num_topk, num_tokens, generator=generator)
    grad = torch.randn(num_tokens * hidden + 1, generator=generator).to(dtype)
    here = [torch.transpose(tensor.transpose(0, 1).contiguous(), 0, 1) if by_token else tensor for tensor in (rows, weights)]
    here = [tensor.to(device) for tensor in here]
    sums = weighted_sum(*here).cpu()
    in_order = torch.zeros(num_tokens, hidden)
    for lane in range(num_topk):
        in_order += rows[lane] * weights[lane, :, None]
    if num_topk <= 2 or device.type == "cuda" or emulated_gpu.is_chosen():
        assert torch.equal(sums, in_order.to(dtype))
    assert num_topk > 2 or torch.equal(sums, (rows * weights.unsqueeze(-1)).sum(0).to(dtype))
    torch.testing.assert_close(sums, in_order.to(dtype))

    grad = grad.to(device)[1:].view(num_tokens, hidden)
    grad_rows, grad_weights = (tensor.cpu() for tensor in weighted_sum_backward(grad, *here))
    grad = grad.cpu()
    assert torch.equal(grad_rows, (grad.float() * weights.unsqueeze(-1)).to(dtype)) and grad_weights.dtype == torch.float32
    products = grad.double() * rows.double()
    bound = hidden * 2**-24 * products.abs().sum(-1)  # of any order of the sum
    assert ((grad_weights - products.sum(-1)).abs() <= bound).all()
