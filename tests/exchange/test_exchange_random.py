"""Dispatch and combine of random routings equal the reference."""

import pytest
import torch

pytest.importorskip("hypothesis")
from exchange_cases import Case, check_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepep_moe.testing import run_ranks

LAYOUTS = ("expert", "rank")
SUMS = ("ranks", "lanes", "lanes_fma")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_routings(data):
    num_ranks, sums = data.draw(st.integers(1, 4), "num_ranks"), data.draw(st.sampled_from(SUMS), "sums")
    num_experts = num_ranks * data.draw(st.integers(1, 6), "num_local_experts")
    case = Case(
        num_tokens=data.draw(st.lists(st.integers(0, 60), min_size=num_ranks, max_size=num_ranks), "num_tokens"),
        hidden=8 * data.draw(st.integers(1, 40), "hidden / 8"),
        num_experts=num_experts,
        num_topk=data.draw(st.integers(1, min(num_experts, 8)), "num_topk"),
        dtype=data.draw(st.sampled_from(DTYPES), "dtype"),
        layout="expert" if sums != "ranks" else data.draw(st.sampled_from(LAYOUTS), "layout"),
        expert_alignment=data.draw(st.sampled_from((1, 3, 16)), "expert_alignment"),
        pattern=data.draw(st.sampled_from(("uniform", "skewed", "masked", "one_rank", "nobody")), "pattern"),
        index_dtype=data.draw(st.sampled_from((torch.int64, torch.int32)), "index_dtype"),
        seed=data.draw(st.integers(0, 1000), "seed"),
        with_weights=data.draw(st.booleans(), "with_weights"),
        with_bias=data.draw(st.booleans(), "with_bias"),
        sums=sums,
        ranks_per_node=data.draw(st.sampled_from([n for n in range(1, num_ranks + 1) if num_ranks % n == 0]), "ranks_per_node"),
    )
    run_ranks(check_case, num_ranks, case)
