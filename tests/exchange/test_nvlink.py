"""The nvlink backend against the reference, bit for bit; several ranks share a GPU where there are fewer."""

import pytest
import torch
from exchange_cases import Case, assert_same, check_case, device_of, in_environment, poison_outputs
from nvlink_cases import make_buffer
from on_ranks import on_ranks

from deepep_moe import _C, Buffer, reference
from deepep_moe.testing import run_ranks

pytestmark = pytest.mark.gpu


LAYOUTS = ("expert", "rank")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("num_tokens", ([13], [9, 21], [5, 0, 17], [300, 1, 130, 0]), ids=str)
def test_equals_reference(num_tokens, dtype, layout):
    case = Case(num_tokens, dtype=dtype, layout=layout, expert_alignment=4, with_bias=True, backends=("nvlink",))
    run_ranks(check_case, case.num_ranks, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", ("one_expert", "one_rank", "skewed", "masked", "nobody"))
def test_uneven_routings(pattern, layout):
    case = Case([140, 3, 0], pattern=pattern, layout=layout, dtype=torch.bfloat16, index_dtype=torch.int32, backends=("nvlink",))
    run_ranks(check_case, case.num_ranks, case)


@pytest.mark.parametrize("hidden", (8, 72, 2880, 7168))
def test_hidden_sizes(hidden):
    run_ranks(check_case, 2, Case([33, 20], hidden=hidden, dtype=torch.bfloat16, backends=("nvlink",)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ("now", "async", "hook"))
@pytest.mark.parametrize("num_sms", (0, 1, 7, None))
def test_ways_to_send(num_sms, mode, layout):
    """Multiprocessors or copy engines, at once or in halves: the results are the same."""
    case = Case([140, 37, 90], layout=layout, dtype=torch.bfloat16, num_sms=num_sms, mode=mode, with_bias=True, backends=("nvlink",))
    run_ranks(check_case, case.num_ranks, case)


@pytest.mark.parametrize("mode", ("now", "hook"))
@pytest.mark.parametrize("max_sms", (2, 9, 100000))
def test_few_multiprocessors(max_sms, mode):
    """Whoever sends leaves some for those that receive, and the results are the same."""
    for layout in LAYOUTS:
        case = Case([140, 37, 90], layout=layout, dtype=torch.bfloat16, max_sms=max_sms, mode=mode, with_bias=True, backends=("nvlink",))
        run_ranks(check_case, case.num_ranks, case)


def test_few_blocks_of_a_plan():
    """A share of a GPU holds few blocks at once: each counts more of the tokens."""
    case = Case([3200, 7, 0], hidden=16, dtype=torch.bfloat16, expert_alignment=4, with_bias=True, backends=("nvlink",))
    a_block_each = {"DEEPEP_MOE_EMULATED_BLOCKS": "1"}  # of 12 multiprocessors
    run_ranks(in_environment, case.num_ranks, a_block_each, check_case, case)


@pytest.mark.parametrize("mode", ("now", "async"))
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_guessed_rows(rank, num_ranks, layout, mode):
    """Token t of every rank chooses experts t and t + 1 of 4. The rows allocated are guessed where the last two calls received about as
    many, a sixteenth more than the last: enough, or not."""
    poison_outputs()
    device = device_of("nvlink", rank)
    buffer = Buffer(None, 80, 16, 4, 2, backend="nvlink", timeout_s=60)
    rows: list[int] = []
    for num_tokens in (40, 40, 40, 41, 80, 80, 80, 77, 0, 0, 0, 9):
        xs = [torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(num_tokens + r)) for r in range(num_ranks)]
        token = torch.arange(num_tokens)
        idx = torch.stack((token % 4, (token + 1) % 4), 1)
        weights = [x[:, :2].contiguous() for x in xs]
        received = reference.dispatch(xs, [idx] * num_ranks, weights, 4, layout=layout)
        expected = received[rank]
        is_guessed = len(rows) > 1 and abs(rows[-1] - rows[-2]) * 16 <= rows[-1]
        room = rows[-1] + rows[-1] // 16 if is_guessed else 0
        out = buffer.dispatch(xs[rank].to(device), idx.to(device), weights[rank].to(device), layout=layout, async_op=mode == "async")
        if mode == "async":
            out.event.wait()
        rows.append(len(out.recv_x))
        assert not out.recv_x._is_view()  # those may not be changed in place where there are gradients
        assert_same("recv_x", out.recv_x, expected.recv_x)
        assert_same("recv_topk_weights", out.recv_topk_weights, expected.recv_topk_weights)
        assert_same("recv_topk_idx", out.recv_topk_idx, expected.recv_topk_idx)
        assert out.recv_x.untyped_storage().nbytes() == max(room, rows[-1]) * 16 * 4
        y = buffer.combine(out.recv_x, out.handle)
        assert_same("combined_x", y, reference.combine([r.recv_x for r in received], received, [num_tokens] * num_ranks, None, None)[rank])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_loads_and_stores(dtype, layout):
    """The path of GPUs before sm_90, on any GPU."""
    case = Case([140, 0, 77], layout=layout, dtype=dtype, expert_alignment=8, bulk_copies=False, with_bias=True, backends=("nvlink",))
    run_ranks(check_case, case.num_ranks, case)


@pytest.mark.parametrize("num_ranks", (5, 6, 7, 8))
def test_any_number_of_ranks(num_ranks):
    num_experts = num_ranks * 3
    run_ranks(check_case, num_ranks, Case([20 + rank for rank in range(num_ranks)], num_experts=num_experts, backends=("nvlink",)))


@on_ranks(2)
def test_num_sms_may_change(rank):
    device = device_of("nvlink", rank)
    buffer = Buffer(None, 64, 128, 8, 2, backend="nvlink", num_sms=5, timeout_s=60)
    x = torch.randn(50, 128, device=device)
    idx = torch.rand(50, 8, device=device).argsort(1)[:, :2].contiguous()
    out = buffer.dispatch(x, idx)
    all_of_them = buffer.calls.backend._exchange.num_multiprocessors
    for num_sms in (1, 0, all_of_them, 3, None):
        again = buffer.dispatch(x, handle=out.handle, num_sms=num_sms)
        assert torch.equal(again.recv_x, out.recv_x)
        assert torch.equal(buffer.combine(again.recv_x, out.handle, num_sms=num_sms), buffer.combine(out.recv_x, out.handle))
    with pytest.raises(ValueError, match="num_sms is 100000; this GPU has [0-9]+: give 1 to [0-9]+, or 0 for copy engines"):
        buffer.dispatch(x, idx, num_sms=100000)
    with pytest.raises(ValueError, match="num_sms=0 and num_recv_rows were both given"):
        buffer.dispatch(x, idx, num_sms=0, num_recv_rows=500)


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("hidden", (1024, 7168))
def test_workspace_is_bounded(hidden, num_ranks):
    """At most twice what a rank may receive, in the largest rows there are."""
    sizes = {"num_experts": 32 * num_ranks, "num_topk": 8, "hidden": hidden, "num_max_tokens": 4096}
    assert _C.gpu_workspace_bytes(num_ranks=num_ranks, **sizes) <= 2 * num_ranks * 4096 * 4 * hidden


@pytest.mark.parametrize("bulk_copies", (True, False))
@on_ranks(2)
def test_scales_of_whole_pieces(rank, num_ranks, bulk_copies):
    """Rows whose scales are as long as the instructions of sm_90 copy at once."""
    device = device_of("nvlink", rank)
    poison_outputs()
    xs, idxs = zip(*(Case([40, 23], hidden=1024, num_experts=8, num_topk=4).inputs(r)[:2] for r in range(num_ranks)), strict=True)
    buffer = Buffer(None, 40, 1024, 8, 4, backend="nvlink", timeout_s=60)
    buffer.calls.backend.tuning.uses_bulk_copies = bulk_copies
    out = buffer.dispatch(xs[rank].to(device), idxs[rank].to(device), fp8=True, expert_alignment=8)
    rows, scales = zip(*(reference.quantize_fp8(x) for x in xs), strict=True)
    expected = reference.dispatch(rows, idxs, None, 8, expert_alignment=8, x_scales=scales)[rank]
    assert_same("recv_x", out.recv_x, expected.recv_x)
    assert_same("recv_x_scales", out.recv_x_scales, expected.recv_x_scales)


@on_ranks(2)
def test_default_device(rank):
    buffer, x, idx = make_buffer(rank)
    expected = buffer.dispatch(x, idx)
    with torch.device("meta"):
        out = buffer.dispatch(x, idx)
        bounded = buffer.dispatch(x, idx, num_recv_rows=len(out.recv_x))
    for other in (out, bounded):
        assert torch.equal(other.recv_x, expected.recv_x) and other.handle.call.device.type == "cpu"
