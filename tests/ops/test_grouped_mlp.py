"""Grouped experts against their definition, a loop over the experts. Tails hold NaN."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.nn.functional import gelu

from deepep_moe import ops, reference
from deepep_moe.ops import grouped_products

IN, MIDDLE, OUT = 16, 8, 24
NAN = float("nan")


def test_small_enough_to_check_by_hand():
    """Two experts of one column: act(3 * 2) * 0.5 * 10 = 30, act(4 * 3) * 2 * 100 = 2400. The third row has no expert."""
    x, probs = torch.tensor([[2.0], [3.0], [NAN]]), torch.tensor([0.5, 2.0, NAN])
    w1, w2 = torch.tensor([[[3.0]], [[4.0]]]), torch.tensor([[[10.0]], [[100.0]]])
    leaves = [tensor.requires_grad_() for tensor in (x, w1, w2, probs)]
    y = ops.grouped_mlp(x, [1, 1], w1, w2, probs=probs, activation=lambda inner: inner)
    y.sum().backward()
    assert y.tolist() == [[30.0], [2400.0], [0.0]]
    assert [leaf.grad.flatten().tolist() for leaf in leaves] == [[15.0, 800.0, 0.0], [10.0, 600.0], [3.0, 24.0], [60.0, 1200.0, 0.0]]


def test_swiglu_by_hand():
    """The gate comes first: silu(0) = 0 with slope 1/2, so y is 0 and its gradient in the gate's weight is 1/2 * up * x = 1/2 * 6 * 2."""
    x, w1, w2 = torch.tensor([[2.0]]), torch.tensor([[[0.0], [3.0]]], requires_grad=True), torch.ones(1, 1, 1)
    y = ops.grouped_mlp(x, torch.tensor([1]), w1, w2)
    y.backward()
    assert y.item() == 0.0 and w1.grad.flatten().tolist() == [6.0, 0.0]


def make(counts, tail, dtype, *, gated=True, bias=False, probs=True, seed=0):
    """Return leaves by name, and the gradient of the output. Tails are NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_experts = sum(counts) + tail, len(counts)
    shapes = {"x": (num_rows, IN), "w1": (num_experts, 2 * MIDDLE if gated else MIDDLE, IN), "w2": (num_experts, OUT, MIDDLE)}
    shapes |= {"b1": shapes["w1"][:2], "b2": shapes["w2"][:2]} if bias else {}
    leaves = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    if probs:
        leaves["probs"] = torch.rand(num_rows, generator=generator)
    grad = torch.randn(num_rows, OUT, generator=generator).to(dtype)
    for rows in (leaves["x"], grad, *([leaves["probs"]] if probs else [])):
        rows[sum(counts) :] = NAN
    return leaves, grad


def run(function, leaves, grad, counts, **options):
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    names = {name: leaf for name, leaf in leaves.items() if name not in ("x", "w1", "w2")}
    y = function(leaves["x"], counts, leaves["w1"], leaves["w2"], **names, **options)
    y.backward(grad)
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def expected_of(leaves, grad, counts, **options):
    """The definition without the tail, and zeros there."""
    total = sum(counts)
    with_rows = {name: leaf[:total] if name in ("x", "probs") else leaf for name, leaf in leaves.items()}
    results = run(reference.grouped_mlp, with_rows, grad[:total], counts, **options)
    for name in {"y", "x", "probs"} & set(results):
        results[name] = torch.cat([results[name], results[name].new_zeros(len(grad) - total, *results[name].shape[1:])])
    return results


def assert_equal(actual, expected):
    for name, want in expected.items():
        assert actual[name].dtype == want.dtype, name
        assert torch.equal(actual[name], want), f"{name} differs by {(actual[name] - want).abs().max()}"


CASES = {
    "even": ([3, 3], 0),
    "an expert without rows": ([2, 0, 3], 0),
    "all rows to one": ([0, 7, 0], 0),
    "no rows": ([0, 0], 0),
    "a tail": ([2, 1, 0], 4),
    "a tail alone": ([0, 0, 0], 3),
}


@pytest.mark.parametrize("activation", ("swiglu", gelu), ids=("swiglu", "gelu"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_bits_of_the_definition(case, dtype, activation):
    (counts, tail), gated = CASES[case], activation == "swiglu"
    leaves, grad = make(counts, tail, dtype, gated=gated)
    actual = run(ops.grouped_mlp, leaves, grad, counts, activation=activation)
    assert_equal(actual, expected_of(leaves, grad, counts, activation=activation))


@pytest.mark.parametrize(
    "form", (list, torch.tensor, lambda counts: torch.tensor(counts, dtype=torch.int32)), ids=("list", "int64", "int32")
)
def test_forms_of_counts(form):
    leaves, grad = make([2, 3], 1, torch.bfloat16)
    assert_equal(run(ops.grouped_mlp, leaves, grad, form([2, 3])), expected_of(leaves, grad, [2, 3]))


@pytest.mark.parametrize("probs", (True, False), ids=("probs", "no probs"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_biases(dtype, probs):
    """Sums of a bias's gradient are added in another order, so they are equal within rounding only."""
    counts = [3, 0, 4]
    leaves, grad = make(counts, 2, dtype, bias=True, probs=probs)
    actual, expected = run(ops.grouped_mlp, leaves, grad, counts), expected_of(leaves, grad, counts)
    for name, want in expected.items():
        torch.testing.assert_close(actual[name], want, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


class OnDevice:
    """Makes counts on the CPU look as if they were on a GPU: a tensor that the host does not read."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(grouped_products, "is_gpu", lambda device: False)
        monkeypatch.setattr(grouped_products.Groups, "__init__", self.init)

    @staticmethod
    def init(groups, counts, num_experts, rows):
        groups.num_rows, groups._device, groups._counts = len(rows), rows.device, torch.as_tensor(counts)
        groups._sizes = [0] * num_experts if len(rows) == 0 else None


def refuse(*_):
    raise AssertionError("the host has read counts that are on the device")


@pytest.mark.skipif(not grouped_products._runs_on_cpus(), reason="this PyTorch has no grouped products for CPUs")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
def test_counts_that_the_host_does_not_read(case, bias, monkeypatch):
    (counts, tail), _ = CASES[case], OnDevice(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    monkeypatch.setattr(torch.Tensor, "item", refuse)
    leaves, grad = make(counts, tail, torch.bfloat16, bias=bias)
    actual = run(ops.grouped_mlp, leaves, grad, counts)
    monkeypatch.undo()
    for name, want in expected_of(leaves, grad, counts).items():
        torch.testing.assert_close(actual[name], want, rtol=0.03, atol=0.03)
        assert bias or torch.equal(actual[name], want)


def test_excessive_counts_on_the_device_read_no_rows_that_do_not_exist(monkeypatch):
    leaves, grad = make([2, 3], 0, torch.bfloat16)
    OnDevice(monkeypatch)
    actual = run(ops.grouped_mlp, leaves, grad, [2, 300])
    assert_equal(actual, expected_of(leaves, grad, [2, 3]))


@pytest.mark.parametrize("zero_tail", (True, False))
def test_tail_that_need_not_be_zero(zero_tail, monkeypatch):
    """Weights and probs have the same gradients either way, and so have the rows."""
    counts = [2, 3]
    leaves, grad = make(counts, 3, torch.bfloat16)
    OnDevice(monkeypatch)
    actual, expected = run(ops.grouped_mlp, leaves, grad, counts, zero_tail=zero_tail), expected_of(leaves, grad, counts)
    for name in ("y", "x"):
        actual[name], expected[name] = (results[name][: None if zero_tail else 5] for results in (actual, expected))
    assert_equal(actual, expected)


@pytest.mark.parametrize("activation", ("swiglu", gelu), ids=("swiglu", "gelu"))
def test_recomputation_gives_the_same_bits(activation):
    counts = [2, 0, 3]
    leaves, grad = make(counts, 1, torch.bfloat16, gated=activation == "swiglu")
    kept, again = (run(ops.grouped_mlp, leaves, grad, counts, activation=activation, recompute_activation=how) for how in (False, True))
    assert_equal(again, kept)


@pytest.mark.parametrize("recompute", (False, True))
def test_what_is_kept_for_the_backward(recompute):
    """The rows, the first product, and the activation unless it is computed again."""
    leaves, _ = make([2, 0, 3], 1, torch.bfloat16, probs=False)
    rows = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: rows.append(tensor.shape) or tensor, lambda tensor: tensor):
        ops.grouped_mlp(counts=[2, 0, 3], recompute_activation=recompute, **{k: v.requires_grad_() for k, v in leaves.items()})
    assert [shape for shape in rows if len(shape) == 2] == [(6, IN), (6, 2 * MIDDLE), (6, MIDDLE)][: 2 if recompute else 3]


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6), tail=st.integers(0, 5), seed=st.integers(0, 99),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)), probs=st.booleans(), gated=st.booleans(),
)  # fmt: skip
def test_random_groups(counts, tail, seed, dtype, probs, gated):
    activation = "swiglu" if gated else gelu
    leaves, grad = make(counts, tail, dtype, gated=gated, probs=probs, seed=seed)
    actual = run(ops.grouped_mlp, leaves, grad, counts, activation=activation)
    for name, want in expected_of(leaves, grad, counts, activation=activation).items():
        torch.testing.assert_close(actual[name], want, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps, msg=name)


def test_expert_by_expert_gives_the_same_bits(monkeypatch):
    leaves, grad = make([2, 0, 3], 1, torch.bfloat16)
    grouped = run(ops.grouped_mlp, leaves, grad, [2, 0, 3])
    monkeypatch.setattr(grouped_products, "_grouped_mm", lambda: None)
    assert_equal(run(ops.grouped_mlp, leaves, grad, [2, 0, 3]), grouped)


def test_only_what_needs_gradients_gets_them():
    leaves, grad = make([2, 3], 0, torch.float32)
    leaves["w1"].requires_grad_()
    ops.grouped_mlp(leaves["x"], [2, 3], leaves["w1"], leaves["w2"], probs=leaves["probs"]).backward(grad)
    assert torch.equal(leaves["w1"].grad, expected_of({n: t.detach() for n, t in leaves.items()}, grad, [2, 3])["w1"])
    assert all(leaf.grad is None for name, leaf in leaves.items() if name != "w1")


def test_strided_gradients_and_rows():
    leaves, grad = make([2, 3], 0, torch.bfloat16)
    expected = expected_of(leaves, grad, [2, 3])
    leaves["x"] = leaves["x"].repeat_interleave(2, dim=1)[:, ::2]
    assert_equal(run(ops.grouped_mlp, leaves, grad.t().contiguous().t(), [2, 3]), expected)


@pytest.mark.parametrize("gap", (0, 1, 8))
def test_weights_with_memory_between_the_experts(gap):
    """The bits are the same. With a gap of 1, matrices begin where grouped products cannot read them, so they are copied first."""
    counts = [3, 0, 5]

    def apart(weight):
        return torch.nn.functional.pad(weight.flatten(1), (0, gap), value=NAN)[:, : weight[0].numel()].view(weight.shape)

    def spread_out(x, counts, w1, w2, **others):
        assert apart(w1).stride(0) == w1[0].numel() + gap and apart(w1).is_contiguous() == (gap == 0)
        return ops.grouped_mlp(x, counts, apart(w1), apart(w2), **others)

    for dtype in (torch.float32, torch.bfloat16):
        leaves, grad = make(counts, 1, dtype, bias=True)
        assert_equal(run(spread_out, leaves, grad, counts), run(ops.grouped_mlp, leaves, grad, counts))


def test_autocast():
    leaves, grad = make([2, 3], 0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(ops.grouped_mlp, leaves, grad.bfloat16(), [2, 3])
    rounded = {name: leaf if name == "probs" else leaf.bfloat16() for name, leaf in leaves.items()}
    expected = expected_of(rounded, grad.bfloat16(), [2, 3])
    assert actual["y"].dtype == torch.bfloat16 and actual["w1"].dtype == torch.float32
    assert all(torch.equal(actual[name], want.to(actual[name].dtype)) for name, want in expected.items())


def test_clear_tail():
    values = torch.tensor([1.0, 2.0, NAN], requires_grad=True)
    cleared = ops.clear_tail(values, [1, 1])
    cleared.backward(torch.tensor([1.0, 2.0, NAN]))
    assert cleared.tolist() == [1.0, 2.0, 0.0] and values.grad.tolist() == [1.0, 2.0, 0.0]


REFUSED = {
    "x has shape [4]; it must have 2 dimensions": {"x": torch.ones(4)},
    "x, w1 and w2 have shapes [4, 3], [2, 6, 2] and [2, 2, 3]; they must be": {"x": torch.ones(4, 3)},
    "w2 has shape [2, 2, 4], but the activation of 6 columns has 3": {"w2": torch.ones(2, 2, 4)},
    "w1 has dtype torch.float16 and x torch.float32": {"w1": torch.ones(2, 6, 2, dtype=torch.float16)},
    "w1 with strides [12, 1, 6] is not contiguous; pass w1.contiguous()": {"w1": torch.ones(2, 2, 6).transpose(1, 2)},
    "w1 with strides [0, 2, 1] is not contiguous; pass w1.contiguous()": {"w1": torch.ones(1, 6, 2).expand(2, 6, 2)},
    "probs has shape [3]; it must be [4]": {"probs": torch.ones(3)},
    "b2 has shape [2, 3]; it must be [2, 2]": {"b2": torch.ones(2, 3)},
    "counts has shape [3]; it must be [2]": {"counts": [1, 1, 1]},
    "counts is [5, 1] with sum 6; entries must be at least 0, and their sum at most the 4 rows of x": {"counts": [5, 1]},
    "counts is [-1, 1] with sum 0": {"counts": torch.tensor([-1, 1])},
    "counts has dtype float32; it must be int64 or int32": {"counts": torch.ones(2)},
    "activation is 'relu'; it must be 'swiglu' or a function": {"activation": "relu"},
    "w2 must be a torch.Tensor, not list": {"w2": [1]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    arguments = {"x": torch.ones(4, 2), "counts": [2, 2], "w1": torch.ones(2, 6, 2), "w2": torch.ones(2, 2, 3)} | REFUSED[message]
    with pytest.raises((ValueError, TypeError)) as raised:
        ops.grouped_mlp(**arguments)
    assert message in str(raised.value)


def test_reasons_to_go_expert_by_expert(monkeypatch):
    rows = torch.ones(4, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(grouped_products, "_runs_on_cpus", lambda: True)
    assert grouped_products.why_not_grouped(rows, 8) is None
    assert "x has dtype float32; grouped products need bfloat16" in grouped_products.why_not_grouped(rows.float(), 8)
    assert "12 rows and 16 columns; grouped products need multiples of 8" in grouped_products.why_not_grouped(rows, 12)
    monkeypatch.setattr(grouped_products, "_runs_on_cpus", lambda: False)
    assert "has grouped products for GPUs only; install PyTorch 2.10 or newer" in grouped_products.why_not_grouped(rows, 8)
    monkeypatch.setattr(grouped_products, "_grouped_mm", lambda: None)
    assert "has no torch.nn.functional.grouped_mm; install PyTorch 2.10 or newer" in grouped_products.why_not_grouped(rows, 8)


def test_a_gpu_says_once_that_it_goes_expert_by_expert(monkeypatch, caplog):
    monkeypatch.setattr(grouped_products, "is_gpu", lambda device: True)
    grouped_products._warn.cache_clear()
    for _ in range(2):
        assert not grouped_products._is_grouped(torch.ones(4, 16), 8)
    (record,) = caplog.records
    assert record.message.startswith("products of experts run one expert after another") and "x has dtype float32" in record.message
