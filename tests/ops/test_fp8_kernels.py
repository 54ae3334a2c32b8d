"""fp8 products and their GPU kernels against fp32 products of the dequantized operands. Memory that must not be read holds NaN."""

import itertools

import pytest
import torch
from exchange_cases import device_of
from torch.nn.functional import silu

from deepep_moe.ops.fp8_products import grouped_fp8_product, grouped_fp8_weight_gradient, rescale_transpose

E4M3 = torch.float8_e4m3fn
NAN = float("nan")
BLOCK = 128
COUNTS = ([128], [128, 0, 256, 128], [0, 0, 384])
SHAPES = ((128, 128), (384, 256), (256, 640))  # n, k: columns that fill the tiles of the kernels, and that do not


@pytest.fixture
def device():
    return device_of("nvlink", 0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request):
    return request.param


def placed(kind, *tensors):
    return [tensor.to(device_of("nvlink" if kind == "cuda" else "shm", 0)) for tensor in tensors]


def operand(generator, *shape):
    return (50 * torch.randn(shape, generator=generator)).to(E4M3)


def scales(generator, *shape):
    return torch.exp2(torch.randint(-8, -2, shape, generator=generator).float())


def ends_of(counts, device="cpu"):
    return torch.tensor(counts).cumsum(0).to(device, torch.int32)


def groups_of(counts):
    return [slice(start, end) for start, end in itertools.pairwise(itertools.accumulate(counts, initial=0))]


def product_case(counts, n, k, num_rows):
    """x, its scales, w, its scales on the CPU, the products in fp32, and those of magnitudes. Rows after the last group's are NaN."""
    generator = torch.Generator().manual_seed(n + k)
    x, x_scales = operand(generator, num_rows, k), scales(generator, num_rows, k // BLOCK)
    x[sum(counts) :], x_scales[sum(counts) :] = NAN, NAN
    w, w_scales = operand(generator, len(counts), n, k), scales(generator, len(counts), n // BLOCK, k // BLOCK)
    rows = x.float() * x_scales.repeat_interleave(BLOCK, 1)
    matrices = w.float() * w_scales.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return (x, x_scales, w, w_scales), *products_of(groups_of(counts), rows, matrices)


def products_of(groups, rows, matrices):
    pairs = [(rows[group], matrix) for group, matrix in zip(groups, matrices, strict=True)]
    return torch.cat([x @ w.t() for x, w in pairs]), torch.cat([x.abs() @ w.abs().t() for x, w in pairs])


def gradient_case(counts, n, k, num_rows):
    """Scales of x are those of 128 columns each, as `rescale_transpose` makes them, but for the first 130 columns."""
    generator = torch.Generator().manual_seed(n + k)
    dy, dy_scales = operand(generator, n, num_rows), scales(generator, num_rows // BLOCK, n)
    x, x_scales = operand(generator, k, num_rows), scales(generator, num_rows // BLOCK, k // BLOCK).repeat_interleave(BLOCK, 1)
    x_scales[:, :130] = scales(generator, num_rows // BLOCK, min(130, k))
    for values, of_values in ((dy, dy_scales), (x, x_scales)):
        values[:, sum(counts) :], of_values[sum(counts) // BLOCK :] = NAN, NAN
    grads, rows = (v.float() * s.t().repeat_interleave(BLOCK, 1) for v, s in ((dy, dy_scales), (x, x_scales)))
    pairs = [(grads[:, group], rows[:, group].t()) for group in groups_of(counts)]
    magnitudes = torch.stack([dy.abs() @ x.abs() for dy, x in pairs])
    return (dy, dy_scales, x, x_scales), torch.stack([dy @ x for dy, x in pairs]), magnitudes


def assert_close(ours, expected, magnitudes, kind="cuda"):
    """Check that the error is at most 2^-11 of the sum of magnitudes plus one rounding to the dtype.

    Hopper's tensor cores shift 32 products and the sum so far to the largest exponent among them, and drop bits below 2^-13 of it. Each of
    33 terms in the 4 steps of a block loses half of that on average. In random operands the largest exponent is about 1/16 of the sum of
    magnitudes: 132 / 2 * 2^-13 / 16 is 2^-11. An H100's largest error here was half of that. CPUs add in fp32.
    """
    bound = (2**-11 if kind == "cuda" else 2**-20) * magnitudes + torch.finfo(ours.dtype).eps * expected.abs()
    error = (ours.cpu().float() - expected).abs()
    assert (error <= bound).all(), f"error {error.max()}, {(error / bound.clamp(min=1e-30)).max()} of the bound"


def check_product(kind, counts, n, k, num_rows):
    operands, expected, magnitudes = product_case(counts, n, k, num_rows)
    y = grouped_fp8_product(*placed(kind, *operands, ends_of(counts)))
    assert y.dtype == torch.bfloat16 and y.shape == (num_rows, n)
    assert_close(y[: sum(counts)], expected, magnitudes, kind)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_product(kind, counts, n, k):
    check_product(kind, counts, n, k, sum(counts) + 72)


def test_product_of_groups_that_end_anywhere(kind):
    """Rows of the next group are in the tile that a group ends in."""
    check_product(kind, [5, 0, 130, 1], 128, 256, 136)


def test_a_row_does_not_depend_on_the_others(kind):
    """The last group's first rows have the same bits with other rows behind them, in other places, and beside other groups."""
    x, x_scales, w, w_scales = product_case([7], 256, 384, 7)[0]
    seen = []
    for counts in ([7], [200, 7], [1, 0, 300, 130], [*[3] * 40, 129]):
        case, first = product_case(counts, 256, 384, sum(counts))[0], sum(counts[:-1])
        case[0][first : first + 7], case[1][first : first + 7], case[2][-1], case[3][-1] = x, x_scales, w[0], w_scales[0]
        seen.append(grouped_fp8_product(*placed(kind, *case, ends_of(counts)))[first : first + 7].cpu())
    assert all(torch.equal(rows, seen[0]) for rows in seen) and seen[0].abs().sum() > 0


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_weight_gradient(kind, counts, n, k, dtype):
    operands, expected, magnitudes = gradient_case(counts, n, k, sum(counts) + BLOCK)
    *here, out = placed(kind, *operands, ends_of(counts), torch.full((len(counts), n, k), NAN, dtype=dtype))
    assert grouped_fp8_weight_gradient(*here, out) is out
    assert_close(out, expected, magnitudes, kind)


def test_refused_gradients(kind):
    operands, *_ = gradient_case([128], 128, 128, 128)
    for out in (torch.empty(1, 128, 128, dtype=torch.float16), torch.empty(1, 128, 128).transpose(1, 2)):
        with pytest.raises(ValueError, match="pass contiguous float32 or bfloat16"):
            grouped_fp8_weight_gradient(*placed(kind, *operands, ends_of([128]), out))


@pytest.mark.parametrize("shape", ((128, 128), (512, 384)), ids=str)
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", id="in_triton", marks=pytest.mark.gpu)])
def test_rescale_transpose(kind, shape):
    generator = torch.Generator().manual_seed(1)
    x, of_x = operand(generator, *shape), scales(generator, shape[0], shape[1] // BLOCK)
    for padding in (3, slice(BLOCK, 2 * BLOCK)):  # a row, and a block where there is a second one
        x[padding], of_x[padding] = 0, 0
    x_t, x_t_scales = rescale_transpose(*placed(kind, x, of_x))
    blocks, of_blocks = x.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)), of_x.unflatten(0, (-1, BLOCK))
    largest = of_blocks.amax(1, keepdim=True)
    expected = (blocks * (of_blocks / largest).nan_to_num().unsqueeze(-1)).to(E4M3).view(shape).t()
    assert torch.equal(x_t.cpu().float(), expected.float())
    assert torch.equal(x_t_scales.cpu(), largest.squeeze(1).repeat_interleave(BLOCK, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("with_probs", (True, False))
def test_swiglu_that_quantizes_in_triton(device, with_probs):
    """Each operation is rounded to bf16. exp differs in last bits, so an element may be the next of bf16 before it is quantized."""
    from deepep_moe.ops import fp8_row_kernels as kernels

    generator, num_rows, filled, width = torch.Generator().manual_seed(2), 41, 37, 384
    inner = (3 * torch.randn(num_rows, 2 * width, generator=generator)).bfloat16()
    grad, weights = torch.randn(num_rows, width, generator=generator).bfloat16(), torch.rand(num_rows, generator=generator)
    gate, up = inner[:filled].chunk(2, 1)
    product = silu(gate) * up
    factors = weights if with_probs else torch.ones(num_rows)
    wanted, grads = product.float() * factors[:filled, None], (grad[:filled].float() * factors[:filled, None]).bfloat16()
    wanted_inner = torch.cat([torch.ops.aten.silu_backward(grads * up, gate), grads * silu(gate)], 1)
    inner[filled:], grad[filled:], weights[filled:] = NAN, NAN, NAN
    probs, ends, here = weights.to(device) if with_probs else None, ends_of([5, filled - 5], device), inner.to(device)
    y = kernels.swiglu_quantized(here, probs, ends)
    grad_inner, grad_probs = kernels.swiglu_backward_quantized(grad.to(device), here, probs, ends)
    for (values, of_values), expected in ((y, wanted), (grad_inner, wanted_inner.float())):
        got = (values.float() * of_values.repeat_interleave(BLOCK, 1)).cpu()[:filled]
        largest = expected.unflatten(1, (-1, BLOCK)).abs().amax(2).repeat_interleave(BLOCK, 1)
        assert ((got - expected).abs() <= expected.abs() / 14 + largest * 2**-17).all()  # half of 1/8, and bf16's roundings
        exponents = of_values.cpu()[:filled].log2()
        assert torch.equal(exponents, exponents.round())
    if with_probs:
        torch.testing.assert_close(grad_probs.cpu()[:filled], (grad[:filled].float() * product.float()).sum(1), rtol=1e-2, atol=1e-2)
        assert (grad_probs.cpu()[filled:] == 0).all()


@pytest.mark.gpu
def test_products_in_a_cuda_graph(device):
    """A graph takes other groups at its next replay."""
    counts, others = [128, 256, 128], [384, 0, 128]
    operands, *expected = product_case(counts, 256, 256, 512)
    here, ends = [one.to(device) for one in operands], ends_of(counts, device)
    grouped_fp8_product(*here, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped_fp8_product(*here, ends)
    graph.replay()
    assert_close(y, *expected)
    ends.copy_(ends_of(others, device))
    graph.replay()
    x, x_scales, w, w_scales = operands
    matrices = w.float() * w_scales.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    assert_close(y, *products_of(groups_of(others), x.float() * x_scales.repeat_interleave(BLOCK, 1), matrices))
