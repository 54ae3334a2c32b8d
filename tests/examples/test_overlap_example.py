"""The example of two alternating micro-batches, over virtual nodes of ranks that share a GPU."""

import pytest
from exchange_cases import device_of
from on_ranks import on_ranks
from scripts import ROOT, modules_of

pytest.importorskip("matplotlib")


@pytest.mark.gpu
@on_ranks(4)
def test_over_nodes_that_share_a_gpu(rank, num_ranks):
    """It compares the outputs of both ways itself, to the bit."""
    device, (decode,) = device_of("nvshmem", rank), modules_of(ROOT / "examples" / "overlap", "decode")
    sizes = decode.Sizes(num_layers=2, hidden=128, intermediate=16, num_experts=8, num_topk=3, num_tokens=6, context=4)
    ways = decode.decode_on(device, "nvshmem", rank, num_ranks, sizes, 2, 2, in_graph=False)
    assert list(ways) == ["one after the other", "overlapped"]
    assert {span.batch for span in ways["overlapped"][1]} == {0, 1}
