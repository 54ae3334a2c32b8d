"""What the gate refuses, in Python and in its native functions on a GPU."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from exchange_cases import device_of
from gate_cases import DTYPES, assert_close, run

from deepep_moe import _C, ops, reference

LOGITS = torch.zeros(4, 12)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_topk": 13}, ValueError, "num_topk is 13; it must be 1 to 12 for 12 experts"),
        ({"num_topk": 0}, ValueError, "num_topk is 0; it must be 1 to 12 for 12 experts"),
        ({"logits": torch.zeros(4, 64), "num_topk": 33}, ValueError, "num_topk is 33; it must be 1 to 32 for 64 experts"),
        ({"num_groups": 5}, ValueError, "num_groups is 5; it must divide the 12 experts"),
        ({"num_groups": 4, "topk_groups": 5}, ValueError, "topk_groups is 5; it must be 1 to num_groups, 4"),
        ({"num_groups": 12}, ValueError, "topk_groups is 1; its groups of 1 experts must hold at least num_topk, 2"),
        ({"num_groups": 4, "group_score_topk": 4}, ValueError, "group_score_topk is 4; it must be 1 to the 3 experts of a group"),
        (
            {"score_function": "tanh"},
            ValueError,
            r"score_function is 'tanh'; it must be one of \['sigmoid', 'sqrtsoftplus', 'softmax', 'softmax_topk'\]",
        ),
        ({"routed_scaling_factor": math.nan}, ValueError, "routed_scaling_factor is nan; it must be finite"),
        ({"num_topk": 2.0}, TypeError, "num_topk is 2.0; it must be an int"),
        ({"num_topk": True}, TypeError, "num_topk is True; it must be an int"),
        ({"num_groups": None}, TypeError, "num_groups is None; it must be an int"),
        ({"topk_groups": "1"}, TypeError, "topk_groups is '1'; it must be an int"),
        ({"group_score_topk": torch.tensor(2.0)}, TypeError, r"group_score_topk is tensor\(2.\); it must be an int"),
        ({"routed_scaling_factor": None}, TypeError, "routed_scaling_factor is None; it must be a float"),
        ({"routed_scaling_factor": torch.tensor(2.5)}, TypeError, r"routed_scaling_factor is tensor\(2.5000\); it must be a float"),
        ({"normalize": "no"}, TypeError, "normalize is 'no'; it must be a bool"),
        ({"normalize": None}, TypeError, "normalize is None; it must be a bool"),
        ({"check_finite": 0}, TypeError, "check_finite is 0; it must be a bool"),
        (
            {"check_finite": False, "expert_bias": torch.full((12,), math.inf)},
            ValueError,
            "expert_bias has inf for expert 0; it must be finite",
        ),
        ({"logits": LOGITS.numpy()}, TypeError, "logits must be a torch.Tensor, not ndarray"),
        ({"expert_bias": [0.0] * 12}, TypeError, "expert_bias must be a torch.Tensor, not list"),
        ({"mask": True}, TypeError, "mask must be a torch.Tensor, not bool"),
        ({"logits": torch.zeros(12)}, ValueError, r"logits has shape \[12\]; it must be \[num_tokens, num_experts\]"),
        ({"logits": LOGITS.double()}, TypeError, r"logits has dtype torch.float64; it must be float32, bfloat16 or float16: pass"),
        ({"index_dtype": torch.int16}, TypeError, "index_dtype is torch.int16; it must be torch.int64 or torch.int32"),
        ({"expert_bias": torch.zeros(11)}, ValueError, r"expert_bias has shape \[11\]; it must be \[12\] to match logits"),
        ({"expert_bias": torch.zeros(12).bfloat16()}, TypeError, "expert_bias has dtype torch.bfloat16; it must be torch.float32"),
        ({"expert_bias": torch.full((12,), math.inf)}, ValueError, "expert_bias has inf for expert 0; it must be finite"),
        ({"mask": torch.zeros(4)}, TypeError, "mask has dtype torch.float32; it must be torch.bool"),
        ({"logits": LOGITS.to("meta")}, ValueError, "logits is on meta; it must be on the CPU or a CUDA device"),
        (
            {"mask": torch.zeros(4, dtype=torch.bool, device="meta")},
            ValueError,
            r"mask is on meta; it must be on cpu, like logits: pass mask.to\(logits.device\)",
        ),
    ],
)
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        ops.gate(**{"logits": LOGITS, "num_topk": 2, **changes})


def test_numbers_of_numpy_and_an_integer_factor():
    numbers = dict(num_topk=np.int64(2), num_groups=np.int32(4), topk_groups=np.int64(2), group_score_topk=np.int64(1))
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    for factor in (2, np.float32(2)):
        taken = ops.gate(logits, **numbers, routed_scaling_factor=factor)
        plain = {name: int(number) for name, number in numbers.items()}
        for ours, theirs in zip(taken, ops.gate(logits, **plain, routed_scaling_factor=2.0), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_are_named(value, dtype):
    logits = torch.zeros(300, 20, dtype=dtype)
    logits[211, 17] = logits[250, 3] = value
    with pytest.raises(ValueError, match=rf"logits has -?{abs(value)} for token 211, expert 17; it must be finite"):
        ops.gate(logits, 2)


@pytest.mark.parametrize("num_ranks", [5, -1])
def test_wrong_number_of_ranks(num_ranks):
    with pytest.raises(ValueError, match=f"num_ranks is {num_ranks}; it must divide the 12 experts"):
        ops.gate_full(LOGITS, 2, num_ranks=num_ranks)
    for options, message in (
        (dict(num_ranks=None), "num_ranks is None; it must be an int"),
        (dict(dense=None), "dense is None; it must be a bool"),
        (dict(shares=1), "shares is 1; it must be a bool"),
        (dict(num_groups=None), "num_groups is None; it must be an int"),
    ):
        with pytest.raises(TypeError, match=message):
            ops.gate_full(LOGITS, 2, **options)
    with pytest.raises(TypeError, match="gate_full has no argument groups"):
        ops.gate_full(LOGITS, 2, groups=3)


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
    with pytest.raises(ValueError, match="logits has 1025 experts; on a GPU it must have at most 1024: pass logits.cpu()"):
        ops.gate(torch.zeros(2, 1025, device=device_of("nvlink", 0)), 2)


@pytest.mark.gpu
def test_gpu_takes_sums_with_the_bias_that_are_infinite():
    logits, bias = torch.zeros(1, 8), torch.zeros(8)
    logits[0, 3] = bias[3] = 3e38
    options = {"score_function": "softmax_topk", "expert_bias": bias}
    assert_close(run(device_of("nvlink", 0), logits, 2, **options), reference.gate(logits, 2, **options))
    ops.check_gate()


def native_options(**changes):
    options = {
        "num_tokens": 100,
        "num_experts": 12,
        "num_topk": 3,
        "num_groups": 4,
        "topk_groups": 2,
        "group_score_topk": 2,
        "score_function": "sigmoid",
        "normalize": True,
        "routed_scaling_factor": 1.0,
        "dtype": _C.DType.float32,
        "index64": False,
    }
    return _C.GpuGateOptions(**{**options, **changes})


@pytest.mark.gpu
def test_gpu_refuses_options_that_would_leave_memory():
    device_of("nvlink", 0)
    nothing = dict.fromkeys(("logits", "topk_idx", "grad_topk_weights", "grad_probs", "grad_shares", "grad_logits"))
    with pytest.raises(ValueError, match="gate options out of bounds: num_experts 1040, at most 1024 on a GPU"):
        _C.gpu_gate_backward(native_options(num_experts=1040), **nothing, device=0, stream=0)
    with pytest.raises(ValueError, match="gate options out of bounds: num_tokens 100, num_experts 12, num_topk 33"):
        _C.gpu_gate_backward(native_options(num_topk=33), **nothing, device=0, stream=0)
