"""Swapped layers under torch.compile."""

import warnings

import pytest
import torch
from deepspeed_cases import HIDDEN, engine_ready, make_moe

from deepep_moe.integrations.deepspeed import replace_moe_layers
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("deepspeed")


def _compiling_worker(rank: int, num_ranks: int) -> list[str]:
    """Return what Dynamo warns of in the first two forwards, which construct the buffer, and in a backward."""
    with engine_ready():
        layer = make_moe(k=1, use_rts=False)  # whose gate draws no random numbers
        layer.set_deepspeed_parallelism()
        replace_moe_layers(layer)
        x = torch.randn(20, HIDDEN)
        compiled = torch.compile(layer, backend="eager")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first, second = (compiled(x)[0] for _ in range(2))
            first.sum().backward()
        assert torch.equal(first, second) and torch.equal(first, layer(x)[0])
        return [str(warning.message) for warning in caught if "Dynamo" in str(warning.message)]


@pytest.mark.slow
def test_dynamo_traces_no_construction():
    assert run_ranks(_compiling_worker, 2) == [[], []]
