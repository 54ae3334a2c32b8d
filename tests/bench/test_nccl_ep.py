"""The peer `nccl_ep` with a stand-in for TransformerEngine, on CPU tensors: its calls, its checks and its refusals."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.exchange import nccl_ep
from deepep_moe.errors import BackendUnavailableError, EPError
from deepep_moe.testing import run_ranks
from deepep_moe.tune import workload

SHAPE = workload.Shape(num_ranks=2, hidden=144, num_experts=4, num_topk=2, expert_alignment=4)
NUM_TOKENS = 5
REFUSALS = {
    "row": "its recv_tokens differs from the definition in 1 of",
    "group": "its recv_tokens differs from the definition in ",
    "padding": "its recv_tokens differs from the definition in ",
    "weight": "its recv_topk_weights differs from the definition in 1 of",
    "count": "its tokens_per_expert differs from the definition in 1 of 2 rows",
    "shape": "its recv_tokens is [",
    "sum": "its combine is off by",
}


class FakeEP:
    """A stand-in for the module `transformer_engine.pytorch.ep`. `wrong` names the error in its results."""

    tex = SimpleNamespace(ep_initialize=None)

    def __init__(self, wrong=None):
        self.wrong, self.calls, self.modes = wrong, [], []

    def ep_bootstrap(self, group, num_experts, max_tokens_per_rank, hidden_dim, num_topk):
        self.calls.append(("bootstrap", group.size(), num_experts, max_tokens_per_rank, hidden_dim, num_topk))

    def ep_finalize(self):
        self.calls.append(("finalize",))

    def EpBuffer(self, top_k, max_tokens_per_rank, hidden_dim, num_local_experts, alignment=0):
        return SimpleNamespace(num_local_experts=num_local_experts, alignment=alignment, slots=None)

    def ep_dispatch(self, buffer, tokens, topk_idx, topk_weights):
        """Place the rows of an expert in the reverse of our order; the weights of padding are NaN."""
        self.modes.append(torch.is_grad_enabled())
        everyone = _gathered((tokens, topk_idx, topk_weights))
        buffer.slots = [_slots(everyone, rank, buffer) for rank in range(len(everyone))]
        own = buffer.slots[dist.get_rank()]
        counts = torch.tensor([len(group) for group in own])
        flat = [slot for group in own for slot in group]
        x = torch.zeros(len(flat), tokens.shape[1], dtype=tokens.dtype)
        weights = torch.full((len(flat),), torch.nan)
        for row, slot in enumerate(flat):
            if slot is not None:
                source, token, lane = slot
                x[row], weights[row] = everyone[source][0][token], everyone[source][2][token, lane]
        return self._spoilt(x, weights, counts, flat)

    def _spoilt(self, x, weights, counts, flat):
        if self.wrong == "row":
            x[0, -1] += 1
        elif self.wrong == "group":
            x[[0, int(counts[0])]] = x[[int(counts[0]), 0]]
        elif self.wrong == "padding":
            x[flat.index(None)] = 1
        elif self.wrong == "weight":
            weights[0] *= 2
        elif self.wrong == "count":
            counts[0] += 1
        elif self.wrong == "shape":
            x, weights = torch.cat([x, x[:1]]), torch.cat([weights, weights[:1]])
        return x, weights, counts

    def ep_combine(self, buffer, expert_out, *, num_local_tokens):
        """Sum without weights, and without the rows of padding."""
        self.modes.append(torch.is_grad_enabled())
        total = torch.zeros(num_local_tokens, expert_out.shape[1])
        for slots, rows in zip(buffer.slots, _gathered(expert_out), strict=True):
            for slot, row in zip([slot for group in slots for slot in group], rows, strict=False):
                if slot is not None and slot[0] == dist.get_rank():
                    total[slot[1]] += row.float()
        return (total * (1.1 if self.wrong == "sum" else 1.0)).to(expert_out.dtype)


def _gathered(own):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def _slots(everyone, rank, buffer):
    """Return (source rank, token, lane) of every row of `rank` by expert, None for padding."""
    groups = []
    for expert in range(rank * buffer.num_local_experts, (rank + 1) * buffer.num_local_experts):
        found = [(source, *at) for source, (_, idx, _) in enumerate(everyone) for at in (idx == expert).nonzero().tolist()]
        groups.append([*reversed(found), *[None] * (-len(found) % buffer.alignment)])
    return groups


def install(fake, put=sys.modules.__setitem__, require=lambda: None):
    put("transformer_engine", SimpleNamespace(__version__="2.20.2", require_nccl_ep=require))
    put("transformer_engine.pytorch.ep", fake)


def _plain(result):
    """Return lists, as a rank may end before its tensors are read."""
    return [tensor.tolist() for tensor in result] if isinstance(result, tuple) else result.tolist()


def run(rank, num_ranks, wrong, num_tokens=NUM_TOKENS, calls_them=True):
    """Return the error of `operations` on this rank, or None, with the operations, their results and the calls of the stand-in."""
    fake = FakeEP(wrong if rank == 1 else None)
    install(fake)
    nccl_ep.nccl_version = lambda: "2.32.3"
    peer, error, made, results = nccl_ep.NcclEP(SHAPE, dist.group.WORLD, 70), None, [], []
    try:
        made = peer.operations(workload.make_inputs(SHAPE, num_tokens, rank, torch.device("cpu")))
        results = [_plain(operation.call()) for operation in made for _ in range(2 if calls_them else 0)]
    except (EPError, ValueError) as raised:
        error = str(raised)
    peer.destroy()
    dist.barrier()  # a rank that ends early would break the peer's set-up of the group
    return error, peer.version, [(o.name, o.layout, o.row_bytes, o.num_sms) for o in made], results, fake.calls, fake.modes


def test_operations():
    for rank, (error, version, made, results, calls, modes) in enumerate(run_ranks(run, 2, None)):
        assert error is None and version == "TransformerEngine 2.20.2, NCCL 2.32.3"
        assert made == [(f"nccl_ep {op} bf16 expert", "expert", 288, None) for op in ("dispatch", "combine")]
        assert calls == [("bootstrap", 2, 4, 128, 144, 2), ("finalize",)]
        assert modes == 6 * [False]  # autograd is off
        inputs = workload.make_inputs(SHAPE, NUM_TOKENS, rank, torch.device("cpu"))
        by_definition = inputs.topk_weights.sum(1, keepdim=True) * inputs.x.float()
        for combined in results[2:]:
            assert torch.allclose(torch.tensor(combined), by_definition, rtol=0.03, atol=0.03)
        for recv_x, _, counts in results[:2]:
            assert len(recv_x) == sum(counts) and not any(count % 4 for count in counts)


@pytest.mark.parametrize("wrong", REFUSALS)
def test_wrong_results_are_refused(wrong):
    """If one rank has wrong results, only that rank raises, and no rank waits for another."""
    (right, *_), (error, *_) = run_ranks(run, 2, wrong, NUM_TOKENS, False, timeout_s=120)
    assert right is None
    assert error is not None and error.startswith(REFUSALS[wrong])


def test_too_many_tokens():
    for error, *_ in run_ranks(run, 2, None, 71):
        assert error == "inputs have 71 tokens, the peer was made for 70; raise num_max_tokens"


# ---- what is missing ----


def old_nccl():
    raise RuntimeError("NCCL EP requires NCCL >= 2.30.4 at runtime; found 2.28.9")


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(BackendUnavailableError, match=r"--peer nccl_ep: NCCL EP cannot be used here \(.*\); install transformer_engine"):
        nccl_ep.load()


def refused_group(*_):
    raise RuntimeError("NCCL error: invalid usage")


@pytest.mark.parametrize(
    ("changes", "require", "told"),
    [
        ({}, old_nccl, r"found 2\.28\.9\); .* nvidia-nccl-cu13 2\.32\.3"),
        ({"tex": SimpleNamespace()}, lambda: None, "compiled without NVTE_WITH_NCCL_EP=1"),
        ({"ep_bootstrap": refused_group}, lambda: None, r"\(NCCL error: invalid usage\); install .* nvidia-nccl-cu13 2\.32\.3"),
    ],
)
def test_what_is_too_old_or_refused(changes, require, told, monkeypatch):
    fake = FakeEP()
    vars(fake).update(changes)
    install(fake, lambda name, module: monkeypatch.setitem(sys.modules, name, module), require)
    monkeypatch.setattr(nccl_ep, "nccl_version", lambda: "2.30.7")
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    with pytest.raises(BackendUnavailableError, match=told):
        nccl_ep.NcclEP(SHAPE, None, 64)
