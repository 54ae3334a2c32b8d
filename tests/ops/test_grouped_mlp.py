"""Grouped experts against their definition, a loop over the experts, and those made in C++ against Python's. Tails hold NaN."""

import importlib

import hypothesis.strategies as st
import pytest
import torch
from exchange_cases import device_of
from hypothesis import given, settings
from torch.nn.functional import gelu

from deepep_moe import ops, reference, torch_module
from deepep_moe.ops import grouped_products

module = importlib.import_module("deepep_moe.ops.grouped_mlp")  # whose function has the same name
IN, MIDDLE, OUT = 16, 8, 24
NAN = float("nan")
by_activation = pytest.mark.parametrize("activation", ("swiglu", gelu), ids=("swiglu", "gelu"))


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
    """The gate comes first. Since silu(0) = 0 with slope 1/2, y is 0. Its gradient in the gate's weight is 1/2 * up * x = 1/2 * 6 * 2."""
    x, w1, w2 = torch.tensor([[2.0]]), torch.tensor([[[0.0], [3.0]]], requires_grad=True), torch.ones(1, 1, 1)
    y = ops.grouped_mlp(x, torch.tensor([1]), w1, w2)
    y.backward()
    assert y.item() == 0.0 and w1.grad.flatten().tolist() == [6.0, 0.0]


def make(counts, tail, dtype=torch.bfloat16, *, gated=True, bias=False, probs=True, seed=0):
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


def run(function, leaves, grad, counts, *, frozen=(), **options):
    """The output, and the gradients of all but the frozen leaves."""
    leaves = {name: leaf.detach().clone().requires_grad_(name not in frozen) for name, leaf in leaves.items()}
    y = function(counts=counts, **leaves, **options)
    y.backward(grad)
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def expected_of(leaves, grad, counts, **options):
    """The definition without the tail, and zeros there."""
    total = sum(counts)
    with_rows = {name: leaf[:total] if name in ("x", "probs") else leaf for name, leaf in leaves.items()}
    results = run(reference.grouped_mlp, with_rows, grad[:total], counts, **options)
    for name in {"y", "x", "probs"} & set(results):
        results[name] = torch.cat([results[name], results[name].new_zeros(len(grad) - total, *results[name].shape[1:])])
    return results


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        assert actual[name].dtype == want.dtype and not want.isnan().any(), name
        assert torch.equal(actual[name], want), f"{name} differs by {(actual[name] - want).abs().max()}"


CASES = {
    "even": ([3, 3], 0),
    "an expert without rows": ([2, 0, 3], 2),
    "all rows to one": ([0, 7, 0], 0),
    "no rows": ([0, 0], 0),
    "a tail": ([2, 1, 0], 4),
    "a tail alone": ([0, 0, 0], 3),
}


@by_activation
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_bits_of_the_definition(case, dtype, activation):
    (counts, tail), gated = CASES[case], activation == "swiglu"
    leaves, grad = make(counts, tail, dtype, gated=gated)
    actual = run(ops.grouped_mlp, leaves, grad, counts, activation=activation)
    assert_equal(actual, expected_of(leaves, grad, counts, activation=activation))


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6), tail=st.integers(0, 5), seed=st.integers(0, 99),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)), probs=st.booleans(), gated=st.booleans(), bias=st.booleans(),
)  # fmt: skip
def test_random_groups(counts, tail, seed, dtype, probs, gated, bias):
    """Sums of a bias's gradient are added in another order, so results are equal within rounding only."""
    activation = "swiglu" if gated else gelu
    leaves, grad = make(counts, tail, dtype, gated=gated, bias=bias, probs=probs, seed=seed)
    actual = run(ops.grouped_mlp, leaves, grad, counts, activation=activation)
    for name, want in expected_of(leaves, grad, counts, activation=activation).items():
        torch.testing.assert_close(actual[name], want, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps, msg=name)


@pytest.mark.parametrize(
    "form", (list, torch.tensor, lambda counts: torch.tensor(counts, dtype=torch.int32)), ids=("list", "int64", "int32")
)
def test_forms_of_counts(form):
    leaves, grad = make([2, 3], 1)
    assert_equal(run(ops.grouped_mlp, leaves, grad, form([2, 3])), expected_of(leaves, grad, [2, 3]))


@pytest.fixture
def on_device(monkeypatch):
    """Makes counts on the CPU look as if they were on a GPU: a tensor that the host does not read."""

    def init(groups, counts, num_experts, rows):
        groups.num_rows, groups._device, groups._counts = len(rows), rows.device, torch.as_tensor(counts)
        groups._sizes = [0] * num_experts if len(rows) == 0 else None

    monkeypatch.setattr(grouped_products, "is_gpu", lambda device: False)
    monkeypatch.setattr(grouped_products.Groups, "__init__", init)


def refuse(*_):
    raise AssertionError("the host has read counts that are on the device")


@pytest.mark.skipif(not grouped_products._runs_on_cpus(), reason="this PyTorch has no grouped products for CPUs")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
def test_counts_that_the_host_does_not_read(case, bias, on_device, monkeypatch):
    counts, tail = CASES[case]
    leaves, grad = make(counts, tail, bias=bias)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", refuse)
        patch.setattr(torch.Tensor, "item", refuse)
        actual = run(ops.grouped_mlp, leaves, grad, counts)
    for name, want in expected_of(leaves, grad, counts).items():
        torch.testing.assert_close(actual[name], want, rtol=0.03, atol=0.03)
        assert bias or torch.equal(actual[name], want)


def test_excessive_counts_on_the_device_read_no_rows_that_do_not_exist(on_device):
    leaves, grad = make([2, 3], 0)
    assert_equal(run(ops.grouped_mlp, leaves, grad, [2, 300]), expected_of(leaves, grad, [2, 3]))


@pytest.mark.parametrize("zero_tail", (True, False))
def test_tail_that_need_not_be_zero(zero_tail, on_device):
    """Weights and probs have the same gradients either way, and so have the rows."""
    leaves, grad = make([2, 3], 3)
    actual, expected = run(ops.grouped_mlp, leaves, grad, [2, 3], zero_tail=zero_tail), expected_of(leaves, grad, [2, 3])
    for name in ("y", "x"):
        actual[name], expected[name] = (results[name][: None if zero_tail else 5] for results in (actual, expected))
    assert_equal(actual, expected)


@by_activation
def test_recomputation_keeps_less_and_gives_the_same_bits(activation):
    """Kept are the rows, the first product, and the activation unless it is computed again."""
    results, counts, gated = [], [2, 0, 3], activation == "swiglu"
    leaves, grad = make(counts, 1, gated=gated, probs=False)
    for recompute in (False, True):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, kept=kept: kept.append(tensor.shape) or tensor, lambda tensor: tensor):
            results.append(run(ops.grouped_mlp, leaves, grad, counts, activation=activation, recompute_activation=recompute))
        wanted = [(6, IN), (6, MIDDLE * (1 + gated)), (6, MIDDLE)]
        assert not gated or [shape for shape in kept if len(shape) == 2] == wanted[: 3 - recompute]
    assert_equal(*results)


def test_expert_by_expert_gives_the_same_bits(monkeypatch):
    leaves, grad = make([2, 0, 3], 1)
    grouped = run(ops.grouped_mlp, leaves, grad, [2, 0, 3])
    monkeypatch.setattr(grouped_products, "_grouped_mm", lambda: None)
    assert_equal(run(ops.grouped_mlp, leaves, grad, [2, 0, 3]), grouped)


def main_grads_of(leaves):
    return [torch.full(leaves[name].shape, 0.5, device=leaves[name].device) for name in ("w1", "w2")]


def assert_added(main_grads, results, times):
    """Each micro-batch has added the weights' gradients in fp32."""
    for main_grad, name in zip(main_grads, ("w1", "w2"), strict=True):
        want = torch.full_like(main_grad, 0.5)
        for _ in range(times):
            want += results[name]
        assert torch.equal(main_grad, want), name


@by_activation
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_added_to_main_grads(case, dtype, activation):
    counts, tail = CASES[case]
    leaves, grad = make(counts, tail, dtype, gated=activation == "swiglu", bias=True)
    expected, main_grads = run(ops.grouped_mlp, leaves, grad, counts, activation=activation), main_grads_of(leaves)
    for times in (1, 2):
        actual = run(ops.grouped_mlp, leaves, grad, counts, activation=activation, main_grads=tuple(main_grads))
        assert_added(main_grads, expected, times)
        assert all(actual[name].shape == leaves[name].shape and actual[name].dtype == dtype for name in ("w1", "w2"))
        assert_equal(*({name: value for name, value in results.items() if name not in ("w1", "w2")} for results in (actual, expected)))


def test_delayed_gradients_are_added_where_the_caller_says():
    leaves, grad = make([2, 3], 1)
    expected, main_grads, due = run(ops.grouped_mlp, leaves, grad, [2, 3]), main_grads_of(leaves), {}
    delayed = {"delay": lambda name, compute: due.update({name: compute}), "main_grads": tuple(main_grads)}
    actual = run(ops.grouped_mlp, leaves, grad, [2, 3], **delayed)
    assert "w1" not in actual and "w2" not in actual
    assert_added(main_grads, expected, 0)
    for name, main_grad in zip(("w1", "w2"), main_grads, strict=True):
        assert torch.equal(due[name](), expected[name])
        due[name](main_grad)
    assert_added(main_grads, expected, 1)


def test_strided_gradients_and_rows():
    def strided(x, **others):
        return ops.grouped_mlp(x=x.repeat_interleave(2, dim=1)[:, ::2], **others)

    leaves, grad = make([2, 3], 0)
    assert_equal(run(strided, leaves, grad.t().contiguous().t(), [2, 3]), expected_of(leaves, grad, [2, 3]))


@pytest.mark.parametrize("gap", (0, 1, 8))
def test_weights_with_memory_between_the_experts(gap):
    """The bits are the same. With a gap of 1, matrices begin where grouped products cannot read them, so they are copied first."""
    counts = [3, 0, 5]

    def apart(weight):
        return torch.nn.functional.pad(weight.flatten(1), (0, gap), value=NAN)[:, : weight[0].numel()].view(weight.shape)

    def spread_out(w1, w2, **others):
        assert apart(w1).stride(0) == w1[0].numel() + gap and apart(w1).is_contiguous() == (gap == 0)
        return ops.grouped_mlp(w1=apart(w1), w2=apart(w2), **others)

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
    "x has shape [4]": {"x": torch.ones(4)},
    "x, w1 and w2 have shapes [4, 3], [2, 6, 2] and [2, 2, 3]": {"x": torch.ones(4, 3)},
    "w2 has shape [2, 2, 4], but the activation of 6 columns has 3": {"w2": torch.ones(2, 2, 4)},
    "w1 has dtype torch.float16": {"w1": torch.ones(2, 6, 2, dtype=torch.float16)},
    "w1 with strides [12, 1, 6] is not contiguous": {"w1": torch.ones(2, 2, 6).transpose(1, 2)},
    "w1 with strides [0, 2, 1] is not contiguous": {"w1": torch.ones(1, 6, 2).expand(2, 6, 2)},
    "probs has shape [3]": {"probs": torch.ones(3)},
    "b2 has shape [2, 3]": {"b2": torch.ones(2, 3)},
    "counts has shape [3]": {"counts": [1, 1, 1]},
    "counts is [5, 1] with sum 6": {"counts": [5, 1]},
    "counts is [-1, 1] with sum 0": {"counts": torch.tensor([-1, 1])},
    "counts has dtype float32": {"counts": torch.ones(2)},
    "activation is 'relu'": {"activation": "relu"},
    "w2 must be a torch.Tensor, not list": {"w2": [1]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    arguments = {"x": torch.ones(4, 2), "counts": [2, 2], "w1": torch.ones(2, 6, 2), "w2": torch.ones(2, 2, 3)} | REFUSED[message]
    with pytest.raises((ValueError, TypeError)) as raised:
        ops.grouped_mlp(**arguments)
    assert message in str(raised.value)


def test_a_gpu_says_once_why_it_goes_expert_by_expert(monkeypatch, caplog):
    rows, why_not = torch.ones(4, 16, dtype=torch.bfloat16), grouped_products.why_not_grouped
    monkeypatch.setattr(grouped_products, "_runs_on_cpus", lambda: True)
    assert why_not(rows, 8) is None and "12 rows and 16 columns" in why_not(rows, 12)
    monkeypatch.setattr(grouped_products, "_runs_on_cpus", lambda: False)
    assert "install PyTorch 2.10" in why_not(rows, 8)
    monkeypatch.setattr(grouped_products, "_grouped_mm", lambda: None)
    assert "no torch.nn.functional.grouped_mm" in why_not(rows, 8)
    monkeypatch.undo()
    monkeypatch.setattr(grouped_products, "is_gpu", lambda device: True)
    grouped_products._warn.cache_clear()
    for _ in range(2):
        assert not grouped_products._is_grouped(rows.float(), 8)
    (record,) = caplog.records
    assert record.message.startswith("products of experts run one expert after another") and "x has dtype float32" in record.message


def test_only_what_needs_gradients_gets_them():
    leaves, grad = make([2, 3], 0, torch.float32)
    got, want = run(ops.grouped_mlp, leaves, grad, [2, 3], frozen=("x", "w2", "probs")), expected_of(leaves, grad, [2, 3])
    assert_equal(got, {name: want[name] for name in ("y", "w1")})


# ---- made in C++ ----


is_native = [pytest.mark.gpu, pytest.mark.skipif(torch_module.MODULE is None, reason="deepep_moe._torch is not built")]


@pytest.fixture(params=[pytest.param("cuda", marks=is_native)])
def device(monkeypatch):
    device = device_of("nvlink", 0)
    if device.type == "cpu":  # emulated
        monkeypatch.setattr(grouped_products, "has_kernels", lambda _: True)
        monkeypatch.setattr(module, "has_kernels", lambda _: True)
    return device


@pytest.fixture
def natives(monkeypatch):
    """Return C++'s results of each call: a tensor, or None if it declined, which the test must take out."""
    results = []

    class Module:
        @staticmethod
        def grouped_swiglu(*arguments):
            results.append(torch_module.MODULE.grouped_swiglu(*arguments))
            return results[-1]

    monkeypatch.setattr(module, "torch_module", type("Modules", (), {"MODULE": Module}))
    yield results
    assert None not in results


def make_on(device, counts, tail=0, **options):
    leaves, grad = make(counts, tail, **options)
    return {name: leaf.to(device) for name, leaf in leaves.items()}, grad.to(device)


def run_on(leaves, grad, counts, **options):
    """Output and gradients; without the tails of rows, which hold anything."""
    results = run(ops.grouped_mlp, leaves, grad, torch.tensor(counts, device=grad.device), zero_tail=False, **options)
    return {name: value[: sum(counts)] if name in ("y", "x") else value for name, value in results.items()}


def output_of(leaves, **changes):
    arguments = {"counts": torch.tensor([2, 3], device=leaves["x"].device)} | leaves | changes
    return ops.grouped_mlp(**arguments, zero_tail=False)


@pytest.mark.parametrize("recompute", (False, True), ids=("kept", "recomputed"))
@pytest.mark.parametrize("probs", (True, False), ids=("probs", "no probs"))
@pytest.mark.parametrize("case", ("even", "an expert without rows", "a tail", "a tail alone"))
def test_has_the_bits_of_python(case, probs, recompute, device, natives, monkeypatch):
    counts, tail = CASES[case]
    leaves, grad = make_on(device, counts, tail, probs=probs)
    actual = run_on(leaves, grad, counts, recompute_activation=recompute)
    assert len(natives) == 1 and natives[0] is not None and set(actual) == {"y", *leaves}
    monkeypatch.setattr(module, "_is_native", lambda *_: False)
    assert_equal(actual, run_on(leaves, grad, counts, recompute_activation=recompute))
    assert len(natives) == 1


@pytest.mark.parametrize("in_python", (False, True), ids=("C++", "Python"))
def test_adds_to_main_grads(device, natives, in_python, monkeypatch):
    """A GPU may add products that are not rounded to bf16."""
    if in_python:
        monkeypatch.setattr(module, "_is_native", lambda *_: False)
    leaves, grad = make_on(device, [2, 3], 1)
    expected, main_grads = run_on(leaves, grad, [2, 3]), main_grads_of(leaves)
    for times in (1, 2):
        run_on(leaves, grad, [2, 3], main_grads=tuple(main_grads))
        for main_grad, name in zip(main_grads, ("w1", "w2"), strict=True):
            added = times * expected[name].float()
            assert ((main_grad - 0.5 - added).abs() <= added.abs() * 2**-8 + 1e-6).all(), name


@pytest.mark.parametrize("frozen", ("x", "w1", "w2"))
def test_makes_only_the_gradients_that_are_wanted(frozen, device, natives):
    leaves, grad = make_on(device, [2, 3], 1)
    everything = run_on(leaves, grad, [2, 3])
    del everything[frozen]
    assert_equal(run_on(leaves, grad, [2, 3], frozen=(frozen,)), everything)


def test_gradient_of_any_strides(device, natives):
    """One row of the gradient lies beside another's, or begins at an odd address."""
    leaves, grad = make_on(device, [2, 3])
    expected = run_on(leaves, grad, [2, 3])
    wide = torch.full((5, 2 * OUT), NAN, device=device, dtype=torch.bfloat16)
    shifted = torch.full((5 * OUT + 1,), NAN, device=device, dtype=torch.bfloat16)
    for view in (wide[:, ::2], shifted[1:].view(5, OUT)):
        view.copy_(grad)
        assert_equal(run_on(leaves, view, [2, 3]), expected)


def test_counts_beyond_the_rows_read_none_that_do_not_exist(device, natives):
    leaves, grad = make_on(device, [2, 3])
    assert_equal(run_on(leaves, grad, [2, 300]), run_on(leaves, grad, [2, 3]))


def test_without_gradients(device, natives):
    leaves, grad = make_on(device, [2, 3], 1)
    with torch.no_grad():
        y = output_of({name: leaf.requires_grad_() for name, leaf in leaves.items()})
    assert torch.equal(y[:5], run_on(leaves, grad, [2, 3])["y"]) and not y.requires_grad


def test_differentiable_once(device, natives):
    leaves, grad = make_on(device, [2, 3], probs=False)
    expected = run_on(leaves, grad, [2, 3])["x"]
    y = output_of({name: leaf.requires_grad_() for name, leaf in leaves.items()})
    (grad_x,) = torch.autograd.grad(y, leaves["x"], grad, create_graph=True)
    assert torch.equal(grad_x, expected)
    with pytest.raises(RuntimeError, match="grouped_mlp can be differentiated once"):
        grad_x.sum().backward()


def test_a_backward_of_a_kept_graph_leaves_it_as_it_was(device, natives):
    leaves, grad = make_on(device, [2, 3])
    y = output_of({name: leaf.requires_grad_() for name, leaf in leaves.items()})
    first, second = (torch.autograd.grad(y, list(leaves.values()), grad, retain_graph=keeps) for keeps in (True, False))
    assert all(map(torch.equal, first, second))


def test_a_last_backward_needs_memory_for_its_results_only(device, natives):
    num_rows, width, num_experts = 8192, 1024, 8
    x = torch.randn(num_rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    w1, w2 = (
        torch.randn(num_experts, width, inner, device=device, dtype=torch.bfloat16, requires_grad=True) for inner in (width, width // 2)
    )
    counts = torch.full((num_experts,), num_rows // num_experts, device=device)
    y = ops.grouped_mlp(x, counts, w1, w2, zero_tail=False)
    grad, before = torch.ones_like(y), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(grad)
    results = sum(leaf.nbytes for leaf in (x, w1, w2))
    assert torch.cuda.max_memory_allocated() - before < results + x.nbytes // 4


def test_weights_changed_before_the_backward_are_noticed(device, natives):
    leaves, grad = make_on(device, [2, 3])
    y = output_of({name: leaf.requires_grad_() for name, leaf in leaves.items()})
    with torch.no_grad():
        leaves["w2"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


def test_what_is_left_to_python(device):
    leaves, _ = make_on(device, [2, 3])
    leaves["counts"] = torch.tensor([2, 3], device=device)
    x, w1, w2, probs, counts = (leaves[name] for name in ("x", "w1", "w2", "probs", "counts"))

    def is_declined(changes):
        arguments = ((leaves | changes)[name] for name in ("x", "counts", "w1", "w2", "probs"))
        return torch_module.MODULE.grouped_swiglu(*arguments, False, None, None) is None

    assert not is_declined({})
    wrong = {
        "fp32 rows": {"x": x.float()},
        "no rows": {"x": x[:0], "probs": probs[:0]},
        "rows apart": {"x": torch.cat([x, x], 1)[:, :IN]},
        "another width": {"x": x[:, : IN // 2].contiguous()},
        "a weight of another shape": {"w1": w1[:, :MIDDLE].contiguous()},
        "matrices apart": {"w2": torch.cat([w2, w2], 2)[..., :MIDDLE]},
        "fp64 probs": {"probs": probs.double()},
        "probs of other rows": {"probs": probs[:4]},
        "counts of other experts": {"counts": torch.tensor([2, 3, 0], device=device)},
        "floating-point counts": {"counts": counts.float()},
        "odd columns": {"w2": w2[:, :, :4].contiguous(), "w1": w1[:, :8].contiguous()},
    }
    assert [name for name, changes in wrong.items() if not is_declined(changes)] == []
    with torch.autocast(device.type, torch.bfloat16):
        assert is_declined({})


def test_errors_are_those_of_python(device, natives):
    leaves, _ = make_on(device, [2, 3])
    with pytest.raises(ValueError, match=r"counts has shape \[3\]"):
        output_of(leaves, counts=torch.tensor([2, 3, 0], device=device))
    assert natives.pop() is None
