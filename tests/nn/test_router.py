"""The router module, the update of the expert bias, and the auxiliary losses of sequences and of the global batch."""

import pytest
import torch
import torch.distributed as dist
from exchange_cases import default_dtype
from on_ranks import on_ranks

from deepep_moe import ops, reference
from deepep_moe.nn import Router


def make_router(**options):
    torch.manual_seed(0)
    return Router(16, 8, 2, num_groups=4, topk_groups=2, **options)


def test_router_is_linear_then_gate():
    router, x = make_router(expert_bias=True, routed_scaling_factor=2.5), torch.randn(2, 3, 16)
    router.expert_bias.copy_(torch.linspace(-0.2, 0.2, 8))
    output = router(x)
    expected = ops.gate(
        x.view(6, 16) @ router.weight.t(), 2, num_groups=4, topk_groups=2, expert_bias=router.expert_bias, routed_scaling_factor=2.5
    )
    assert torch.equal(output.topk_idx, expected.topk_idx)
    torch.testing.assert_close(output.topk_weights, expected.topk_weights)
    (output.topk_weights * torch.randn(6, 2)).sum().backward()
    assert router.weight.grad.abs().sum() > 0


def test_router_computes_in_fp32_whatever_its_input_and_autocast():
    router, x = make_router(), torch.randn(20, 16).bfloat16()
    expected = router(x.float()).topk_weights
    assert torch.equal(router(x).topk_weights, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x).topk_weights, expected)


def test_router_counts_in_training_and_balances():
    router = make_router(expert_bias=True)
    x = torch.randn(50, 16)
    counts = router(x).num_tokens_per_expert + router(x, torch.arange(50) < 25).num_tokens_per_expert
    router.eval()(x)
    with torch.no_grad():
        router.train()(x)
    assert torch.equal(router.num_tokens_per_expert, counts.long())
    router.update_expert_bias(0.5)
    assert torch.equal(router.expert_bias, 0.5 * torch.sign(counts.sum() / 8 - counts))
    assert router.num_tokens_per_expert.tolist() == [0] * 8


def test_router_keeps_the_bias_in_fp32():
    router = make_router(expert_bias=True)
    router.expert_bias.fill_(1.001)
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert torch.equal(router.expert_bias, torch.full((8,), 1.001))
    assert list(router.state_dict()) == ["weight", "expert_bias"]
    router(torch.randn(4, 16).bfloat16()).topk_weights.sum().backward()
    assert router.weight.grad.dtype == torch.bfloat16


def test_router_compiles():
    router, x = make_router(expert_bias=True), torch.randn(5, 16)
    expected = router(x)
    output = torch.compile(router, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(output.topk_idx, expected.topk_idx)
    assert router.num_tokens_per_expert.sum() == 2 * 5 * 2


ROUTER = {"hidden": 16, "num_experts": 8, "num_topk": 2}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_groups": 3}, ValueError, "num_groups is 3; it must divide the 8 experts"),
        ({"routed_scaling_factor": None}, TypeError, "routed_scaling_factor is None; it must be a float"),
        ({"expert_bias": torch.zeros(8)}, TypeError, "expert_bias is tensor.*; it must be a bool"),
        ({"num_topk": 2.0}, TypeError, "num_topk is 2.0; it must be an int"),
        ({"hidden": 16.0}, TypeError, "hidden is 16.0"),
    ],
)
def test_router_errors(options, error, message):
    with pytest.raises(error, match=message):
        Router(**(ROUTER | options))


# ---- the update of the bias ----


def test_update_expert_bias_by_hand():
    """Each layer has a mean of its own, and the last one has nothing to move."""
    bias, counts = torch.ones(3, 4), torch.tensor([[1, 3, 2, 2], [9, 6, 7, 5], [7, 7, 7, 7]], dtype=torch.int32)
    ops.update_expert_bias(bias, counts, 0.25)
    assert bias.tolist() == [[1.25, 0.75, 1.0, 1.0], [0.75, 1.25, 0.75, 1.25], [1.0] * 4]


@on_ranks(2)
def test_update_expert_bias_sums_over_the_group(rank, num_ranks):
    bias, counts = torch.zeros(3), torch.tensor([[5, 1, 3], [1, 3, 2]])[rank]
    ops.update_expert_bias(bias, counts, 1.0, dist.group.WORLD)
    assert bias.tolist() == [-1.0, 1.0, 0.0] and counts.tolist() == [[5, 1, 3], [1, 3, 2]][rank]


ZEROS = torch.zeros(4)


@pytest.mark.parametrize(
    ("bias", "counts", "error", "message"),
    [
        (None, None, ValueError, "no expert_bias to update; make it with Router"),
        (ZEROS, ZEROS[:3].int(), ValueError, r"num_tokens_per_expert has shape \[3\]; it must be \[4\]"),
        (ZEROS.half(), ZEROS.int(), TypeError, "expert_bias has dtype float16; it must be float32"),
        (ZEROS, ZEROS, TypeError, "num_tokens_per_expert has dtype float32; it must be int64 or int32"),
        (torch.zeros(2, 4).t(), torch.zeros(4, 2).int(), ValueError, r"expert_bias has shape \[4, 2\]; it must be contiguous"),
        (ZEROS, ZEROS.int().to("meta"), ValueError, "num_tokens_per_expert is on meta; it must be on cpu, like expert_bias"),
    ],
)
def test_update_expert_bias_errors(bias, counts, error, message):
    with pytest.raises(error, match=message):
        make_router().update_expert_bias(0.1) if bias is None else ops.update_expert_bias(bias, counts, 0.1)


def test_sequence_aux_loss_by_hand():
    # One sequence of two tokens over two experts, both choosing expert 0: f = (2, 0), P_0 = 5/8.
    shares, topk_idx = torch.tensor([[0.5, 0.5], [0.75, 0.25]]), torch.tensor([[0], [0]])
    assert ops.sequence_aux_loss(shares, topk_idx, 2, coefficient=0.1).item() == pytest.approx(0.125)
    # There are two sequences: f = (2, 0) in each, P_0 = 1/2 and 3/4.
    assert ops.sequence_aux_loss(shares, topk_idx, [1, 1], coefficient=0.1).item() == pytest.approx(0.125)
    assert ops.sequence_aux_loss(shares, torch.tensor([[1], [0]]), 1, coefficient=1.0).item() == pytest.approx((1 + 1.5) / 2)


# ---- auxiliary losses ----


def test_global_aux_loss_by_hand():
    # The case above again: f = (1, 0), so the loss is num_experts times P_0 = 5/8.
    shares, topk_idx = torch.tensor([[0.5, 0.5], [0.75, 0.25]], requires_grad=True), torch.tensor([[0], [0]])
    counts = torch.tensor([2, 0], dtype=torch.int32)
    loss = ops.global_aux_loss(shares, topk_idx, counts, coefficient=0.1)
    assert loss.item() == pytest.approx(0.125)
    loss.backward()  # coefficient * num_experts * f_i / num_tokens
    torch.testing.assert_close(shares.grad, torch.tensor([[0.1, 0.0], [0.1, 0.0]]))
    # With choices of other micro-batches f = (1/4, 3/4), P = (5/8, 3/8).
    counts = torch.tensor([2, 6], dtype=torch.int32)
    loss = ops.global_aux_loss(shares, topk_idx, counts, coefficient=1.0)
    assert loss.item() == pytest.approx(2 * (1 / 4 * 5 / 8 + 3 / 4 * 3 / 8))
    assert counts.tolist() == [2, 6]


@pytest.mark.parametrize("score_function", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_aux_losses_equal_the_formulas_and_ignore_masked_tokens(device, score_function):
    logits, mask = torch.randn(12, 6, generator=torch.Generator().manual_seed(1)), torch.arange(12) == 4
    logits[4] = torch.nan
    leaf, expected = logits.to(device).requires_grad_(), logits.clone().requires_grad_()
    output = ops.gate_full(leaf, 2, mask=mask.to(device), score_function=score_function, shares=True)
    shares, topk_idx = reference.gate_shares(expected, score_function=score_function, mask=mask), output.topk_idx.tolist()

    def loss_of(tokens):
        chosen = [sum(expert in topk_idx[token] for token in tokens) for expert in range(6)]
        return sum(6 / (2 * len(tokens)) * chosen[expert] * shares[list(tokens), expert].mean() for expert in range(6))

    all_tokens = (*range(4), *range(5, 12))
    routed = output.shares, output.topk_idx
    losses = (
        (ops.sequence_aux_loss(*routed, [5, 7], coefficient=3.0), 3 * (loss_of(range(4)) + loss_of(range(5, 12))) / 2),
        (ops.sequence_aux_loss(*routed, 12, coefficient=1.0), loss_of(all_tokens)),
        (ops.global_aux_loss(*routed, output.num_tokens_per_expert, coefficient=1.0), loss_of(all_tokens)),
    )
    for ours, theirs in losses:
        torch.testing.assert_close(ours.cpu(), theirs)
        (grad,), (wanted,) = torch.autograd.grad(ours, leaf, retain_graph=True), torch.autograd.grad(theirs, expected, retain_graph=True)
        torch.testing.assert_close(grad.cpu(), wanted, atol=1e-7, rtol=1e-5)
        assert grad[4].tolist() == [0.0] * 6


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64), ids=str)
def test_aux_losses_under_a_default_dtype(dtype):
    """Fractions of choices are fp32, whatever dtype PyTorch gives to a quotient of integers."""
    shares, topk_idx = torch.rand(3, 4), torch.tensor([[0, 1], [0, 3], [1, 0]])
    expected = all_losses(shares, topk_idx)
    with default_dtype(dtype):
        actual = all_losses(shares, topk_idx)
    assert actual.dtype == torch.float32 and torch.equal(actual, expected)


def all_losses(shares, topk_idx):
    """Return the losses of one sequence, of two, and of all tokens."""
    counts = (topk_idx.flatten() == torch.arange(4).unsqueeze(1)).sum(1)
    sequences = [ops.sequence_aux_loss(shares, topk_idx, lengths, coefficient=1.0) for lengths in (len(shares), [1, len(shares) - 1])]
    return torch.stack([*sequences, ops.global_aux_loss(shares, topk_idx, counts, coefficient=1.0)])


def test_aux_losses_compile():
    shares, topk_idx = torch.rand(6, 4, requires_grad=True), torch.tensor([[0, 1]] * 6)
    compiled = torch.compile(all_losses, fullgraph=True, backend="aot_eager")(shares, topk_idx)
    torch.testing.assert_close(compiled, all_losses(shares, topk_idx))


def test_aux_losses_without_tokens():
    shares, topk_idx = torch.zeros(0, 4, requires_grad=True), torch.zeros(0, 2, dtype=torch.int32)
    for num_tokens in (3, [], [0, 0]):
        assert ops.sequence_aux_loss(shares, topk_idx, num_tokens, coefficient=1.0).item() == 0
    loss = ops.global_aux_loss(shares, topk_idx, torch.zeros(4, dtype=torch.int32), coefficient=1.0)
    loss.backward()
    assert loss.item() == 0 and shares.grad.shape == (0, 4)


@on_ranks(2)
def test_global_aux_loss_on_two_ranks(rank, num_ranks):
    """The mean over the ranks of losses and of gradients is what one rank makes of all tokens."""
    logits = torch.randn(num_ranks, 10, 6, generator=torch.Generator().manual_seed(2))
    losses, grads = [], []
    for part, group in ((logits[rank], dist.group.WORLD), (logits.flatten(0, 1), None)):
        leaf = part.clone().requires_grad_()
        output = ops.gate_full(leaf, 2, shares=True)
        losses.append(ops.global_aux_loss(output.shares, output.topk_idx, output.num_tokens_per_expert, coefficient=1.0, group=group))
        grads += torch.autograd.grad(losses[-1], leaf)
    mean = losses[0].detach() / num_ranks
    dist.all_reduce(mean)
    torch.testing.assert_close(mean, losses[1])
    torch.testing.assert_close(grads[0] / num_ranks, grads[1].view(num_ranks, 10, 6)[rank])


SHARES = torch.zeros(4, 4)


def sequence(shares=SHARES, lengths=2):
    return ops.sequence_aux_loss(shares, torch.zeros(4, 1, dtype=torch.int64), lengths, coefficient=1.0)


def whole(shares=SHARES, num_counts=4):
    counts = torch.zeros(num_counts, dtype=torch.int32)
    return ops.global_aux_loss(shares, torch.zeros(4, 1, dtype=torch.int64), counts, coefficient=1.0)


@pytest.mark.parametrize(
    ("loss", "arguments", "error", "message"),
    [
        (sequence, {"lengths": 3}, ValueError, "num_tokens_per_sequence is 3; it must divide the 4 tokens"),
        (sequence, {"lengths": [2, 3]}, ValueError, "num_tokens_per_sequence has a sum of 5; it must be the 4 tokens"),
        *((loss, {"shares": torch.zeros(3, 4)}, ValueError, r"shapes \[3, 4\] and \[4, 1\]") for loss in (sequence, whole)),
        (whole, {"num_counts": 3}, ValueError, r"num_tokens_per_expert has shape \[3\]; it must be \[4\], as shares have it"),
        *((loss, {"shares": None}, TypeError, r"shares is None; .* gate_full\(..., shares=True\)") for loss in (sequence, whole)),
    ],
)
def test_aux_loss_errors(loss, arguments, error, message):
    with pytest.raises(error, match=message):
        loss(**arguments)
