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


@given(case=cases(), of_others=st.booleans())
@settings(deadline=None, max_examples=FEW // 2)
def test_gradients_match_reference(device, case, of_others):
    """Gradients of weights and of shares alone, and added to those of the dense pair."""
    logits, options = case
    # The sum of the reference's gradients is to be rounded once, as ours is.
    leaf, expected = logits.clone().requires_grad_(), logits.float().requires_grad_()
    topk_idx, topk_weights, _ = reference.gate(expected, **options)
    shares = reference.gate_shares(expected, score_function=options["score_function"], mask=options["mask"])
    probs = ops.to_dense(topk_idx, topk_weights, logits.shape[1])[0]
    generator = torch.Generator().manual_seed(0)
    lanes, *wide = (torch.randn(of.shape, generator=generator) for of in (topk_weights, shares, shares))
    full = run(device, leaf, function=ops.gate_full, dense=True, shares=True, **options)
    cases = [(1e-6, [run(device, leaf, **options).topk_weights], [topk_weights], [lanes]), (2e-6, [full.shares], [shares], wide[:1])]
    if of_others:
        cases.append((2e-6, [full.topk_weights, full.shares, full.probs], [topk_weights, shares, probs], [lanes, *wide]))
    for least, results, wanted, cotangents in cases:
        atol, rtol = (least, 1e-5) if logits.dtype == torch.float32 else (1e-3, 1e-2)
        (ours,) = torch.autograd.grad(results, leaf, cotangents, retain_graph=True)
        (theirs,) = torch.autograd.grad(wanted, expected, cotangents, retain_graph=True)
        assert ours.dtype == logits.dtype
        torch.testing.assert_close(ours.float(), theirs, atol=atol, rtol=rtol)


@given(case=cases(), dense=st.booleans(), with_ranks=st.booleans(), with_shares=st.booleans())
@settings(deadline=None, max_examples=FEW)
def test_equals_reference(device, case, dense, with_ranks, with_shares):
    logits, options = case
    num_ranks = options["num_groups"] if with_ranks else 0
    output = run(device, logits, function=ops.gate_full, dense=dense, num_ranks=num_ranks, shares=with_shares, **options)
    expected = reference.gate(logits, **options)
    assert_close(output[:3], expected)
    assert_close(run(device, logits, **options), expected)
    probs, routing_map = ops.to_dense(output.topk_idx, output.topk_weights, logits.shape[1]) if dense else (None, None)
    per_rank, _, in_rank = reference.layout(expected[0], num_ranks, logits.shape[1]) if with_ranks else (None, None, None)
    for got, want in zip(output[3:-1], (probs, routing_map, per_rank, in_rank), strict=True):
        assert (got is None and want is None) or torch.equal(got, want), f"{got} is not {want}"
    assert (output.shares is not None) == with_shares
    if with_shares:
        expected_shares = reference.gate_shares(logits, score_function=options["score_function"], mask=options["mask"])
        assert_nearby("shares", output.shares, expected_shares)
