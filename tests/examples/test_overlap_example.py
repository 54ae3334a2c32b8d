"""The example of two micro-batches by turns: over virtual nodes of ranks that share a GPU, and what its options take."""

import sys
from pathlib import Path

import pytest
import torch
from exchange_cases import device_of

from deepep_moe.testing import run_ranks

pytest.importorskip("matplotlib")

FOLDER = Path(__file__).parents[2] / "examples" / "overlap"


def example():
    """In a process of its own, as others have modules of the same names."""
    sys.path.insert(0, str(FOLDER))
    return __import__("decode")


def decodes(rank, num_ranks):
    decode, device = example(), device_of("nvshmem", rank)
    sizes = decode.Sizes(num_layers=2, hidden=128, intermediate=16, num_experts=8, num_topk=3, num_tokens=6, context=4)
    ways = decode.decode_on(device, "nvshmem", rank, num_ranks, sizes, 2, 2, in_graph=False)
    assert list(ways) == ["one after the other", "overlapped"]
    assert {span.batch for span in ways["overlapped"][1]} == {0, 1}


@pytest.mark.gpu
def test_over_nodes_that_share_a_gpu():
    """It compares the outputs of both ways itself, to the bit."""
    run_ranks(decodes, 4)


def takes(rank, _, num_gpus, options):
    """What the example makes of its options on a machine of so many GPUs; None where it refuses them."""
    torch.cuda.device_count = lambda: num_gpus
    try:
        arguments, _ = example().arguments_of(["--device", "cuda", *options.split()])
    except SystemExit:
        return None
    return arguments.num_ranks, arguments.ranks_per_node, arguments.shares_gpus


@pytest.mark.parametrize(
    "num_gpus, options, expected",
    [
        (1, "--num-ranks 4 --ranks-per-node 2 --share-gpus", (4, 2, True)),
        (1, "--num-ranks 4 --ranks-per-node 2", None),
        (0, "--num-ranks 4 --share-gpus", None),
        (4, "", (4, None, False)),
        (1, "--num-ranks 4 --ranks-per-node 3 --share-gpus", None),
    ],
)
def test_options(num_gpus, options, expected):
    assert run_ranks(takes, 1, num_gpus, options) == [expected]
