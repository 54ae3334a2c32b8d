"""The gates' decisions without slots: against DeepSpeed's gates to the bit, and whom they leave the decision to."""

import contextlib
import functools

import emulated_gpu
import pytest
import torch

pytest.importorskip("hypothesis")
from exchange_cases import default_dtype, device_of, poison_outputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("deepspeed")

from deepspeed.moe import sharded_moe
from deepspeed_cases import logged, make_moe, on_deepspeed_ranks

from deepep_moe.integrations.deepspeed import replace_moe_layers
from deepep_moe.integrations.deepspeed.native import gates
from deepep_moe.integrations.deepspeed.native.routing import ask, has_sparse_routes, route

pytestmark = pytest.mark.skipif(not has_sparse_routes(sharded_moe.TopKGate.forward), reason="DeepSpeed's gates name experts since 0.19.4")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
NAMES = ("l_aux", "counts", "topk_idx", "topk_weights", "x.grad", "wg.grad", "random numbers after it")


def assert_same_bits(gate, x, seed=1):
    """`decide` returns the results of the gate."""
    for name, got, want in zip(NAMES, passes(gate, x, False, seed), passes(gate, x, True, seed), strict=True):
        assert torch.equal(got, want), f"{name} is not what the gate has"
        assert got.dtype == want.dtype, name


def passes(gate, x, is_asked: bool, seed: int) -> list[torch.Tensor]:
    """Return the results in the order of NAMES."""
    torch.manual_seed(seed)
    x, gate.wg.weight.grad = x.clone().requires_grad_(), None
    if is_asked:
        l_aux, _, _, topk_idx, _, topk_weights, counts = ask(gate, x, None)
    else:
        assert gates.decides_alike(gate, x, None), "the speed of layers is that of a gate which is known"
        l_aux, counts, topk_idx, topk_weights = gates.decide(gate, x)
    cotangent = torch.randn(topk_weights.shape, generator=torch.Generator().manual_seed(seed)).to(x.device)
    ((topk_weights * cotangent).sum() + l_aux).backward()
    return [l_aux, counts, topk_idx.long(), topk_weights, x.grad, gate.wg.weight.grad, torch.rand(3, device=x.device)]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    k=st.sampled_from((1, 2, 3, 8)),
    num_experts=st.sampled_from((8, 12, 64)),
    num_tokens=st.sampled_from((8, 17, 500, 4096)),
    scale=st.sampled_from((1.0, 30.0)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    is_training=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "capacity_factor": st.sampled_from((0.3, 1, 1.25, 2.0)),
            "eval_capacity_factor": st.sampled_from((0.5, 1.0)),
            "min_capacity": st.sampled_from((0, 4, 8)),
            "noisy_gate_policy": st.sampled_from((None, "Jitter", "RSample")),
            "drop_tokens": st.booleans(),
            "use_rts": st.booleans(),
            "top2_2nd_expert_sampling": st.booleans(),
        }
    ),
)
def test_decisions_are_the_gates_to_the_bit(device, seed, k, num_experts, num_tokens, scale, dtype, is_training, options):
    torch.manual_seed(seed)
    gate = sharded_moe.TopKGate(16, num_experts, k=k, **options).to(device, dtype).train(is_training)
    x = (torch.randn(num_tokens, 16) * scale).to(device, dtype)
    assert_same_bits(gate, x, seed)


def test_decisions_of_few_gates():
    """Both choices of a single expert count. Experts with room for fewer tokens keep the gate's."""
    assert_same_bits(sharded_moe.TopKGate(16, 1, k=2, drop_tokens=False), torch.randn(5, 16))
    for k, options in ((1, {"use_rts": False}), (1, {}), (2, {"top2_2nd_expert_sampling": False}), (3, {})):
        assert_same_bits(sharded_moe.TopKGate(16, 8, k=k, capacity_factor=0.5, min_capacity=0, **options), torch.randn(100, 16))


def test_random_order_is_drawn_in_the_dtype_of_the_first_time(monkeypatch):
    """`decide` draws like the gate; in bf16 many numbers are equal."""
    bounds = (torch.tensor(value, dtype=torch.bfloat16) for value in (0.0, 1.0))
    monkeypatch.setitem(sharded_moe.exp_selection_uniform_map, torch.device("cpu"), torch.distributions.Uniform(*bounds).rsample)
    assert_same_bits(sharded_moe.TopKGate(16, 8, k=1, capacity_factor=0.5), torch.randn(600, 16))


def test_capacity_is_rounded_in_single_precision():
    """100 * 0.3 are more than 30 there, and 100 * 1.1 are 110, which in double are 110.00000000000001."""
    for num_tokens, num_experts, factor, want in ((100, 1, 0.3, 31), (100, 1, 1.1, 110), (4096, 64, 1.25, 80), (7, 10, 2, 4)):
        theirs = sharded_moe._capacity(torch.zeros(num_tokens, num_experts), torch.tensor(factor), torch.tensor(4))
        assert gates.capacity_of(num_tokens, num_experts, factor, 4) == int(theirs) == want


# ---- top-2 in kernels ----


@pytest.fixture
def gpu(monkeypatch):
    device = device_of("nvlink", 0)
    if emulated_gpu.is_chosen():
        monkeypatch.setattr(gates, "is_gpu", lambda device: True)
    poison_outputs()
    return device


def gradients(outputs, logits, seed):
    l_aux, _, _, topk_weights = outputs
    cotangent = torch.randn(topk_weights.shape, generator=torch.Generator().manual_seed(seed)).to(logits.device)
    which = ((l_aux, topk_weights), (1.7 * torch.ones_like(l_aux), cotangent))
    return [
        torch.autograd.grad(o, logits, g, retain_graph=True)[0] for o, g in (which, (which[0][0], which[1][0]), (which[0][1], cotangent))
    ]


@pytest.mark.gpu
@settings(max_examples=40 if emulated_gpu.is_chosen() else 200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    num_tokens=st.sampled_from((1, 2, 31, 300, 5000)),
    num_experts=st.sampled_from((1, 2, 7, 32, 100)),
    room=st.sampled_from((None, 0.0, 0.3, 1.25)),
    what=st.sampled_from(("random", "equal", "few values", "some infinite", "some nan")),
    noise=st.booleans(),
)
def test_kernels_have_the_bits_of_operations(gpu, seed, num_tokens, num_experts, room, what, noise):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator) * (what != "equal")
    logits = logits.round() if what == "few values" else logits
    scores = logits + torch.randn(logits.shape, generator=generator) if noise else logits.clone()
    if what.startswith("some"):
        scores[torch.rand(scores.shape, generator=generator) < 0.3] = torch.nan if what == "some nan" else -torch.inf
    logits, scores = logits.to(gpu).requires_grad_(), scores.to(gpu)
    assert gates.has_kernels(logits) and not gates.has_kernels(logits[:0])
    capacity = None if room is None else int(room * 2 * num_tokens / num_experts)
    ours, theirs = gates.Top2.apply(logits, scores, capacity, None), gates._choose_2(logits, scores, capacity)
    for name, got, want in zip(NAMES, ours, theirs, strict=False):
        assert torch.equal(got, want.to(got.dtype)), f"{name} is not what operations make"
    for got, want in zip(gradients(ours, logits, seed), gradients(theirs, logits, seed), strict=True):
        if emulated_gpu.is_chosen():  # PyTorch divides on CPUs, and multiplies with the reciprocal on GPUs
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(got, want), "the gradient is not what operations make"


@pytest.mark.gpu
def test_kernels_have_a_second_derivative(gpu):
    logits = torch.randn(40, 6, device=gpu, requires_grad=True)
    seconds = []
    for decided in (gates.Top2.apply(logits, logits.detach(), 9, gates._choose_2), gates._choose_2(logits, logits.detach(), 9)):
        for i in (0, 3):
            first = torch.autograd.grad(decided[i].square().sum(), logits, create_graph=True)[0]
            seconds.append(torch.autograd.grad(first.square().sum(), logits, retain_graph=True)[0])
    assert seconds[0].any() and seconds[1].any()
    torch.testing.assert_close(seconds[:2], seconds[2:])


@pytest.mark.parametrize(
    "who", ["a hook", "a subclass", "its own forward", "a timer", "autocast", "tf32", "used_token", "another source", "a wrapper", "fp64"]
)
def test_who_decides(who, monkeypatch):
    """A gate that does more than `decide` knows is called."""
    calls, used = [], None
    gate = (type("Other", (sharded_moe.TopKGate,), {}) if who == "a subclass" else sharded_moe.TopKGate)(16, 8, k=2)
    x = torch.randn(20, 16)
    assert who == "a subclass" or gates.decides_alike(gate, x, None)
    monkeypatch.setattr(gate, "wall_clock_breakdown", who == "a timer")
    stock = sharded_moe.top2gating

    def counted(*arguments, **options):
        calls.append(1)
        return stock(*arguments, **options)

    if who == "a hook":
        gate.register_forward_hook(lambda *_: None)
    elif who == "its own forward":
        monkeypatch.setattr(gate, "forward", gate.forward)
    elif who == "tf32":
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    elif who == "used_token":
        gate.k, used = 1, torch.ones(20, dtype=torch.bool)
    monkeypatch.setattr(sharded_moe, "top2gating", counted)
    if who == "a wrapper":
        monkeypatch.setattr(sharded_moe, "top2gating", functools.wraps(stock)(counted))
    elif who != "another source":  # which the counting function has
        monkeypatch.setattr(gates, "is_known", lambda *_: True)
    in_fp64 = default_dtype(torch.float64) if who == "fp64" else contextlib.nullcontext()
    with in_fp64, torch.autocast("cpu", dtype=torch.bfloat16, enabled=who == "autocast"):
        assert not gates.decides_alike(gate, x, used)
        route(gate, x, used)
    assert len(calls) == (0 if who == "used_token" else 1)


@on_deepspeed_ranks(1)
def test_gates_that_are_called_are_said(rank):
    gates.knows_the_gate = lambda: False
    with logged() as messages:
        replace_moe_layers(make_moe(ep=1))
    assert len(messages) == 1 and messages[0].startswith("DeepSpeed's gates are called, which takes longer")


def test_a_wrapper_of_a_compiled_function_is_unknown():
    """`_capacity` is scripted or compiled, as versions have it."""
    stock = sharded_moe._capacity
    assert gates.digest((stock,)) and not gates.digest((functools.wraps(stock)(lambda *_: torch.tensor(1)),))
