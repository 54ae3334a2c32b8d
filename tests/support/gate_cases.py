"""The gate on a device, into memory that is not zero, and comparisons of its results."""

from unittest import mock

import torch

from deepep_moe import ops, reference

SCORE_FUNCTIONS = ("sigmoid", "sqrtsoftplus", "softmax", "softmax_topk")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(device, logits, *arguments, function=ops.gate, **options):
    """The gate on `device`, into memory full of ones, with arguments and results on the CPU; differentiable."""

    def garbage(empty):
        def fill(*arguments, **options):
            tensor = empty(*arguments, **options)
            tensor.view(torch.uint8).fill_(0xFF)
            return tensor

        return fill

    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    new_empty, empty_like = garbage(torch.Tensor.new_empty), garbage(torch.empty_like)
    with mock.patch.object(torch.Tensor, "new_empty", new_empty), mock.patch.object(torch, "empty_like", empty_like):
        output = function(logits.to(device), *arguments, **options)
    return type(output)(*(None if tensor is None else tensor.cpu() for tensor in output))


def assert_equal(output, expected):
    for name, got, want in zip(("topk_idx", "topk_weights", "num_tokens_per_expert"), output, expected, strict=True):
        assert torch.equal(got, want), f"{name}: {got} is not {want}"


def assert_close(output, expected):
    """The choice and the counts equal, weights within a unit in the last place."""
    assert torch.equal(output[0], expected[0]), f"topk_idx: {output[0]} is not {expected[0]}"
    assert torch.equal(output[2], expected[2]), f"num_tokens_per_expert: {output[2]} is not {expected[2]}"
    assert_nearby("topk_weights", output[1], expected[1])


def assert_nearby(name, got, want):
    """Within a unit in the last place."""
    nearby = (got == want) | (got == want.nextafter(torch.tensor(torch.inf))) | (got == want.nextafter(torch.tensor(-torch.inf)))
    assert nearby.all(), f"{name}: {got[~nearby]} is not {want[~nearby]}"


def check(device, logits, num_topk, **options):
    """Check that the gate's outputs, including shares, equal the reference's."""
    output = run(device, logits, num_topk, function=ops.gate_full, shares=True, **options)
    assert_close(output[:3], reference.gate(logits, num_topk, **options))
    of_shares = {name: value for name, value in options.items() if name in ("score_function", "mask")}
    assert_nearby("shares", output.shares, reference.gate_shares(logits, **of_shares))
