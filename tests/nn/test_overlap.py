"""Two alternating micro-batches against the same calls one after the other, bit for bit; errors; the example."""

import pytest
import torch
from example_page import Picture, read
from exchange_cases import assert_same, device_of
from low_latency_cases import BACKENDS, BLOCK, Case, make_buffer
from on_ranks import on_ranks
from scripts import ROOT, run_python

from deepep_moe import LowLatencyBuffer
from deepep_moe.errors import EPPeerError
from deepep_moe.nn import Timeline, overlapped, routed_experts

NUM_LAYERS = 3
FP8 = dict(fp8=True, wire="fp8")


def scaled(recv_x, num_recv_tokens_per_expert, scales=None):
    """Experts whose sums are not exact; rows behind the counts stay NaN."""
    if scales is not None:
        recv_x = (recv_x.float() * scales.repeat_interleave(BLOCK, dim=-1)).bfloat16()
    factors = 1 + torch.arange(len(recv_x), device=recv_x.device) / 3
    return recv_x * factors.to(recv_x.dtype)[:, None, None]


def inputs_of(batch, layer, rank, backend, num_tokens):
    case = Case(num_tokens, dtype=torch.bfloat16, seed=10 * layer + batch)
    return [tensor.to(device_of(backend, rank)) for tensor in case.inputs(rank)]


def one_by_one(buffer, batch, rank, backend, num_tokens, fp8, wire):
    x = inputs_of(batch, 0, rank, backend, num_tokens)[0]
    for layer in range(NUM_LAYERS):
        _, idx, weights = inputs_of(batch, layer, rank, backend, num_tokens)
        out = buffer.dispatch(x, idx, weights, fp8=fp8)
        y = scaled(out.recv_x, out.num_recv_tokens_per_expert, *([out.recv_x_scales] if fp8 else []))
        x = x + (buffer.combine(y, out.handle, wire=wire) + x * 0.5)
    return x


def by_turns(buffer, batch, rank, backend, num_tokens, fp8, wire):
    x = inputs_of(batch, 0, rank, backend, num_tokens)[0]
    for layer in range(NUM_LAYERS):
        _, idx, weights = inputs_of(batch, layer, rank, backend, num_tokens)
        routed = routed_experts(buffer, scaled, x, idx, weights, shared_expert=lambda rows: rows * 0.5, fp8=fp8, wire=wire)
        x = x + (yield from routed)
    return x


@pytest.mark.parametrize("options", (dict(fp8=False, wire=None), FP8), ids=("bf16", "fp8"))
@on_ranks(3, backend=BACKENDS)
def test_equals_one_after_the_other(rank, num_ranks, backend, options):
    num_tokens = [[24, 0, 7], [5, 0, 24]]  # of each micro-batch
    buffer = make_buffer(Case([0] * num_ranks), backend, rank)
    arguments = [(buffer, batch, rank, backend, num_tokens[batch], *options.values()) for batch in range(2)]
    expected = [one_by_one(*mine) for mine in arguments]
    for _ in range(2):
        ours = overlapped(*(by_turns(*mine) for mine in arguments))
        for batch in range(2):
            assert_same(f"batch {batch}", ours[batch], expected[batch])
    assert_same("alone", overlapped(by_turns(*arguments[1]))[0], expected[1])


# ---- turns ----


def one_rank():
    return LowLatencyBuffer(None, 4, 16, 2, 1), torch.ones(4, 16), torch.tensor([[0], [1], [-1], [1]])


def stack(buffer, name, num_layers, x, idx):
    for _ in range(num_layers):
        x = yield from routed_experts(buffer, lambda recv_x, counts: recv_x, x, idx)
    return name


def test_micro_batches_of_different_depth():
    """All ranks do the same, so one micro-batch may end before the other, and may yield if it has sent nothing."""

    def waits():
        yield
        yield
        return "waited"

    buffer, x, idx = one_rank()
    for first, second in ((1, 3), (3, 1)):
        assert overlapped(stack(buffer, "a", first, x, idx), stack(buffer, "b", second, x, idx)) == ["a", "b"]
    assert overlapped(waits(), stack(buffer, "b", 2, x, idx)) == ["waited", "b"]


# ---- errors ----


def test_what_cannot_take_turns():
    buffer, x, idx = one_rank()
    with pytest.raises(ValueError, match="3 micro-batches were given; at least 1 and at most 2 can take turns in one buffer"):
        overlapped(*(stack(buffer, name, 1, x, idx) for name in "abc"))
    with pytest.raises(ValueError, match="0 micro-batches were given"):
        overlapped()
    with pytest.raises(TypeError, match=r"micro-batch 1 is a function; it must be a generator, as routed_experts\(...\) returns"):
        overlapped(stack(buffer, "a", 1, x, idx), stack)
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 16\]; it must be \[2, 4, 16\]"):
        overlapped(routed_experts(buffer, lambda recv_x, counts: recv_x[:, :3], x, idx))
    assert overlapped(stack(buffer, "a", 1, x, idx)) == ["a"], "nothing was left in flight"
    with pytest.raises(TypeError, match="the output of the shared expert must be a torch.Tensor, not NoneType"):
        overlapped(routed_experts(buffer, lambda recv_x, counts: recv_x, x, idx, shared_expert=lambda rows: None))


@on_ranks(2)
def test_buffer_for_another_width(rank):
    """The second micro-batch of rank 0 does not fit the buffer."""
    buffer = LowLatencyBuffer(None, 4, 16, 2, 1, timeout_s=60)
    x, idx = torch.ones(4, 16), torch.tensor([[0], [1], [0], [1]])
    second = x if rank else torch.ones(4, 32)
    message = r"x has shape \[4, 32\]; it must be \[4, 16\]"
    with pytest.raises(EPPeerError if rank else ValueError, match=message):
        overlapped(*(routed_experts(buffer, lambda recv_x, counts: recv_x, rows, idx) for rows in (x, second)))


# ---- the timeline ----


def test_timeline():
    buffer, x, idx = one_rank()
    timeline = Timeline()
    assert timeline.spans() == []
    batches = [routed_experts(buffer, lambda recv_x, counts: recv_x, x, idx, shared_expert=torch.neg, timeline=timeline) for _ in range(2)]
    overlapped(*batches, timeline=timeline)
    spans = timeline.spans()
    dispatch, compute = ["send dispatch", "shared expert"], ["receive dispatch", "experts", "send combine"]
    turns = [(0, dispatch), (1, dispatch), (0, compute), (1, compute), (0, ["receive combine"]), (1, ["receive combine"])]
    assert [(span.batch, span.name) for span in spans] == [(batch, name) for batch, names in turns for name in names]
    times = [time for span in spans for time in (span.start, span.end)]
    assert times[0] == 0 and times == sorted(times)


def test_timeline_within_a_span():
    timeline = Timeline()
    timeline.batch = 1
    with timeline.span("outer"), timeline.span("inner"):
        pass
    inner, outer = timeline.spans()
    assert (inner.name, outer.name, outer.start) == ("inner", "outer", 0)
    assert outer.start <= inner.start <= inner.end <= outer.end and inner.batch == 1


# ---- the example ----


@pytest.mark.slow
def test_example(tmp_path):
    sizes = "--num-layers 2 --hidden 64 --intermediate 16 --num-experts 4 --num-topk 2 --num-tokens 1 --context 4 --repeats 2"
    command = [ROOT / "examples" / "overlap" / "decode.py", *sizes.split(), "--out", tmp_path]
    result = run_python(*command)
    assert result.stdout.count("  batch 1 |") == 2
    png = (tmp_path / "timeline.png").read_bytes()
    page = read(tmp_path / "report.html")
    assert page.summary in result.stdout and page.summary.endswith("The outputs are equal to the bit.") and page.about["num_layers"] == "2"
    (ways,) = page.tables
    assert ways.columns == ["way", "both micro-batches, ms", "tokens/s"]
    assert [row[0] for row in ways.rows] == ["one after the other", "overlapped"]
    assert all(row[2] == pytest.approx(2e3 / row[1]) for row in ways.rows), "a token of each rank"
    (picture,) = page.pictures
    assert picture == Picture.of_file("What rank 0 did when", tmp_path / "timeline.png") and png.startswith(b"\x89PNG")
    for wrong, text in ((("--num-experts", "3"), "a multiple of --num-ranks 2"), (("--num-topk", "5"), "must be at most --num-experts 4")):
        assert text in run_python(*command, *wrong, code=2).stderr
