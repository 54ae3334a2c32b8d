"""Products by expert on a GPU do not depend on what else is multiplied: 1 to 4096 rows of an expert, 1 to 64 experts.

A row's product has the bits that it has among 4096 others. An expert's gradient of weights, a sum over its rows, has those that it has
alone. `python tests/ops/test_row_products.py` prints for each product in how many cases that holds.
"""

import itertools

import pytest
import torch

from deepep_moe.ops import grouped_products as products
from deepep_moe.ops.fp8_products import grouped_fp8_product, grouped_fp8_weight_gradient, rescale_transpose, why_no_products
from deepep_moe.ops.quant import quantize_fp8, quantize_fp8_weights

ROWS = (1, 2, 3, 8, 16, 31, 64, 65, 128, 129, 256, 1000, 2048, 4096)
EXPERTS = (1, 2, 5, 16, 33, 64)
SHAPES = ((256, 7168), (2816, 2048))  # out, in of an expert's matrix


def fp8_weights(rows, grads, weights, groups):
    across = [part for each in (grads, rows) for part in rescale_transpose(*quantize_fp8(each, power_of_two=True))]
    return grouped_fp8_weight_gradient(*across, groups.offsets, torch.empty_like(weights))


def weights_added(rows, grads, weights, groups):
    into = torch.zeros(weights.shape, device=rows.device)
    assert products._add_products(grads, rows, groups, into)
    return into


# The products of rows [num_rows, in] or of gradients [num_rows, out], by name. An expert's fp8 rows are padded to multiples of 128.
PRODUCTS = {
    "rows": lambda x, _, w, groups: products.multiply(x, w, groups),
    "gradients of rows": lambda _, grads, w, groups: products.multiply_back(grads, w, groups),
    "fp8 rows": lambda x, _, w, groups: grouped_fp8_product(*quantize_fp8(x, power_of_two=True), *quantize_fp8_weights(w), groups.offsets),
    "gradients of weights": lambda x, grads, _, groups: products.weight_gradients(grads, x, groups),
    "gradients of weights, added": weights_added,
    "gradients of weights, fp8": fp8_weights,
}


def differing(name, shape, device="cuda"):
    """Return how many cases there are, and (rows of the expert, number of experts) of those whose bits differ."""
    multiply, unit, of_weights = PRODUCTS[name], 128 if "fp8" in name else 1, "weights" in name
    kind = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": torch.bfloat16}
    x, grads, weights = (torch.randn(size, **kind) for size in ((ROWS[-1], shape[1]), (ROWS[-1], shape[0]), (EXPERTS[-1], *shape)))
    cases, found = list(itertools.product(sorted({-(-count // unit) * unit for count in ROWS}), EXPERTS)), []
    for count, num_experts in cases:
        generator, expert = torch.Generator().manual_seed(count), count % num_experts
        counts = (-(-torch.randint(0, 300, (num_experts,), generator=generator) // unit) * unit).tolist()
        counts[expert] = count
        begin, first = sum(counts[:expert]), int(torch.randint(0, ROWS[-1] - count + 1, (), generator=generator))
        here, there = slice(begin, begin + count), slice(first, first + count)
        chosen = torch.randint(0, ROWS[-1], (sum(counts),), generator=generator)
        chosen[here] = torch.arange(ROWS[-1])[there]
        rows, own = x[chosen.to(device)], there if of_weights else slice(None)
        y = multiply(rows, grads[chosen.to(device)], weights[:num_experts], products.Groups(counts, num_experts, rows))
        alone = multiply(x[own], grads[own], weights[expert, None], products.Groups([len(x[own])], 1, x[own]))
        if not (torch.equal(y[expert], alone[0]) if of_weights else torch.equal(y[here], alone[there])):
            found.append((count, num_experts))
    return len(cases), found


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_same_bits(name, shape):
    reason = "an emulated GPU" if torch.version.cuda is None else why_no_products(torch.device("cuda", torch.cuda.current_device()))
    if reason is not None:
        pytest.skip(reason)
    assert differing(name, shape)[1] == [], "(rows of the expert, experts)"


if __name__ == "__main__":
    for name, shape in itertools.product(PRODUCTS, SHAPES):
        num_cases, found = differing(name, shape)
        print(f"{name}, {shape[0]} x {shape[1]}: the same bits in {num_cases - len(found)} of {num_cases} cases", *found[:5])
