"""The router module, the update of the expert bias, and the sequence-wise auxiliary loss."""

import pytest
import torch
import torch.distributed as dist
from exchange_cases import device_of

from deepep_moe import ops
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


def test_router_errors():
    with pytest.raises(ValueError, match="num_groups must divide the 8 experts, got 3"):
        Router(16, 8, 2, num_groups=3)
    with pytest.raises(ValueError, match="no expert_bias to update; make it with Router"):
        make_router().update_expert_bias(0.1)


def test_update_expert_bias_by_hand():
    bias, counts = torch.zeros(4), torch.tensor([1, 3, 2, 2], dtype=torch.int32)
    ops.update_expert_bias(bias, counts, 0.25)
    assert bias.tolist() == [0.25, -0.25, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"must have the shape of expert_bias \[4\], got \[3\]"):
        ops.update_expert_bias(bias, counts[:3], 0.25)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_update_expert_bias_of_all_layers(device, dtype):
    device, generator = device_of("nvlink" if device == "cuda" else "shm", 0), torch.Generator().manual_seed(3)
    counts = torch.randint(0, 9, (11, 70), generator=generator, dtype=dtype)
    counts[4] = 7  # nothing to move
    bias = torch.randn(11, 70, generator=generator)
    expected = bias + 0.001 * torch.sign(counts.double().mean(1, keepdim=True) - counts).float()
    ours = bias.to(device)
    ops.update_expert_bias(ours, counts.to(device), 0.001)
    torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=1e-7)
    assert torch.equal(ours.cpu()[4], bias[4])
    one_by_one = bias.to(device)
    for layer in range(11):
        ops.update_expert_bias(one_by_one[layer], counts[layer].to(device), 0.001)
    assert torch.equal(one_by_one, ours)


@pytest.mark.parametrize(
    ("bias", "counts", "error", "message"),
    [
        (torch.zeros(4).half(), torch.zeros(4).int(), TypeError, "expert_bias must be torch.float32, got torch.float16"),
        (torch.zeros(4), torch.zeros(4), TypeError, "num_tokens_per_expert must be torch.int64 or torch.int32, got torch.float32"),
        (torch.zeros(2, 4).t(), torch.zeros(4, 2).int(), ValueError, r"expert_bias must be contiguous .*, got shape \[4, 2\]"),
        (
            torch.zeros(4),
            torch.zeros(4, device="meta").int(),
            ValueError,
            "num_tokens_per_expert must be on cpu as expert_bias is, got meta",
        ),
    ],
)
def test_update_expert_bias_errors(bias, counts, error, message):
    with pytest.raises(error, match=message):
        ops.update_expert_bias(bias, counts, 0.1)


def test_update_expert_bias_sums_over_the_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        bias, counts = torch.zeros(2), torch.tensor([5, 1], dtype=torch.int32)
        ops.update_expert_bias(bias, counts, 1.0, dist.group.WORLD)
        assert bias.tolist() == [-1.0, 1.0]
        assert counts.tolist() == [5, 1]
    finally:
        dist.destroy_process_group()


def test_sequence_aux_loss_by_hand():
    # One sequence of two tokens over two experts, scores (1/2, 1/2) and (3/4, 1/4), both choosing expert 0: f = (2, 0), P_0 = 5/8.
    logits = torch.tensor([[0.0, 0.0], [1.0986123, -1.0986123]])
    topk_idx = torch.tensor([[0], [0]])
    assert ops.sequence_aux_loss(logits, topk_idx, 2, coefficient=0.1).item() == pytest.approx(0.125)
    # As two sequences: f = (2, 0) in each, P_0 = 1/2 and 3/4.
    assert ops.sequence_aux_loss(logits, topk_idx, [1, 1], coefficient=0.1).item() == pytest.approx(0.125)
    assert ops.sequence_aux_loss(logits, torch.tensor([[1], [0]]), 1, coefficient=1.0).item() == pytest.approx((1 + 1.5) / 2)


@pytest.mark.parametrize("score_function", ["sigmoid", "softmax"])
def test_sequence_aux_loss_of_balanced_choices_is_the_coefficient(score_function):
    logits, topk_idx = torch.zeros(4, 4), torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    loss = ops.sequence_aux_loss(logits, topk_idx, 4, coefficient=0.5, score_function=score_function)
    assert loss.item() == pytest.approx(0.5)


def test_sequence_aux_loss_equals_the_formula_and_ignores_masked_tokens():
    torch.manual_seed(1)
    logits, lengths, mask = torch.randn(12, 6), [5, 7], torch.tensor([False] * 4 + [True] + [False] * 7)
    topk_idx = ops.gate(logits, 2, mask=mask).topk_idx
    expected = 0.0
    for tokens in (range(4), range(5, 12)):
        scores = logits[list(tokens)].sigmoid()
        for expert in range(6):
            frequency = 6 / (2 * len(tokens)) * sum(expert in topk_idx[token].tolist() for token in tokens)
            expected += frequency * (scores / scores.sum(1, keepdim=True))[:, expert].mean().item() / 2
    logits[4] = float("nan")
    logits.requires_grad_()
    loss = ops.sequence_aux_loss(logits, topk_idx, lengths, coefficient=1.0)
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert logits.grad.isfinite().all() and logits.grad[4].tolist() == [0.0] * 6


def test_sequence_aux_loss_errors():
    logits, topk_idx = torch.zeros(4, 4), torch.zeros(4, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="must divide the 4 tokens, got 3"):
        ops.sequence_aux_loss(logits, topk_idx, 3, coefficient=1.0)
    with pytest.raises(ValueError, match="must add up to the 4 tokens, got a sum of 5"):
        ops.sequence_aux_loss(logits, topk_idx, [2, 3], coefficient=1.0)
    with pytest.raises(ValueError, match="score_function must be one of sigmoid, sqrtsoftplus, softmax, softmax_topk, got 'relu'"):
        ops.sequence_aux_loss(logits, topk_idx, 2, coefficient=1.0, score_function="relu")
