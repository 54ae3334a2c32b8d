"""The nvshmem backend against the reference, bit for bit: nodes of one host, which on the emulated GPU a hostile network connects."""

import pytest
import torch
from exchange_cases import Case, check_case

from deepep_moe.testing import run_ranks

pytestmark = pytest.mark.gpu

SPLITS = {"2x1": (2, 1), "2x2": (4, 2), "4x1": (4, 1), "3x2": (6, 2), "2x4": (8, 4), "8x1": (8, 1)}  # nodes x ranks: (ranks, of a node)
LAYOUTS = ("expert", "rank")


def case_of(split, num_tokens, **settings):
    num_ranks, per_node = SPLITS[split]
    return Case(num_tokens[:num_ranks], num_experts=24, num_topk=4, ranks_per_node=per_node, backends=("nvshmem",), **settings)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", ("2x1", "2x2"))
def test_equals_reference(split, layout):
    case = case_of(split, [9, 21, 0, 17], dtype=torch.bfloat16, layout=layout, expert_alignment=4, with_bias=True)
    run_ranks(check_case, case.num_ranks, case)
