"""Arguments that the gate refuses, in Python and in its native functions on a GPU."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from exchange_cases import device_of
from gate_cases import DTYPES, assert_close, run

from deepep_moe import ops, reference
from deepep_moe.ops import gate_operators

LOGITS = torch.zeros(4, 12)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_topk": 13}, ValueError, "num_topk is 13; it must be 1 to 12"),
        ({"logits": torch.zeros(4, 64), "num_topk": 33}, ValueError, "num_topk is 33; it must be 1 to 32"),
        ({"num_groups": 5}, ValueError, "num_groups is 5"),
        ({"num_groups": 4, "topk_groups": 5}, ValueError, "topk_groups is 5"),
        ({"num_groups": 12}, ValueError, "topk_groups is 1; its groups of 1 experts"),
        ({"num_groups": 4, "group_score_topk": 4}, ValueError, "group_score_topk is 4"),
        ({"score_function": "tanh"}, ValueError, "score_function is 'tanh'"),
        ({"routed_scaling_factor": math.nan}, ValueError, "routed_scaling_factor is nan"),
        ({"num_topk": 2.0}, TypeError, "num_topk is 2.0"),
        ({"group_score_topk": torch.tensor(2.0)}, TypeError, "group_score_topk is tensor"),
        ({"routed_scaling_factor": torch.tensor(2.5)}, TypeError, "routed_scaling_factor is tensor"),
        ({"normalize": "no"}, TypeError, "normalize is 'no'"),
        ({"check_finite": 0}, TypeError, "check_finite is 0"),
        ({"check_finite": False, "expert_bias": torch.full((12,), math.inf)}, ValueError, "expert_bias has inf for expert 0"),
        ({"expert_bias": torch.full((12,), math.inf)}, ValueError, "expert_bias has inf for expert 0"),
        ({"logits": LOGITS.numpy()}, TypeError, "logits must be a torch.Tensor, not ndarray"),
        ({"logits": torch.zeros(12)}, ValueError, r"logits has shape \[12\]"),
        ({"logits": LOGITS.double()}, TypeError, "logits has dtype torch.float64"),
        ({"index_dtype": torch.int16}, TypeError, "index_dtype is torch.int16"),
        ({"expert_bias": torch.zeros(11)}, ValueError, r"expert_bias has shape \[11\]"),
        ({"expert_bias": torch.zeros(12).bfloat16()}, TypeError, "expert_bias has dtype bfloat16"),
        ({"mask": torch.zeros(4)}, TypeError, "mask has dtype float32"),
        ({"logits": LOGITS.to("meta")}, ValueError, "logits is on meta"),
        ({"mask": torch.zeros(4, dtype=torch.bool, device="meta")}, ValueError, "mask is on meta; it must be on cpu"),
        ({"num_ranks": 5}, ValueError, "num_ranks is 5; it must divide the 12 experts"),
        ({"dense": None}, TypeError, "dense is None"),
        ({"num_ranks": 2, "groups": 3}, TypeError, "gate_full has no argument groups"),
    ],
)
def test_wrong_arguments(changes, error, message):
    function = ops.gate_full if {"num_ranks", "dense", "shares"} & changes.keys() else ops.gate
    with pytest.raises(error, match=message):
        function(**{"logits": LOGITS, "num_topk": 2, **changes})


def test_numbers_of_numpy_and_an_integer_factor():
    numbers = {"num_topk": 2, "num_groups": 4, "topk_groups": 2, "group_score_topk": 1}
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    for kind, factor in ((np.int64, 2), (np.int32, np.float32(2))):
        taken = ops.gate(logits, **{name: kind(number) for name, number in numbers.items()}, routed_scaling_factor=factor)
        assert all(map(torch.equal, taken, ops.gate(logits, **numbers, routed_scaling_factor=2.0)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_are_named(value, dtype):
    logits = torch.zeros(300, 20, dtype=dtype)
    logits[211, 17] = logits[250, 3] = value
    with pytest.raises(ValueError, match=rf"logits has -?{abs(value)} for token 211, expert 17"):
        ops.gate(logits, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gpu_names_non_finite_logits_at_the_next_look(value, dtype):
    device = device_of("nvlink", 0)
    logits = torch.zeros(20, 24, dtype=dtype)
    logits[11, 17] = value
    message = rf"logits has -?{abs(value)} for token 11, expert 17 in an earlier call of the gate on the GPU"

    def route():
        output = run(device, logits, 2, function=ops.gate_full, shares=True)
        assert output.topk_idx[11].tolist() == [-1, -1] and output.topk_weights[11].tolist() == [0, 0]
        torch.testing.assert_close(output.shares.sum(1), (torch.arange(20) != 11).float())
        assert output.num_tokens_per_expert.tolist() == [19, 19] + [0] * 22

    route()
    with pytest.raises(ValueError, match=message):
        ops.check_gate()
    ops.check_gate()
    route()
    with pytest.raises(ValueError, match=message):
        run(device, torch.zeros(1, 24), 2)
    run(device, torch.zeros(1, 24), 2)
    ops.check_gate()


@pytest.mark.gpu
def test_gpu_failures_are_those_of_their_device():
    """Looked for on another device, a failure is neither raised nor lost."""
    logits = torch.zeros(4, 24)
    logits[2, 7] = math.nan
    run(device_of("nvlink", 0), logits, 2)
    with mock.patch.object(torch.cuda, "synchronize"):  # there may be one device only
        ops.check_gate(1)
    message = r"logits has nan for token 2, expert 7 in an earlier call of the gate on the GPU \(device 0\), by this or another layer"
    with pytest.raises(ValueError, match=message):
        ops.check_gate(torch.device("cuda", 0))


@pytest.mark.gpu
def test_gpu_names_a_bias_that_is_not_finite():
    device = device_of("nvlink", 0)
    bias = torch.zeros(24)
    bias[5] = math.nan
    for logits, options in ((torch.zeros(2, 24), {}), (torch.full((2, 24), math.inf), {"check_finite": False})):
        assert (run(device, logits, 2, expert_bias=bias, **options).topk_idx == -1).all()
        with pytest.raises(ValueError, match="expert_bias has nan for expert 5 in an earlier call of the gate on the GPU"):
            ops.check_gate()


@pytest.mark.gpu
def test_gpu_refuses_too_many_experts():
    with pytest.raises(ValueError, match="logits has 1025 experts"):
        ops.gate(torch.zeros(2, 1025, device=device_of("nvlink", 0)), 2)


class Text(str):
    """A string of a class of its own, as members of an enum are."""


def test_score_functions_of_a_class_of_their_own(device):
    logits, mask = torch.randn(4, 12), torch.zeros(4, dtype=torch.bool)
    results = []
    for name in ("softmax", Text("softmax")):
        leaf = logits.clone().requires_grad_()
        output = run(device, leaf, 2, function=ops.gate_full, score_function=name, shares=True, mask=mask)
        results.append((output.topk_weights, output.shares, *torch.autograd.grad(output.topk_weights.square().sum(), leaf)))
    assert all(map(torch.equal, *results))


def test_operators_refuse_a_score_function(device):
    logits = torch.zeros(4, 12, device=device)
    arguments = torch.ones(4, 2, device=device), None, None, logits, torch.zeros(4, 2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"score_function is 'tanh'; it must be one of \['sigmoid', "):
        torch.ops.deepep_moe.gate_backward(*arguments, "tanh", True, 1.0)


@pytest.mark.gpu
def test_gpu_says_why_nothing_is_launched():
    logits = torch.zeros(4, 12, device=device_of("nvlink", 0))
    settings = 5, 1, 2, "sigmoid", True, 1.0, True, torch.int64, False, 0, False
    with pytest.raises(ValueError, match="gate options out of bounds: num_tokens 4, num_experts 12, num_topk 2, num_groups 5"):
        torch.ops.deepep_moe.gate(logits, None, None, 2, *settings)
    ops.check_gate()


@pytest.mark.gpu
def test_gpu_failure_that_another_thread_raises():
    """It is found by one thread's launch, and gone when that thread looks for it."""
    device, check = device_of("nvlink", 0), gate_operators._C.gpu_gate_check
    run(device, torch.full((1, 24), math.nan), 2)
    torch.cuda.synchronize()

    def check_late(index):
        with pytest.raises(ValueError, match="logits has nan"):
            check(index)

    with mock.patch.object(gate_operators._C, "gpu_gate_check", check_late):
        assert run(device, torch.zeros(1, 24), 2).topk_idx.tolist() == [[0, 1]]


@pytest.mark.gpu
def test_gpu_takes_sums_with_the_bias_that_are_infinite():
    logits, bias = torch.zeros(1, 8), torch.zeros(8)
    logits[0, 3] = bias[3] = 3e38
    options = {"score_function": "softmax_topk", "expert_bias": bias}
    assert_close(run(device_of("nvlink", 0), logits, 2, **options), reference.gate(logits, 2, **options))
    ops.check_gate()
