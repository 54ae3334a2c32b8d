"""The gate against hand-computed cases, its definition in `deepep_moe.reference`, and a router of transformers.

Routers of Megatron-Core: tests/integrations/megatron/test_megatron_gate.py."""

import math
from types import SimpleNamespace

import pytest
import torch
from exchange_cases import device_of, new_stream
from gate_cases import DTYPES, SCORE_FUNCTIONS, assert_close, assert_equal, check, run

from deepep_moe import ops, reference

# ---- small enough to compute by hand


THREE = [0.0, math.log(3), -math.log(3)]  # sigmoid: 1/2, 3/4, 1/4
POWERS = [math.log(math.e - 1), math.log(math.e**4 - 1), -200.0]  # sqrtsoftplus: 1, 2, almost 0
EIGHTHS = [0.0, math.log(3), math.log(4)]  # softmax: 1/8, 3/8, 4/8


@pytest.mark.parametrize(
    ("logits", "options", "idx", "weights"),
    [
        (THREE, {"routed_scaling_factor": 2.5}, [1, 0], [1.5, 1.0]),
        # The bias moves the choice, by 0.5, 0.75, 1.25, and not the weights.
        (THREE, {"expert_bias": torch.tensor([0.0, 0.0, 1.0]), "normalize": False}, [2, 1], [0.25, 0.75]),
        (POWERS, {"score_function": "sqrtsoftplus"}, [1, 0], [2 / 3, 1 / 3]),
        (EIGHTHS, {"score_function": "softmax", "normalize": False}, [2, 1], [4 / 8, 3 / 8]),
        (EIGHTHS, {"score_function": "softmax_topk", "normalize": False}, [2, 1], [4 / 7, 3 / 7]),
    ],
)
def test_by_hand(device, logits, options, idx, weights):
    output = run(device, torch.tensor([logits]), 2, **options)
    assert output.topk_idx.tolist() == [idx]
    assert output.num_tokens_per_expert.tolist() == [int(expert in idx) for expert in range(3)]
    torch.testing.assert_close(output.topk_weights, torch.tensor([weights]))


def shares_of(device, logits, num_topk=1, **options):
    return run(device, logits, num_topk, function=ops.gate_full, shares=True, **options).shares


def test_shares_by_hand(device):
    expected = torch.tensor([[1 / 3, 1 / 2, 1 / 6]])
    torch.testing.assert_close(shares_of(device, torch.tensor([THREE])), expected)
    # Nothing but the scores counts.
    options = {"expert_bias": torch.tensor([0.0, 0.0, 5.0]), "normalize": False, "routed_scaling_factor": 2.5, "num_groups": 3}
    options |= {"topk_groups": 2, "group_score_topk": 1}
    torch.testing.assert_close(shares_of(device, torch.tensor([THREE]), 2, **options), expected)
    shares = shares_of(device, torch.tensor([POWERS]), score_function="sqrtsoftplus")
    torch.testing.assert_close(shares, torch.tensor([[1 / 3, 2 / 3, 0.0]]))
    for score_function in ("softmax", "softmax_topk"):
        shares = shares_of(device, torch.tensor([EIGHTHS]), score_function=score_function)
        torch.testing.assert_close(shares, torch.tensor([[1 / 8, 3 / 8, 4 / 8]]))


def test_gradient_of_shares_by_hand(device):
    logits = torch.tensor([THREE], requires_grad=True)  # the sum of scores is 3/2
    (grad,) = torch.autograd.grad(shares_of(device, logits)[0, 0], logits)
    # d (s0 / S) = ds0 / S - s0 / S^2 dS, and ds = s (1 - s) dx = 1/4, 3/16, 3/16
    torch.testing.assert_close(grad, torch.tensor([[1 / 4 * (2 / 3 - 2 / 9), -3 / 16 * 2 / 9, -3 / 16 * 2 / 9]]))
    logits = torch.tensor([[0.0, math.log(3)]], requires_grad=True)  # shares 1/4, 3/4
    (grad,) = torch.autograd.grad(shares_of(device, logits, score_function="softmax")[0, 0], logits)
    torch.testing.assert_close(grad, torch.tensor([[3 / 16, -3 / 16]]))


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_masked_tokens_choose_nothing_and_are_not_read(device, score_function):
    logits = torch.tensor([[1.0, 2.0], [math.nan, math.inf], [2.0, 1.0]], requires_grad=True)
    how = {"mask": torch.tensor([False, True, False]), "score_function": score_function}
    output = run(device, logits, 1, function=ops.gate_full, shares=True, **how)
    assert output.topk_idx.tolist() == [[1], [-1], [0]] and output.num_tokens_per_expert.tolist() == [1, 1]
    assert output.topk_weights[1].tolist() == [0.0] and (output.topk_weights[[0, 2]] > 0).all()
    torch.testing.assert_close(output.shares.sum(1), torch.tensor([1.0, 0.0, 1.0]))
    (grad,) = torch.autograd.grad(output.topk_weights.sum() + (output.shares * torch.tensor([3.0, 1.0])).sum(), logits)
    assert grad[1].tolist() == [0.0, 0.0] and (grad[[0, 2]] != 0).all()


def test_groups_by_hand(device):
    # Groups (0, 1), (2, 3), (4, 5). The best expert is alone in group 0; by the two best, group 2 wins, then group 1.
    logits = torch.tensor([[9.0, -9.0, 1.0, 1.0, 2.0, 2.0]])
    assert run(device, logits, 2, num_groups=3, topk_groups=1).topk_idx.tolist() == [[4, 5]]
    assert run(device, logits, 3, num_groups=3, topk_groups=2).topk_idx.tolist() == [[4, 5, 2]]
    assert run(device, logits, 2, num_groups=3, topk_groups=1, group_score_topk=1).topk_idx.tolist() == [[0, 1]]


def test_experts_of_other_groups_cannot_be_chosen_however_low_the_bias(device):
    logits = torch.zeros(1, 4)
    bias = torch.tensor([-5.0, -5.0, -9.0, -9.0])
    assert run(device, logits, 2, num_groups=2, topk_groups=1, expert_bias=bias).topk_idx.tolist() == [[0, 1]]


def test_ties_go_to_the_lower_index(device):
    assert run(device, torch.zeros(1, 40), 5).topk_idx.tolist() == [[0, 1, 2, 3, 4]]
    assert run(device, torch.zeros(1, 40), 5, num_groups=8, topk_groups=2).topk_idx.tolist() == [[0, 1, 2, 3, 4]]
    assert run(device, torch.zeros(1, 40), 32, num_groups=40, topk_groups=35, group_score_topk=1).topk_idx.tolist() == [list(range(32))]
    assert run(device, torch.full((1, 6), 50.0) + torch.arange(6), 3).topk_idx.tolist() == [[0, 1, 2]]  # scores of 1, all of them
    assert run(device, torch.tensor([[-0.0, 0.0, 0.0]]), 2, score_function="softmax_topk").topk_idx.tolist() == [[0, 1]]


def test_logits_that_are_not_finite_by_hand(device):
    """NaN of any sign is greater than all numbers. Experts of -inf are chosen last and have weight 0."""
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, nan, nan], [1.0, -nan, 2.0], [-inf, 0.0, -inf], [0.0, inf, 1.0]])
    output = run(device, logits, 2, score_function="softmax_topk", check_finite=False)
    assert output.topk_idx.tolist() == [[0, 1], [1, 2], [1, 0], [1, 2]]
    assert output.topk_weights.isnan().tolist() == [[True, True], [True, True], [False, False], [True, True]]
    assert output.topk_weights[2].tolist() == [1.0, 0.0] and output.num_tokens_per_expert.tolist() == [2, 4, 2]


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
@pytest.mark.parametrize(
    "groups", [{}, {"num_groups": 4, "topk_groups": 2}, {"num_groups": 3, "topk_groups": 1, "group_score_topk": 3}], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_that_are_not_finite(device, score_function, groups, dtype):
    """They go through as through PyTorch's functions, each token has different experts, and nothing is reported."""
    nan, inf = math.nan, math.inf
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 24, generator=generator)
    for row, value in enumerate((nan, -nan, inf, -inf)):
        logits[row], logits[4 + row, 7] = value, value
        logits[8 + row, :13], logits[12 + row, ::2] = value, value
    logits[16] = torch.where(torch.rand(24, generator=generator) < 0.5, inf, -inf)
    logits, bias = logits.to(dtype).requires_grad_(), torch.linspace(-0.3, 0.3, 24).roll(3)
    for options in ({}, {"expert_bias": bias, "normalize": False}):
        options |= groups | {"score_function": score_function}
        output = run(device, logits, 3, function=ops.gate_full, dense=True, shares=True, check_finite=False, **options)
        expected = reference.gate(logits, 3, **options)
        assert torch.equal(output.topk_idx, expected[0]) and torch.equal(output.num_tokens_per_expert, expected[2])
        shares = reference.gate_shares(logits, score_function=score_function)
        for got, want in ((output.topk_weights, expected[1]), (output.shares, shares)):
            torch.testing.assert_close(got, want, rtol=3e-7, atol=0, equal_nan=True)
        assert (output.routing_map.sum(1) == 3).all()
        (grad,) = torch.autograd.grad(output.topk_weights.sum() + output.shares.square().sum(), logits)
        has_nan = output.topk_weights.isnan().any(1)
        assert has_nan[:2].all() and not grad[has_nan].isfinite().all(1).any() and grad[17:].isfinite().all()
    ops.check_gate()


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_logits_far_out(device, score_function):
    logits = torch.tensor([[3e38, -3e38, 800.0, -800.0, 90.0, -90.0, 17.4, -100.0]])
    check(device, logits, 8, score_function=score_function, normalize=False)


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_gradients_of_logits_far_out(device, score_function):
    """Scores no longer change there, and no gradient may become huge or NaN."""
    logits = torch.tensor([[0.0, -3e38, 3e38, -150.0, -800.0], [-150.0, -300.0, -800.0, -3e38, -1e5]], requires_grad=True)
    generator = torch.Generator().manual_seed(18)
    for normalize in (True, False):
        output = run(device, logits, 5, function=ops.gate_full, shares=True, score_function=score_function, normalize=normalize)
        for result in (output.topk_weights, output.shares):
            grad_result = torch.randn(result.shape, generator=generator)
            (grad,) = torch.autograd.grad((result * grad_result).sum(), logits, retain_graph=True)
            assert grad.isfinite().all() and (grad[:, 1:].abs() < 1e-9).all(), f"{grad}"


def test_strided_arguments(device):
    generator = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(12, 40, generator=generator).t(), torch.randn(24, generator=generator)[::2]
    mask = torch.zeros(80, dtype=torch.bool)[::2]
    check(device, logits, 3, expert_bias=bias, mask=mask)


@pytest.mark.parametrize("num_experts", [1, 60, 257, 512, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_experts(device, num_experts, dtype):
    """On a GPU: more than one quad a lane, quads that are not aligned, lanes without experts."""
    logits = torch.randn(5, num_experts + 1, generator=torch.Generator().manual_seed(12)).to(dtype)[:, 1:]
    for score_function in ("sigmoid", "softmax_topk"):
        check(device, logits, min(9, num_experts), score_function=score_function)


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "num_topk", "num_groups", "topk_groups"),
    [(256, 8, 8, 4), (512, 8, 8, 4), (160, 6, 8, 3), (64, 6, 1, 1), (128, 8, 4, 2), (384, 8, 1, 1), (1024, 32, 64, 7), (96, 4, 3, 2)],
)
def test_shapes_of_models(device, num_experts, num_topk, num_groups, topk_groups, is_rounded):
    generator = torch.Generator().manual_seed(16)
    logits, bias = torch.randn(6, num_experts, generator=generator) * 2, torch.randn(num_experts, generator=generator) / 8
    if is_rounded:  # many ties
        logits, bias = logits.round(), (bias * 8).round() / 8
    for options in ({}, {"expert_bias": bias}, {"expert_bias": bias, "score_function": "sqrtsoftplus", "group_score_topk": 3}):
        check(device, logits, num_topk, num_groups=num_groups, topk_groups=topk_groups, routed_scaling_factor=2.5, **options)


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_second_derivatives(device, score_function):
    """Second derivatives of weights, dense pair and shares, in the logits and in the incoming gradients; one token is masked."""
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(15)).requires_grad_()
    mask = torch.tensor([False, True, False, False, False])
    output = run(device, logits, 2, function=ops.gate_full, dense=True, shares=True, mask=mask, score_function=score_function)
    _, topk_weights, _ = reference.gate(logits, 2, mask=mask, score_function=score_function)
    probs = torch.zeros(5, 6).scatter_add(1, output.topk_idx.cpu().clamp(min=0), topk_weights)
    expected = (topk_weights, probs, reference.gate_shares(logits, mask=mask, score_function=score_function))
    for ours, theirs in zip((output.topk_weights, output.probs, output.shares), expected, strict=True):
        cotangent = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        seconds = []
        for result in (ours.cpu(), theirs):
            (grad,) = torch.autograd.grad(result, logits, cotangent, create_graph=True)
            seconds.append(
                (grad, *torch.autograd.grad(grad.square().sum() + (grad * logits).sum(), (logits, cotangent), retain_graph=True))
            )
        torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-5)
        assert seconds[0][1].any() and not seconds[0][1][1].any(), "a masked token has none"


def test_nodes_per_token_by_hand():
    topk_idx = torch.tensor([[0, 1, 2], [0, 3, 5], [-1, -1, -1], [4, -1, 1]])
    assert ops.nodes_per_token(topk_idx, 6, 3).tolist() == [2, 3, 0, 2]
    with pytest.raises(ValueError, match="num_nodes is 4"):
        ops.nodes_per_token(topk_idx, 6, 4)


def test_calls_do_not_see_counts_of_earlier_ones(device):
    for num_tokens in (3, 0, 5, 1):
        counts = run(device, torch.zeros(num_tokens, 6), 2).num_tokens_per_expert
        assert counts.tolist() == [num_tokens] * 2 + [0] * 4


# ---- torch.compile and the operator's registration


@pytest.mark.filterwarnings("error:.*custom operator")  # that its outputs are views of one memory: an error in newer versions
@pytest.mark.parametrize("is_full", [False, True])
def test_compiles_as_one_graph(device, is_full):
    def loss(logits, bias):
        options = {"num_groups": 4, "topk_groups": 2, "expert_bias": bias}
        if is_full:
            output = ops.gate_full(logits * 2, 4, dense=True, num_ranks=2, shares=True, **options)
            return (output.probs * output.routing_map).square().sum() + output.shares.square().sum(), output.num_tokens_per_rank
        output = ops.gate(logits * 2, 4, **options)
        probs, routing_map = ops.to_dense(output.topk_idx, output.topk_weights, 16)
        return (probs * routing_map).square().sum(), output.num_tokens_per_expert

    generator = torch.Generator().manual_seed(5)
    bias = torch.randn(16, generator=generator).to(device)
    eager, compiled = (torch.randn(9, 16, generator=generator.manual_seed(6)).to(device).requires_grad_() for _ in range(2))
    expected, counts = loss(eager, bias)
    output, compiled_counts = torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled, bias)
    expected.backward()
    output.backward()
    assert torch.equal(output, expected) and torch.equal(compiled_counts, counts)
    assert torch.equal(eager.grad, compiled.grad)


@pytest.mark.gpu
def test_cuda_graph_replays_count_anew():
    device = torch.device("cuda", torch.cuda.current_device())
    logits = torch.zeros(5, 12, device=device)
    ops.gate(logits, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ops.gate(logits, 2)
    for shift in (0, 3):
        logits.copy_(torch.arange(12).roll(shift).float())
        graph.replay()
        expected = reference.gate(logits.cpu(), 2)
        assert_close([tensor.cpu() for tensor in output], expected)


@pytest.mark.gpu
def test_other_stream_that_is_destroyed():
    """Another stream may get its address. So no counts are kept for it, and those of a call are zero, however busy the last stream is."""
    logits = torch.randn(300, 24).to(device_of("nvlink", 0))
    expected = ops.gate(logits, 2)
    torch.cuda.synchronize()
    num_bytes, outputs = torch.cuda.memory_allocated(), []
    for _ in range(4):
        stream, address = new_stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            outputs.append(ops.gate(logits, 2))
        assert torch.cuda.cudart().cudaStreamDestroy(address).value == 0
    torch.cuda.synchronize()
    while outputs:
        assert_equal(outputs.pop(), expected)
    assert torch.cuda.memory_allocated() == num_bytes


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_opcheck(score_function):
    logits, topk_idx = torch.randn(5, 8), torch.tensor([[0, 3]] * 5)
    gate_arguments = (None, torch.zeros(5, dtype=torch.bool), 2, 4, 2, 1, score_function, True, 1.0, True, torch.int64)
    for wanted in ((False, 0, False), (True, 4, True), (False, 0, True), (False, 4, False)):
        torch.library.opcheck(torch.ops.deepep_moe.gate.default, (logits, *gate_arguments, *wanted))
    # Its check of compiled gradients adds up all outputs, which fails on integer ones.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.deepep_moe.gate.default, (logits.requires_grad_(), *gate_arguments, False, 0, False), test_utils=utils)
    lanes, dense = torch.randn(5, 2), torch.randn(5, 8)
    for grads in ((lanes, None, None), (lanes, dense, dense), (None, None, dense)):
        arguments = (*grads, logits.detach(), topk_idx, score_function, True, 1.0)
        torch.library.opcheck(torch.ops.deepep_moe.gate_backward.default, arguments)


# ---- to_dense


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_to_dense_by_hand(index_dtype):
    topk_idx = torch.tensor([[2, 0], [-1, -1], [0, -1], [-1, 1]], dtype=index_dtype)
    topk_weights = torch.tensor([[0.7, 0.0], [9.0, 9.0], [0.5, 9.0], [9.0, 0.25]], requires_grad=True)
    probs, routing_map = ops.to_dense(topk_idx, topk_weights, 3)
    torch.testing.assert_close(probs, torch.tensor([[0, 0, 0.7], [0, 0, 0], [0.5, 0, 0], [0, 0.25, 0]]))
    assert routing_map.tolist() == [[True, False, True], [False] * 3, [True, False, False], [False, True, False]]
    probs.backward(torch.arange(12.0).view(4, 3))
    assert topk_weights.grad.tolist() == [[2, 0], [0, 0], [6, 0], [0, 10]]


# ---- a router of transformers


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_agrees_with_transformers_deepseek_v3(norm_topk_prob):
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = SimpleNamespace(
        num_experts_per_tok=8, num_local_experts=64, hidden_size=32, routed_scaling_factor=2.5, n_group=8, topk_group=4,
        norm_topk_prob=norm_topk_prob,
    )  # fmt: skip
    router = modeling.DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(7))
    # Below 0 it would lose to its "0 = excluded".
    router.e_score_correction_bias.uniform_(0, 0.1, generator=torch.Generator().manual_seed(8))
    logits, topk_weights, topk_idx = router(torch.randn(200, 32, generator=torch.Generator().manual_seed(9)))
    options = {"num_groups": 8, "topk_groups": 4, "normalize": norm_topk_prob, "routed_scaling_factor": 2.5}
    output = ops.gate(logits, 8, expert_bias=router.e_score_correction_bias, **options)
    theirs, ours = (ops.to_dense(idx, weights, 64) for idx, weights in ((topk_idx, topk_weights), output[:2]))
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[0], theirs[0])
