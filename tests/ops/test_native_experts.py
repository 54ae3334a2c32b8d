"""Grouped SwiGLU experts made in C++: the bits that Python gives, and what is left to Python. Tails hold NaN."""

import importlib

import pytest
import torch
from exchange_cases import device_of

from deepep_moe import ops, torch_module
from deepep_moe.ops import grouped_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch_module.MODULE is None, reason="deepep_moe._torch is not built"),
]
module = importlib.import_module("deepep_moe.ops.grouped_mlp")  # whose function has the same name
IN, MIDDLE, OUT = 32, 16, 24
NAN = float("nan")
CASES = {"even": ([3, 3], 0), "an expert without rows": ([2, 0, 3], 2), "a tail": ([2, 1, 0], 4), "no rows of experts": ([0, 0], 3)}


@pytest.fixture
def device(monkeypatch):
    device = device_of("nvlink", 0)
    if device.type == "cpu":  # emulated
        monkeypatch.setattr(grouped_products, "has_kernels", lambda _: True)
        monkeypatch.setattr(module, "has_kernels", lambda _: True)
    return device


@pytest.fixture
def made(monkeypatch):
    """What C++ has made of each call: a tensor, or None where it declined."""
    found = []

    class Module:
        @staticmethod
        def grouped_swiglu(*arguments):
            found.append(torch_module.MODULE.grouped_swiglu(*arguments))
            return found[-1]

    monkeypatch.setattr(module, "torch_module", type("Modules", (), {"MODULE": Module}))
    return found


def leaves_of(counts, tail, device, *, probs=True, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_experts = sum(counts) + tail, len(counts)
    shapes = {"x": (num_rows, IN), "w1": (num_experts, 2 * MIDDLE, IN), "w2": (num_experts, OUT, MIDDLE)}
    leaves = {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}
    if probs:
        leaves["probs"] = torch.rand(num_rows, generator=generator).to(device)
    grad = torch.randn(num_rows, OUT, generator=generator).to(device, dtype)
    for rows in (leaves["x"], grad, *([leaves["probs"]] if probs else [])):
        rows[sum(counts) :] = NAN
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}, grad


def run(leaves, grad, counts, **options):
    """Output and gradients; without the tails of rows, which hold anything."""
    for leaf in leaves.values():
        leaf.grad = None
    given = torch.tensor(counts, device=grad.device)
    y = ops.grouped_mlp(leaves["x"], given, leaves["w1"], leaves["w2"], probs=leaves.get("probs"), zero_tail=False, **options)
    y.backward(grad)
    total = sum(counts)
    results = {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: value[:total] if name in ("y", "x") else value for name, value in results.items()}


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        assert not want.isnan().any() and actual[name].dtype == want.dtype
        assert torch.equal(actual[name], want), name


@pytest.mark.parametrize("recompute", (False, True), ids=("kept", "recomputed"))
@pytest.mark.parametrize("probs", (True, False), ids=("probs", "no probs"))
@pytest.mark.parametrize("case", CASES)
def test_has_the_bits_of_python(case, probs, recompute, device, made, monkeypatch):
    counts, tail = CASES[case]
    leaves, grad = leaves_of(counts, tail, device, probs=probs)
    actual = run(leaves, grad, counts, recompute_activation=recompute)
    assert len(made) == 1 and made[0] is not None and set(actual) == {"y", *leaves}
    monkeypatch.setattr(module, "_IS_BUILT", False)
    assert_same_bits(actual, run(leaves, grad, counts, recompute_activation=recompute))
    assert len(made) == 1


@pytest.mark.parametrize("frozen", ("x", "w1", "w2"))
def test_makes_only_the_gradients_that_are_wanted(frozen, device, made):
    leaves, grad = leaves_of([2, 3], 1, device)
    everything = run(leaves, grad, [2, 3])
    leaves[frozen].requires_grad_(False)
    rest = run(leaves, grad, [2, 3])
    assert_same_bits(rest, {name: value for name, value in everything.items() if name != frozen})
    assert None not in made


def test_gradient_of_any_strides(device, made, monkeypatch):
    """One row of the gradient lies beside another's, or begins at an odd address."""
    leaves, grad = leaves_of([2, 3], 0, device)
    expected = run(leaves, grad, [2, 3])
    wide = torch.full((5, 2 * OUT), NAN, device=device, dtype=torch.bfloat16)
    shifted = torch.full((5 * OUT + 1,), NAN, device=device, dtype=torch.bfloat16)
    for view in (wide[:, ::2], shifted[1:].view(5, OUT)):
        view.copy_(grad)
        assert_same_bits(run(leaves, view, [2, 3]), expected)
    assert None not in made


def test_counts_beyond_the_rows_read_none_that_do_not_exist(device, made):
    leaves, grad = leaves_of([2, 3], 0, device)
    expected = run(leaves, grad, [2, 3])
    assert_same_bits(
        {name: value[:5] if name in ("y", "x", "probs") else value for name, value in run(leaves, grad, [2, 300]).items()}, expected
    )
    assert None not in made


def test_without_gradients(device, made):
    leaves, grad = leaves_of([2, 3], 1, device)
    expected = run(leaves, grad, [2, 3])["y"]
    with torch.no_grad():
        y = ops.grouped_mlp(*(leaves[name] for name in ("x",)), torch.tensor([2, 3], device=device), leaves["w1"], leaves["w2"],
                            probs=leaves["probs"], zero_tail=False)  # fmt: skip
    assert torch.equal(y[:5], expected) and not y.requires_grad and None not in made


def test_differentiable_once(device, made):
    leaves, grad = leaves_of([2, 3], 0, device)
    y = ops.grouped_mlp(leaves["x"], torch.tensor([2, 3], device=device), leaves["w1"], leaves["w2"], zero_tail=False)
    (grad_x,) = torch.autograd.grad(y, leaves["x"], grad, create_graph=True)
    assert torch.equal(grad_x, run({name: leaf for name, leaf in leaves.items() if name != "probs"}, grad, [2, 3])["x"])
    with pytest.raises(RuntimeError, match="grouped_mlp can be differentiated once"):
        grad_x.sum().backward()


def test_weights_changed_before_the_backward_are_noticed(device, made):
    leaves, grad = leaves_of([2, 3], 0, device)
    y = ops.grouped_mlp(leaves["x"], torch.tensor([2, 3], device=device), leaves["w1"], leaves["w2"], zero_tail=False)
    with torch.no_grad():
        leaves["w2"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


def declined(leaves, device, **changes):
    given = {name: leaf.detach() for name, leaf in leaves.items()} | {"counts": torch.tensor([2, 3], device=device)} | changes
    arguments = [given.get(name) for name in ("x", "counts", "w1", "w2", "probs")]
    return torch_module.MODULE.grouped_swiglu(*arguments, False) is None


def test_what_is_left_to_python(device):
    leaves, _ = leaves_of([2, 3], 0, device)
    assert not declined(leaves, device)
    x, w1, w2, probs = (leaves[name].detach() for name in ("x", "w1", "w2", "probs"))
    wrong = {
        "fp32 rows": {"x": x.float()},
        "no rows": {"x": x[:0], "probs": probs[:0]},
        "rows apart": {"x": torch.cat([x, x], 1)[:, :IN]},
        "another width": {"x": x[:, :16].contiguous()},
        "a weight of another shape": {"w1": w1[:, :MIDDLE].contiguous()},
        "matrices apart": {"w2": torch.cat([w2, w2], 2)[..., :MIDDLE]},
        "fp64 probs": {"probs": probs.double()},
        "probs of other rows": {"probs": probs[:4]},
        "counts of other experts": {"counts": torch.tensor([2, 3, 0], device=device)},
        "floating-point counts": {"counts": torch.tensor([2.0, 3.0], device=device)},
        "odd columns": {"w2": w2[:, :, :4].contiguous(), "w1": w1[:, :8].contiguous()},
    }
    assert [name for name, changes in wrong.items() if not declined(leaves, device, **changes)] == []
    with torch.autocast(device.type, torch.bfloat16):
        assert declined(leaves, device)


def test_errors_are_those_of_python(device, made):
    leaves, _ = leaves_of([2, 3], 0, device)
    with pytest.raises(ValueError, match=r"counts has shape \[3\]; it must be \[2\]"):
        ops.grouped_mlp(leaves["x"], torch.tensor([2, 3, 0], device=device), leaves["w1"], leaves["w2"], zero_tail=False)
    assert made == [None]
