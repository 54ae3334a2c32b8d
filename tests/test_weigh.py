"""Gradients of weighing rows."""

import pytest
import torch
from exchange_cases import device_of

from deepep_moe.backends.weigh import weigh_backward

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    return device_of("nvlink", 0) if request.param == "gpu" else torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_hand(device, dtype):
    grad, x = torch.ones(3, 8, dtype=dtype), torch.arange(24, dtype=dtype).view(3, 8)
    grad[1, 2] = -2
    grad_x, grad_weights = weigh_backward(grad.to(device), x.to(device), torch.tensor([0.5, 2.0, 0.0], device=device))
    assert grad_x.dtype == dtype and grad_weights.dtype == torch.float32
    assert grad_x.tolist() == [[0.5] * 8, [2.0, 2.0, -4.0, 2.0, 2.0, 2.0, 2.0, 2.0], [0.0] * 8]
    assert grad_weights.tolist() == [28.0, 92.0 - 30.0, 156.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "hidden"), [(0, 16), (1, 8), (9, 264), (33, 1032)])
def test_equals_the_definition(device, dtype, num_rows, hidden):
    generator = torch.Generator().manual_seed(hidden)
    grad, x = (torch.randn(num_rows, hidden, generator=generator).to(dtype) for _ in range(2))
    weights = torch.randn(num_rows, generator=generator)
    grad_x, grad_weights = weigh_backward(grad.to(device), x.to(device), weights.to(device))
    assert torch.equal(grad_x.cpu(), (grad.float() * weights[:, None]).to(dtype))
    expected = (grad.double() * x.double()).sum(1)
    bound = hidden * 2**-24 * (grad.double() * x.double()).abs().sum(1)  # of any order of the sum
    assert ((grad_weights.cpu() - expected).abs() <= bound).all()
