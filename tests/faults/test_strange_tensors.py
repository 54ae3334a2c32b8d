"""Tensors that are no plain tensors, on one rank: it raises TypeError, its peers EPPeerError at once, and the next calls are right."""

import pytest
import torch
import torch.distributed as dist
from fault_cases import SOON_S, inputs, make, make_step, outcome
from on_ranks import on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, init_device_mesh

from deepep_moe.errors import EPPeerError


class Wrapper(torch.Tensor):
    """A tensor whose operations fail."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise TypeError(f"no rule for {func}")


def distributed(x):
    return DTensor.from_local(x, init_device_mesh("cpu", (dist.get_world_size(),)), run_check=False)


def fake(x):
    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype)


def nested(x):
    return torch.nested.nested_tensor([x, x])


def jagged(x):
    return torch.nested.nested_tensor([x, x], layout=torch.jagged)


STRANGE = {  # and what is said of it
    distributed: "x is a DTensor; pass x.to_local()",
    fake: "x is a FakeTensor, which has no data; it must be a torch.Tensor with data",
    nested: "x is a nested tensor; it must be dense: pass x.values()",
    jagged: "x is a nested tensor; it must be dense: pass x.values()",
    torch.Tensor.to_sparse: "x has layout torch.sparse_coo; it must be dense: pass x.to_dense()",
    Wrapper: None,
}
FOR_LOW_LATENCY = "x is a Wrapper, which wraps other tensors; it must be a plain torch.Tensor"


@on_ranks(2, kind=("shm", pytest.param("collective", marks=pytest.mark.slow), "low latency"))
def test_strange_tensors(rank, num_ranks, kind):
    buffer, culprit = make(kind, num_ranks), num_ranks - 1
    x, idx = inputs(buffer, 0)
    out = buffer.dispatch(x, idx)
    calls = [(x, lambda x: buffer.dispatch(x, idx)), (out.recv_x, lambda rows: buffer.combine(rows, out.handle))]
    if kind != "low latency":
        calls.append((x, lambda x: buffer.dispatch(x, handle=out.handle)))
    for number, (make_strange, text) in enumerate(STRANGE.items()):
        for rows, call in calls:
            tensor = make_strange(rows) if make_strange is distributed or rank == culprit else rows  # a mesh is made by all
            tensor = tensor if rank == culprit else rows
            error, elapsed_s = outcome(lambda call=call, tensor=tensor: call(tensor))
            assert type(error) is (TypeError if rank == culprit else EPPeerError) and elapsed_s < SOON_S, repr(error)
            reason = text or (FOR_LOW_LATENCY if kind == "low latency" else "no rule for")
            expected = reason if rank == culprit else f"rank {culprit} did not make its call: TypeError"
            assert expected in str(error), repr(error)
        make_step(buffer, number)
