"""Small calls of most kernels for compute-sanitizer (`.ci/sanitize`): two ranks, few blocks, each result compared."""

import sys
from pathlib import Path

import pytest
import torch
from by_expert_cases import doubled, equal
from exchange_cases import Case, check_each, device_of
from low_latency_cases import Case as LowLatencyCase
from low_latency_cases import make_buffer, run_case

from deepep_moe import LowLatencyBuffer, ops, reference
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.nn import Balance
from deepep_moe.testing import run_ranks

sys.path.append(str(Path(__file__).parent / "nn"))
from test_expert_copies import layer_of, train

FEW_BLOCKS = 5
EXCHANGES = [
    Case([9, 14], num_sms=2, layout=layout, dtype=dtype, with_bias=True, expert_alignment=4, bulk_copies=bulk, backends=("nvlink",))
    for layout, dtype, bulk in (("expert", torch.bfloat16, True), ("rank", torch.float32, True), ("expert", torch.float16, False))
]
LOW_LATENCY = [
    LowLatencyCase([9, 5], hidden=256, num_experts=12, num_topk=4, fp8=True, scale_format="ue8m0", wire="fp8"),
    LowLatencyCase([20, 3], hidden=1024, num_experts=8, num_topk=3, with_weights=False, mode="hook"),
    LowLatencyCase([7, 12], hidden=256, num_experts=32, num_topk=17, combine_weights=True),
]


def few_blocks() -> None:
    constructor = NvlinkBackend.__init__

    def with_few_blocks(self, *arguments):
        constructor(self, *arguments)
        self.tuning.num_receive_blocks = self.tuning.num_work_blocks = FEW_BLOCKS

    NvlinkBackend.__init__ = with_few_blocks


def exchange(rank: int, num_ranks: int, case: Case) -> None:
    few_blocks()
    check_each(rank, num_ranks, [case])


def by_expert(rank: int, num_ranks: int, case: Case) -> None:
    few_blocks()
    equal(rank, num_ranks, "nvlink", case, doubled)


def low_latency(rank: int, num_ranks: int, case: LowLatencyCase) -> None:
    constructor = LowLatencyBuffer.__init__

    def with_few_blocks(self, *arguments, **options):
        constructor(self, *arguments, **options)
        self._backend._native.num_blocks = FEW_BLOCKS + num_ranks

    LowLatencyBuffer.__init__ = with_few_blocks
    run_case(make_buffer(case, "nvlink", rank, timeout_s=200), case, rank, "nvlink")


def gate(rank: int, num_ranks: int) -> None:
    logits = torch.randn(33, 16, generator=torch.Generator().manual_seed(rank))
    ours, theirs = (logits.to(where).requires_grad_() for where in (device_of("nvlink", rank), "cpu"))
    idx, weights, _ = ops.gate(ours, 4, num_groups=4, topk_groups=2)
    expected_idx, expected_weights, _ = reference.gate(theirs, 4, num_groups=4, topk_groups=2)
    assert torch.equal(idx.cpu(), expected_idx.to(idx.dtype))
    torch.testing.assert_close(weights.detach().cpu(), expected_weights.detach())
    weights.square().sum().backward()
    expected_weights.square().sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


def copies(rank: int, num_ranks: int) -> None:
    """Count, plan, fetch, and bring gradients home."""
    few_blocks()
    plain, others = (train(layer_of(rank, num_ranks, balance, "nvlink"), rank, 1) for balance in (None, Balance(3, cost=1)))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, plain, strict=True))


def products(rank: int, num_ranks: int) -> None:
    """Products of experts and what stands between them, on one GPU."""
    files = [f"tests/ops/test_{name}.py" for name in ("weight_gradients", "swiglu", "fp8_kernels")]
    assert pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "gpu and not slow", *files]) == 0


def main() -> None:
    parts = {
        "exchange": [(exchange, case) for case in EXCHANGES],
        "by_expert": [(by_expert, Case([9, 14], num_topk=4, dtype=torch.bfloat16))],
        "low_latency": [(low_latency, case) for case in LOW_LATENCY],
        "gate": [(gate,)],
        "copies": [(copies,)],
        "products": [(products,)],
    }
    for part in sys.argv[1:] or parts:
        for worker, *case in parts[part]:
            run_ranks(worker, 1 if worker is products else 2, *case, timeout_s=280)
            print(f"{part} is right: {case}", flush=True)


if __name__ == "__main__":
    main()
