"""Functions that call deep_ep under torch.compile: graphs break at its calls, and results are those of eager calls."""

import pytest
import torch
import torch.distributed as dist
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


def version_2(group):
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=16, hidden=HIDDEN, num_topk=NUM_TOPK)

    def layer(x, idx, w):
        rows, _, recv_w, handle, event = buffer.dispatch(
            x + 1, idx, w, num_experts=NUM_EXPERTS, do_expand=True, async_with_compute_stream=True, previous_event=buffer.capture()
        )
        event.register_hook_after_wait(lambda: None)
        event.current_stream_wait(release_handle=True)
        rows = rows * recv_w[:, None].bfloat16() + handle.num_expanded_tokens
        y, back, _ = buffer.combine(rows, handle, recv_w)
        return y + 1, back, handle.psum_num_recv_tokens_per_expert, handle.topk_idx

    return layer


def version_2_5(group):
    buffer = deep_ep.EPBuffer(group, num_max_tokens_per_rank=16)

    def layer(x, idx, w):
        event = buffer.dispatch(x + 1, idx, w, num_experts=NUM_EXPERTS, defer_epilogue=True)
        rows, recv_idx, recv_w, handle = event.current_stream_wait()
        y, _ = buffer.combine(rows * 2, handle, defer_epilogue=True).current_stream_wait()
        return y + 1, recv_idx, recv_w

    return layer


def hybrid(group):
    buffer = deep_ep.HybridEPBuffer(group, HIDDEN, 16, NUM_EXPERTS // dist.get_world_size(group))

    def layer(x, idx, w):
        routing_map = torch.zeros(len(x), NUM_EXPERTS, dtype=torch.bool).scatter(1, idx, True)
        rows, probs, _, counts, handle = buffer.dispatch_with_permute(hidden=x + 1, routing_map=routing_map, probs=routing_map * 0.5)
        rows = rows * probs[:, None].bfloat16() + counts.sum()
        y, back = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        return y * 2, back, handle[7]

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


LONG = (pytest.param(make, marks=pytest.mark.slow) for make in (version_2, version_2_5, hybrid, low_latency))


@on_ranks(2, make=(version_1, *LONG))
def test_equal_to_eager(rank, make):
    compiled = torch.compile(make(dist.group.WORLD), backend="eager")
    eager = make(dist.group.WORLD)
    for num_tokens in (9, 9, 5, 0, 12):
        with torch.no_grad():
            ours, theirs = compiled(*inputs(rank, num_tokens)), eager(*inputs(rank, num_tokens))
        assert all(torch.equal(result, other) for result, other in zip(ours, theirs, strict=True))
    assert not torch.compiler.is_compiling() and torch._dynamo.utils.counters["graph_break"]


class Exchange(torch.autograd.Function):
    """A dispatch whose gradient is a combine, as Megatron-Core and others write it."""

    @staticmethod
    def forward(ctx, x, idx, w, buffer):
        _, _, per_expert, _, _ = buffer.get_dispatch_layout(idx, NUM_EXPERTS)
        rows, _, recv_w, _, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=w, num_tokens_per_expert=per_expert)
        ctx.buffer, ctx.handle = buffer, handle
        return rows, recv_w

    @staticmethod
    def backward(ctx, grad, grad_w):
        x, w, _ = ctx.buffer.combine(grad, ctx.handle, topk_weights=grad_w)
        return x, None, w, None


class Layer(torch.nn.Module):
    """It makes its buffer in its first call, inside of what is compiled."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.buffer = None

    def forward(self, x, idx, w):
        if self.buffer is None:
            self.buffer = deep_ep.Buffer(dist.group.WORLD, 0, 0)
        rows, recv_w = Exchange.apply(self.inner(x), idx, w, self.buffer)
        return (rows.sin() * recv_w.sum(1, keepdim=True)).sum()


@pytest.mark.slow
@on_ranks(2)
def test_trains(rank):
    torch.manual_seed(rank)
    layers = [Layer(), Layer()]
    layers[1].load_state_dict(layers[0].state_dict())
    compiled = torch.compile(layers[0], backend="aot_eager")
    for num_tokens in (9, 5, 9):
        x, idx, w = inputs(rank, num_tokens)
        results = []
        for layer in (compiled, layers[1]):
            leaves = x.float().requires_grad_(), w.clone().requires_grad_()
            loss = layer(leaves[0], idx, leaves[1])
            loss.backward()
            results.append((loss.detach(), leaves[0].grad, leaves[1].grad))
        assert all(torch.equal(result, other) for result, other in zip(*results, strict=True))
        assert torch.equal(layers[0].inner.weight.grad, layers[1].inner.weight.grad)
