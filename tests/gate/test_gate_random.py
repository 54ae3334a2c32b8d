"""The gate of random options equals its definition in `deepep_moe.reference`, and so do its gradients."""

import emulated_gpu
import pytest
import torch

pytest.importorskip("hypothesis")
from gate_cases import DTYPES, SCORE_FUNCTIONS, assert_close, assert_nearby, run
from hypothesis import given, settings
from hypothesis import strategies as st

from deepep_moe import ops, reference

# Examples of random tests. The emulated GPU takes milliseconds for a token.
FEW = 60 if emulated_gpu.is_chosen() else 150


MANY_TOKENS = 40 if emulated_gpu.is_chosen() else 150


# ---- the definition, bit for bit


@st.composite
def cases(draw):
    """Tensors and settings of one call."""
    num_groups, group_size = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    topk_groups = draw(st.integers(1, num_groups))
    num_experts, num_tokens = num_groups * group_size, draw(st.integers(0, MANY_TOKENS))
    num_topk = draw(st.integers(1, min(32, topk_groups * group_size)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    logits = torch.randn(num_tokens, num_experts, generator=generator) * draw(st.sampled_from([0.1, 1.0, 8.0]))
    bias = torch.randn(num_experts, generator=generator) * 0.1
    if draw(st.booleans()):  # many ties
        logits, bias = logits.round(), (bias * 8).round() / 8
    mask = torch.rand(num_tokens, generator=generator) < 0.2
    return logits.to(draw(st.sampled_from(DTYPES))), {
        "num_topk": num_topk,
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "group_score_topk": draw(st.integers(1, group_size)),
        "score_function": draw(st.sampled_from(SCORE_FUNCTIONS)),
        "expert_bias": draw(st.sampled_from([None, bias])),
        "normalize": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "mask": draw(st.sampled_from([None, mask])),
        "index_dtype": draw(st.sampled_from([torch.int64, torch.int32])),
    }


@given(case=cases())
@settings(deadline=None, max_examples=FEW)
def test_equals_reference(device, case):
    logits, options = case
    assert_close(run(device, logits, **options), reference.gate(logits, **options))


@given(case=cases())
@settings(deadline=None, max_examples=FEW // 2)
def test_gradient_matches_reference(device, case):
    logits, options = case
    ours, expected = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    output, wanted = run(device, ours, **options), reference.gate(expected, **options)[1]
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    output.topk_weights.backward(grad)
    wanted.backward(grad)
    assert ours.grad.dtype == logits.dtype
    atol, rtol = (1e-6, 1e-5) if logits.dtype == torch.float32 else (1e-3, 1e-2)
    torch.testing.assert_close(ours.grad, expected.grad, atol=atol, rtol=rtol)


@given(case=cases(), of_others=st.booleans())
@settings(deadline=None, max_examples=FEW // 2)
def test_gradient_of_shares_matches_reference(device, case, of_others):
    """By itself, and added to those through the weights and the dense pair."""
    logits, options = case
    # The sum of the reference's gradients is to be rounded once, as ours is.
    ours, expected = logits.clone().requires_grad_(), logits.float().requires_grad_()
    output = run(device, ours, function=ops.gate_full, dense=True, shares=True, **options)
    topk_idx, topk_weights, _ = reference.gate(expected, **options)
    shares = reference.gate_shares(expected, score_function=options["score_function"], mask=options["mask"])
    generator = torch.Generator().manual_seed(0)
    grad, dense, lanes = (torch.randn(of.shape, generator=generator) for of in (shares, shares, topk_weights))

    def loss(shares, probs, weights):
        of_shares = (shares * grad).sum()
        return of_shares + (probs * dense).sum() + (weights * lanes).sum() if of_others else of_shares

    loss(output.shares, output.probs, output.topk_weights).backward()
    loss(shares, ops.to_dense(topk_idx, topk_weights, logits.shape[1])[0], topk_weights).backward()
    assert ours.grad.dtype == logits.dtype
    atol, rtol = (2e-6, 1e-5) if logits.dtype == torch.float32 else (1e-3, 1e-2)
    torch.testing.assert_close(ours.grad.float(), expected.grad, atol=atol, rtol=rtol)


@given(case=cases(), dense=st.booleans(), with_ranks=st.booleans(), with_shares=st.booleans())
@settings(deadline=None, max_examples=FEW // 2)
def test_full_gate_equals_reference(device, case, dense, with_ranks, with_shares):
    logits, options = case
    num_ranks = options["num_groups"] if with_ranks else 0
    output = run(device, logits, function=ops.gate_full, dense=dense, num_ranks=num_ranks, shares=with_shares, **options)
    expected = reference.gate(logits, **options)
    assert_close(output[:3], expected)
    probs, routing_map = ops.to_dense(output.topk_idx, output.topk_weights, logits.shape[1]) if dense else (None, None)
    per_rank, _, in_rank = reference.layout(expected[0], num_ranks, logits.shape[1]) if with_ranks else (None, None, None)
    for got, want in zip(output[3:-1], (probs, routing_map, per_rank, in_rank), strict=True):
        assert (got is None and want is None) or torch.equal(got, want), f"{got} is not {want}"
    assert (output.shares is not None) == with_shares
    if with_shares:
        expected_shares = reference.gate_shares(logits, score_function=options["score_function"], mask=options["mask"])
        assert_nearby("shares", output.shares, expected_shares)
