"""The example of two alternating micro-batches, over virtual nodes of ranks that share a GPU, and its options."""

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest
import torch
from exchange_cases import device_of
from on_ranks import on_ranks

pytest.importorskip("matplotlib")

FOLDER = Path(__file__).parents[2] / "examples" / "overlap"


def example():
    """Run in a process of its own, because other examples have modules of the same names."""
    sys.path.insert(0, str(FOLDER))
    return __import__("decode")


@pytest.mark.gpu
@on_ranks(4)
def test_over_nodes_that_share_a_gpu(rank, num_ranks):
    """It compares the outputs of both ways itself, to the bit."""
    decode, device = example(), device_of("nvshmem", rank)
    sizes = decode.Sizes(num_layers=2, hidden=128, intermediate=16, num_experts=8, num_topk=3, num_tokens=6, context=4)
    ways = decode.decode_on(device, "nvshmem", rank, num_ranks, sizes, 2, 2, in_graph=False)
    assert list(ways) == ["one after the other", "overlapped"]
    assert {span.batch for span in ways["overlapped"][1]} == {0, 1}


def takes(num_gpus, options):
    """Return the example's settings on a machine with `num_gpus` GPUs, or its message if it refuses the options."""
    torch.cuda.device_count = lambda: num_gpus
    os.environ.pop("RANK", None)
    if options.startswith("RANK"):
        variables, options = options.split(" ", 1)
        os.environ.update([variables.split("=")])
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            arguments, _ = example().arguments_of(["--device", "cuda", *options.split()])
    except SystemExit:
        return said.getvalue()
    return arguments.num_ranks, arguments.ranks_per_node, arguments.shares_gpus


@on_ranks(1)
def test_options(rank):
    for num_gpus, options, expected in (
        (1, "--num-ranks 4 --ranks-per-node 2 --share-gpus", (4, 2, True)),
        (1, "--num-ranks 4 --ranks-per-node 2", "this machine has 1; give --num-ranks, --share-gpus, or --device cpu"),
        (0, "--num-ranks 4 --share-gpus", "a GPU for each of 4 ranks, this machine has 0"),
        (4, "", (4, None, False)),
        (1, "--num-ranks 4 --ranks-per-node 3 --share-gpus", "--ranks-per-node 3 must divide --num-ranks 4"),
        (1, "--share-gpus --device cpu", "--share-gpus with --device cpu; give --device cuda"),
        (0, "--device cpu", (2, None, False)),
        (4, "RANK=1 --num-ranks 4", "run it with plain python"),
    ):
        taken = takes(num_gpus, options)
        assert expected in taken if isinstance(expected, str) else taken == expected, f"{options}: {taken}"


@on_ranks(1)
def test_ranks_that_share_gpus_report_no_speed(rank):
    decode = example()
    torch.cuda.device_count, torch.cuda.get_device_name = lambda: 2, lambda: "a GPU"
    os.environ.pop("RANK", None)
    for options, about_times, is_as_fast, about_ranks in (
        ([], "equal to the bit.", True, ("2", "no")),
        (["--share-gpus", "--ranks-per-node", "1"], "Ranks shared GPUs, so times say nothing.", False, ("1", "yes")),
    ):
        arguments, sizes = decode.arguments_of(["--device", "cuda", "--num-ranks", "2", *options])
        summary = decode.summary_of(arguments, {"one after the other": (0.004, []), "overlapped": (0.002, [])})
        assert ("2.00x as fast" in summary) is is_as_fast and summary.endswith(about_times)
        about = decode.about(arguments, sizes)
        assert (about["ranks_per_node"], about["share_gpus"]) == about_ranks
