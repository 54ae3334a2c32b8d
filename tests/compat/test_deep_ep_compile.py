"""Functions that call deep_ep under torch.compile: graphs break at its calls, and results are those of eager calls."""

import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import VERSIONS
from on_ranks import on_ranks

from deepep_moe.compat import deep_ep

NUM_EXPERTS, NUM_TOPK, HIDDEN = 8, 2, 128


def inputs(rank, num_tokens):
    generator = torch.Generator().manual_seed(10 * rank + num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :NUM_TOPK].contiguous()
    return x, idx, torch.rand(num_tokens, NUM_TOPK, generator=generator)


def version_1(group):
    buffer = deep_ep.Buffer(group)

    def layer(x, idx, w):
        before = deep_ep.Buffer.capture()
        per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, NUM_EXPERTS, previous_event=before, async_finish=True)
        rows, recv_idx, recv_w, counts, handle, event = buffer.dispatch(
            x + 1, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=w,
            previous_event=event, async_finish=True, config=deep_ep.Buffer.get_dispatch_config(2),
        )  # fmt: skip
        event.current_stream_wait()
        with event(release_handle=True):
            rows = rows * 2 + sum(counts)
        again, *_ = buffer.dispatch(x, handle=handle)
        y, back, event = buffer.combine(rows + again, handle, topk_weights=recv_w, async_finish=True)
        event.wait()
        return y * 2, back, recv_idx, handle[4]

    return layer


def low_latency(group):
    buffer = deep_ep.Buffer(group, low_latency_mode=True)

    def layer(x, idx, w):
        (rows, scales), counts, handle, _, hook = buffer.low_latency_dispatch(
            x + 1, idx, 16, NUM_EXPERTS, use_fp8=True, return_recv_hook=True
        )
        hook()
        is_row = torch.arange(rows.shape[1]) < counts[:, None]
        rows = torch.where(is_row[..., None], rows.float() * scales.repeat_interleave(128, 2)[..., :128], 0.0).bfloat16()
        y, _, hook = buffer.low_latency_combine(rows * 2, idx, w, handle, return_recv_hook=True)
        hook()
        return y + 1, handle[1]

    return layer


def in_one_form(name):
    """Calls of a version, without events. The buffer is made in the first one, inside of what is compiled."""

    def make(group):
        made = []

        def layer(x, idx, w):
            if not made:
                made.extend(VERSIONS[name](group, NUM_EXPERTS, HIDDEN))
            _, dispatch, combine = made
            rows, recv_w, handle = dispatch(x + 1, idx, w)
            again, *_ = dispatch(x, idx, w, handle)
            return *combine(rows * 2 + again, handle, recv_w), recv_w

        return layer

    return make


MAKES = {"events": version_1, "low latency": low_latency} | {name: in_one_form(name) for name in VERSIONS if name != "V1"}


@on_ranks(2, name=("events", *(pytest.param(name, marks=pytest.mark.slow) for name in MAKES if name != "events")))
def test_equal_to_eager(rank, name):
    compiled = torch.compile(MAKES[name](dist.group.WORLD), backend="eager")
    eager = MAKES[name](dist.group.WORLD)
    for num_tokens in (9, 9, 5, 0, 12):
        with torch.no_grad():
            ours, theirs = compiled(*inputs(rank, num_tokens)), eager(*inputs(rank, num_tokens))
        assert all(torch.equal(result, other) for result, other in zip(ours, theirs, strict=True))
    assert not torch.compiler.is_compiling() and torch._dynamo.utils.counters["graph_break"]
