"""Errors that users see: a clear error on the rank that caused it, and no hang on the others."""

import dataclasses
import gc
import os
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from error_cases import BACKENDS, HIDDEN, IDX, WEIGHTS, X, good_inputs, make_buffer
from exchange_cases import look, on_device
from on_ranks import on_ranks, refused

from deepep_moe import Buffer, LowLatencyBuffer
from deepep_moe.errors import BackendUnavailableError, Cause, EPCapacityError, EPMismatchError, EPPeerError
from deepep_moe.ops import gate

# ---- bad arguments of one rank: its own error there, EPPeerError with the reason elsewhere, and the buffer stays usable ----


def changed_index(row, lane, value):
    idx = IDX.clone()
    idx[row, lane] = value
    return dict(topk_idx=idx)


ALONG = dict(topk_idx=None, topk_weights=None)
BAD_DISPATCHES = [  # changes of the arguments, the error, a piece of its message
    (dict(x=X.double()), TypeError, "x has dtype float64"),
    (dict(x=torch.randn(4, 32)), ValueError, r"x has shape \[4, 32\]"),
    (dict(x=torch.randn(16)), ValueError, r"x has shape \[16\]"),
    (dict(x=torch.randn(16, 4).t()), ValueError, r"pass x.contiguous\(\)"),
    (dict(x=X.numpy()), TypeError, "x must be a torch.Tensor, not ndarray"),
    (dict(zip(("x", "topk_idx", "topk_weights"), good_inputs(9), strict=True)), ValueError, "x has 9 tokens, more than .* of 8"),
    (dict(topk_idx=IDX.float()), TypeError, "topk_idx has dtype float32"),
    (dict(topk_idx=IDX[:3]), ValueError, r"topk_idx has shape \[3, 2\]"),
    (dict(topk_idx=IDX.tolist()), TypeError, "topk_idx must be a torch.Tensor, not list"),
    (changed_index(1, 1, 4), ValueError, r"topk_idx\[1, 1\] is 4; it must be -1 \(no expert\) or 0 to 3"),
    (changed_index(2, 0, -2), ValueError, r"topk_idx\[2, 0\] is -2"),
    (changed_index(3, 1, 2), ValueError, r"topk_idx\[3\] names expert 2 twice, in lanes 0 and 1"),
    (dict(topk_weights=WEIGHTS.bfloat16()), TypeError, "topk_weights has dtype bfloat16"),
    (dict(topk_weights=WEIGHTS[:, :1].contiguous()), ValueError, r"topk_weights has shape \[4, 1\]"),
    (dict(x_scales=torch.ones(4, 1)), ValueError, "x is float32 and x_scales is given"),
    (dict(x=X.to(torch.float8_e4m3fn)), ValueError, "x is float8_e4m3fn and x_scales is missing"),
    (dict(layout="token"), ValueError, "layout is 'token'"),
    (dict(expert_alignment=0), ValueError, "expert_alignment is 0"),
    (dict(expert_alignment=2**40), ValueError, "expert_alignment is 1099511627776"),
    (dict(num_recv_rows="9"), TypeError, "num_recv_rows is '9'"),
    *((dict(num_recv_rows=bound), ValueError, f"num_recv_rows is {bound}") for bound in (2**62, 2**31, -1)),
    *((dict(layer=layer), ValueError, f"layer is {layer}") for layer in (2**31, -1)),
    (dict(num_sms=2**31), ValueError, "num_sms is 2147483648"),
    (dict(topk_idx=None), ValueError, "topk_idx is missing"),
    (ALONG | dict(handle="other"), ValueError, "handle belongs to buffer 1, this is buffer 0"),
    (ALONG | dict(handle="own", layout="rank"), ValueError, "layout 'rank', .* beside a handle with layout 'expert'"),
    (ALONG | dict(handle=(1, 2)), TypeError, "handle must be the DispatchHandle of a dispatch, not tuple"),
    (dict(handle="own"), ValueError, "topk_idx and handle were both given"),
]


@on_ranks(2, backend=BACKENDS, sums=("ranks", "lanes"))
def test_bad_arguments(rank, backend, sums):
    buffer, other = make_buffer(backend, sums=sums), make_buffer(backend, sums=sums)
    handles = {"own": buffer.dispatch(X, IDX).handle, "other": other.dispatch(X, IDX).handle}
    for changes, error, message in BAD_DISPATCHES:
        arguments = dict(x=X, topk_idx=IDX, topk_weights=WEIGHTS)
        if rank == 0:
            arguments |= changes
            if isinstance(arguments.get("handle"), str):
                arguments["handle"] = handles[arguments["handle"]]
        with refused(rank, 0, error, message) as info:
            buffer.dispatch(**arguments)
        assert (getattr(info.value, "code", None) == Cause.NO_EXPERT) == ("(no expert)" in str(info.value))
        out = buffer.dispatch(X, IDX, WEIGHTS)
        assert torch.isfinite(buffer.combine(out.recv_x, out.handle)).all(), "usable afterwards"

    rows = len(out.recv_x)
    for changes, error, message in (
        (dict(x=out.recv_x.double()), TypeError, "x has dtype float64"),
        (dict(x=out.recv_x.to(torch.float8_e4m3fn)), TypeError, "x has dtype float8_e4m3fn"),
        (dict(x=out.recv_x[1:]), ValueError, r"x has shape \[\d, 16\]; it must be \[\d, 16\]"),
        (dict(topk_weights=torch.ones(rows + 1)), ValueError, r"topk_weights has shape \[\d\]; it must be \[\d\]"),
        (dict(bias=1.0), TypeError, "bias must be a torch.Tensor, not float"),
        (dict(bias=torch.ones(3, HIDDEN)), ValueError, r"bias has shape \[3, 16\]; it must be \[4, 16\]"),
        (dict(bias=torch.ones(4, HIDDEN).half()), TypeError, "bias has dtype float16"),
        (dict(handle=None), TypeError, "handle must be the DispatchHandle of a dispatch, not NoneType"),
    ):
        with refused(rank, 1, error, message):
            buffer.combine(**(dict(x=out.recv_x, handle=out.handle) | (changes if rank == 1 else {})))
    assert torch.isfinite(buffer.combine(out.recv_x, out.handle)).all(), "usable afterwards"


def test_bad_arguments_of_layout():
    buffer = make_buffer()
    for topk_idx, error, message in (
        (IDX.tolist(), TypeError, "topk_idx must be a torch.Tensor, not list"),
        (IDX.float(), TypeError, "topk_idx has dtype float32"),
        (torch.zeros(4, 3, dtype=torch.int64), ValueError, r"topk_idx has shape \[4, 3\]"),
        (IDX + 1, ValueError, r"topk_idx\[1, 1\] is 4"),
    ):
        with pytest.raises(error, match=message):
            buffer.layout(topk_idx)


def changed_handle(handle, change):
    """Return what a caller may pass for the handle, changed in one way."""
    match change:
        case "in place":
            handle.topk_idx.zero_()
        case "in inference mode":
            with torch.inference_mode():
                handle.num_recv_tokens_per_expert.fill_(9)
        case "freed":
            handle.topk_idx.untyped_storage().resize_(0)
        case "field":
            handle.__dict__["num_rows"] = 10**6
        case "copy":
            return dataclasses.replace(handle, num_rows=10**6)
        case "nothing":
            return object.__new__(type(handle))
    return handle


@on_ranks(2, backend=BACKENDS, in_inference_mode=(False, True))
def test_changed_handles(rank, backend, in_inference_mode):
    buffer = make_buffer(backend)
    for change in ("in place", "in inference mode", "freed", "field", "copy", "nothing"):
        for is_combine in (False, True):
            with torch.inference_mode(in_inference_mode):
                out = buffer.dispatch(X, IDX, WEIGHTS)
            handle = changed_handle(out.handle, change) if rank == 0 else out.handle
            with refused(rank, 0, ValueError, "(this handle was|handle is not of a dispatch)"):
                buffer.combine(out.recv_x, handle) if is_combine else buffer.dispatch(X, handle=handle)
    out = buffer.dispatch(X, IDX)
    assert torch.allclose(buffer.combine(out.recv_x, out.handle), X * (IDX >= 0).sum(1, keepdim=True))


@on_ranks(2, backend=BACKENDS)
def test_changed_results_and_freed_inputs(rank, backend):
    """Callers change what they were given, and go on with the handle. They pass what was freed."""
    buffer = make_buffer(backend)
    x, idx, weights = X.clone(), IDX.clone(), WEIGHTS.clone()
    out = buffer.dispatch(x, idx, weights, layout="rank")
    counts = torch.stack([(IDX // 2).eq(of_rank).any(1) for of_rank in range(2)]).sum(0)[:, None]
    for tensor in (x, idx, weights, out.recv_topk_idx, out.recv_topk_weights):
        tensor.zero_()
    assert torch.allclose(buffer.combine(out.recv_x, out.handle), X * counts)
    with pytest.raises(ValueError, match="recv_topk_idx of this handle was changed in place"):
        buffer.dispatch(X, handle=out.handle)
    out = buffer.dispatch(X, IDX, WEIGHTS)
    out.recv_topk_weights.zero_()
    again = buffer.dispatch(X, topk_weights=WEIGHTS, handle=out.handle)
    assert torch.equal(again.recv_x, out.recv_x) and again.recv_topk_weights.count_nonzero() > 0
    out = buffer.dispatch(X, IDX, WEIGHTS)
    for call, num_left, arguments in (
        (buffer.dispatch, 0, {"x": X, "topk_idx": IDX, "topk_weights": WEIGHTS}),
        (partial(buffer.combine, handle=out.handle), 4, {"x": out.recv_x, "topk_weights": out.recv_topk_weights, "bias": X}),
    ):
        for name in arguments:
            inputs = {key: tensor.clone() for key, tensor in arguments.items()}
            if rank == 1:
                inputs[name].untyped_storage().resize_(num_left)
            with refused(rank, 1, ValueError, f"{name} has shape .* its storage was freed or cut"):
                call(**inputs)


@pytest.mark.parametrize("number", (np.int64, np.int32, np.uint8, torch.tensor))
def test_whole_numbers(number):
    """Sizes may be numbers that were computed from counts."""
    buffer = Buffer(
        None, number(8), number(16), number(4), number(2), num_sms=number(4), max_sms=number(8), ranks_per_node=number(1),
        timeout_s=60 if number is torch.tensor else number(60),
    )  # fmt: skip
    out = buffer.dispatch(X, IDX, expert_alignment=number(4), num_recv_rows=number(16), num_sms=number(4), layer=number(7))
    assert type(out.handle.expert_alignment) is int and out.recv_x.shape == (16, 16)
    assert torch.equal(buffer.combine(out.recv_x, out.handle, num_sms=number(0)), X * (IDX >= 0).sum(1, keepdim=True))
    LowLatencyBuffer(None, number(8), number(16), number(4), number(2))
    topk = gate(torch.randn(3, 4), number(2), num_groups=number(2), topk_groups=number(1))
    assert topk.topk_idx.shape == (3, 2)
    for bad in (np.bool_(True), torch.tensor(True), np.float64(2)):
        with pytest.raises(TypeError, match="num_recv_rows is .*; it must be a whole number"):
            buffer.dispatch(X, IDX, num_recv_rows=bad)


@on_ranks(2, backend=BACKENDS)
def test_errors_of_asynchronous_calls(rank, backend):
    """After an asynchronous call that raised, synchronous calls are synchronous; a refused call leaves the one in flight alone."""
    buffer = make_buffer(backend)
    good = buffer.dispatch(X, IDX)
    expected = buffer.combine(good.recv_x, good.handle)
    with pytest.raises(EPCapacityError):
        buffer.dispatch(X, IDX, num_recv_rows=1, async_op=True)
    bad = torch.full_like(IDX, 9) if rank == 0 else IDX
    with refused(rank, 0, ValueError, r"topk_idx\[0, 0\] is 9"):
        buffer.dispatch(X, bad, async_op=True)
    out = buffer.dispatch(X, IDX)
    assert out.event is None and torch.equal(out.recv_x, good.recv_x)
    out = buffer.dispatch(X, IDX, async_op=True)
    with refused(rank, 0, TypeError, "handle must be"):
        buffer.combine(good.recv_x, None if rank == 0 else good.handle)
    assert torch.equal(buffer.combine(good.recv_x, good.handle), expected), "it waits its turn"
    out.event.wait()
    assert out.hook is None and out.event.query() and torch.equal(out.recv_x, good.recv_x)


@pytest.mark.parametrize("kind", (Buffer, LowLatencyBuffer))
def test_launched_without_process_group(monkeypatch, kind):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2, but torch.distributed is not initialized"):
        kind(None, 8, 16, 4, 2)


# ---- ranks that do not agree ----


@on_ranks(2, backend=(*BACKENDS, pytest.param("nvlink", marks=pytest.mark.gpu)))
def test_ranks_in_different_calls(rank, backend):
    x, idx = on_device(backend, rank, X, IDX)
    buffer = make_buffer(backend)
    outs = buffer.dispatch(x, idx), buffer.dispatch(x, idx)
    out = outs[rank]
    with pytest.raises(EPMismatchError, match="(?=.*rank 0: dispatch of float32 rows, layout expert).*rank 1: .*layout rank"):
        buffer.dispatch(x, idx, layout=("expert", "rank")[rank])
    with pytest.raises(EPMismatchError, match="rank 1: .*bfloat16"):
        buffer.dispatch(x.to((torch.float32, torch.bfloat16)[rank]), idx)
    for message, calls in (
        ("rank 1: cached dispatch", (partial(buffer.combine, out.recv_x, out.handle), partial(buffer.dispatch, x, handle=out.handle))),
        (
            "(?=.*rank 0: combine [^;]*handle of call 1).*rank 1: combine [^;]*handle of call 2",
            [partial(buffer.combine, out.recv_x, out.handle)] * 2,
        ),
        ("with the handle of call 2", [partial(buffer.dispatch, x, handle=out.handle)] * 2),
    ):
        with pytest.raises(EPMismatchError, match=message):
            calls[rank]()
            look(buffer)
    assert torch.isfinite(buffer.combine(outs[1].recv_x, outs[1].handle)).all(), "usable afterwards"


@on_ranks(2, backend=BACKENDS)
def test_exceeded_bound(rank, backend):
    buffer = make_buffer(backend)
    for layout in ("expert", "rank"):
        with pytest.raises(EPCapacityError, match="rank 1 would receive [0-9]+ rows, more than its num_recv_rows of 3") as info:
            buffer.dispatch(X, IDX, layout=layout, num_recv_rows=(50, 3)[rank])
        assert info.value.rank == 1
        buffer.dispatch(X, IDX, layout=layout, num_recv_rows=50)


@on_ranks(3)
def test_settings_are_compared_at_construction(rank):
    base = dict(num_max_tokens_per_rank=8, hidden=16, num_experts=6, num_topk=2, backend="auto", sums="ranks", ranks_per_node=3)
    others = dict(hidden=32, num_experts=12, num_topk=3, num_max_tokens_per_rank=9, backend="collective", sums="lanes", ranks_per_node=1)
    for name, value in others.items():
        with pytest.raises(EPMismatchError, match=f"ranks disagree on {name} .*rank 1: {base[name]!r}, rank 2: {value!r}"):
            Buffer(None, **(base | ({name: value} if rank == 2 else {})))
    for culprit, name, value, error, message in (
        (1, "num_experts", 7, ValueError, "num_experts is 7; it must be a multiple of the group's 3 ranks"),
        (2, "timeout_s", "5", ValueError, "timeout_s is '5'"),
        *((1, "ranks_per_node", number, ValueError, f"ranks_per_node is {number}") for number in (0, -1)),
        (2, "ranks_per_node", 2, ValueError, "ranks_per_node is 2; it must be None or divide the group's 3 ranks"),
        *((1, "ranks_per_node", number, TypeError, f"ranks_per_node is {number}; it must be an int") for number in (True, 1.0)),
    ):
        with pytest.raises(error if rank == culprit else EPPeerError, match=message):
            Buffer(None, **(base | ({name: value} if rank == culprit else {})))
    os.environ.update({"DEEPEP_MOE_TIMEOUT_S": "soon"} if rank == 0 else {})
    with pytest.raises(ValueError if rank == 0 else EPPeerError, match="DEEPEP_MOE_TIMEOUT_S='soon' is not a number"):
        Buffer(None, **base)


SETTINGS = dict(group=None, num_max_tokens_per_rank=8, hidden=16, num_experts=4, num_topk=2)
INTEGERS = ("hidden", "num_experts", "num_topk", "num_max_tokens_per_rank")


OF_BUFFER = ((dict(hidden=18), ValueError, "hidden is 18"), (dict(max_sms=1), ValueError, "max_sms is 1"))
OF_LOW_LATENCY = (
    (dict(num_max_tokens_per_rank=0), ValueError, "num_max_tokens_per_rank is 0; it must be 1 to 65535"),
    (dict(num_max_tokens_per_rank=65536), ValueError, "num_max_tokens_per_rank is 65536"),
    (dict(num_experts=32768), ValueError, "num_experts is 32768; a rank can hold 32767"),
    (dict(backend="collective"), ValueError, "backend is 'collective'"),
    (dict(mask_stalled="yes"), TypeError, "mask_stalled is 'yes'"),
)


@pytest.mark.parametrize("kind", (Buffer, LowLatencyBuffer))
def test_bad_settings(kind):
    for changes, error, message in (
        *((({name: value}), TypeError, f"{name} is {value!r}") for name in INTEGERS for value in (None, 4.0, "4", True)),
        *((({name: 2**40}), ValueError, f"{name} is 1099511627776; it must be at most") for name in INTEGERS if name != "num_topk"),
        (dict(timeout_s=True), ValueError, "timeout_s is True; it must be a positive number"),
        (dict(timeout_s=0.0), ValueError, "timeout_s is 0.0; it must be a positive number"),
        (dict(backend="nccl"), ValueError, "backend is 'nccl'"),
        (dict(hidden=0), ValueError, "hidden is 0"),
        (dict(num_topk=33, num_experts=64), ValueError, "num_topk is 33"),
        (dict(num_topk=5), ValueError, r"num_topk is 5; it must be at most num_experts \(4\)"),
        (dict(num_max_tokens_per_rank=-1), ValueError, "num_max_tokens_per_rank is -1"),
        *(OF_BUFFER if kind is Buffer else OF_LOW_LATENCY),
        (dict(group="gloo"), TypeError, "group is 'gloo'"),
    ):
        with pytest.raises(error, match=message):
            kind(**(SETTINGS | changes))


@pytest.mark.parametrize(("backend", "reason"), [("nvlink", "(see no CUDA device|not compiled)"), ("nvshmem", "it serves several nodes")])
def test_backend_that_cannot_serve(backend, reason):
    if backend == "nvlink" and torch.cuda.is_available():
        pytest.skip("it can serve here")
    with pytest.raises(BackendUnavailableError, match=f"backend '{backend}' cannot serve: .*{reason}"):
        make_buffer(backend)


@on_ranks(2)
def test_shared_memory_that_cannot_be_opened(rank):
    """Another container or user: the path of rank 1's shared memory leads nowhere on rank 0."""
    from deepep_moe.exchange.backends.shm import ShmBackend

    ShmBackend.address = lambda self: ("/proc/1/fd/none", os.getpid())
    with pytest.raises(BackendUnavailableError, match="on rank [0-9]: .*cannot open a peer's shared memory at .*backend='auto'"):
        make_buffer("shm")
    assert make_buffer("auto").backend == "collective"


# ---- after the end ----


@on_ranks(2)
def test_destroyed_buffer_lets_its_group_go(rank):
    group = dist.new_group()
    buffer = Buffer(group, 8, HIDDEN, 4, 2)
    buffer.dispatch(X, IDX)
    buffer.destroy()
    dist.destroy_process_group(group)
    assert group not in gc.get_referents(buffer), "it would end with the interpreter, and its threads may abort the process then"


@on_ranks(2)
def test_refusal_in_a_forked_process(rank):
    """A forked process that refuses a call leaves its owner's connections alone."""
    buffer = make_buffer("collective")
    buffer.dispatch(X, IDX)
    child = os.fork() if rank == 1 else None
    if child == 0:
        error = ValueError("of the child")
        os._exit(0 if buffer.refuse(error) is error else 1)
    if child is not None:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    buffer.combine(buffer.dispatch(X, IDX).recv_x, buffer.dispatch(X, IDX).handle)
