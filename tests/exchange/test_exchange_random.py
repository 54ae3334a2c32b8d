"""Dispatch and combine of random routings equal the reference."""

import pytest
import torch

pytest.importorskip("hypothesis")
from exchange_cases import Case, check_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PATTERNS = ("uniform", "skewed", "masked", "one_expert", "one_rank", "nobody")


def draw_case(draw, num_ranks, backends):
    sums, is_on_gpus = draw(st.sampled_from(("ranks", "lanes", "lanes_fma"))), backends == ("nvlink",)
    num_experts = num_ranks * draw(st.integers(1, 6))
    num_topk, alignment = draw(st.integers(1, min(num_experts, 8))), draw(st.sampled_from((1, 3, 16)))
    nodes = [num_ranks] if is_on_gpus else [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    return Case(
        num_tokens=draw(st.lists(st.integers(0, 60), min_size=num_ranks, max_size=num_ranks)),
        hidden=8 * draw(st.integers(1, 40)),
        num_experts=num_experts,
        num_topk=num_topk,
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        layout="expert" if sums != "ranks" else draw(st.sampled_from(("expert", "rank"))),
        expert_alignment=alignment,
        bound=draw(st.sampled_from((None, 60 * num_ranks * num_topk + alignment * num_experts))),
        by_lane=draw(st.booleans()),
        pattern=draw(st.sampled_from(PATTERNS)),
        index_dtype=draw(st.sampled_from((torch.int64, torch.int32))),
        seed=draw(st.integers(0, 1000)),
        with_weights=draw(st.booleans()),
        with_bias=draw(st.booleans()),
        sums=sums,
        mode=draw(st.sampled_from(("now", "async", "hook"))),
        ranks_per_node=draw(st.sampled_from(nodes)),
        backends=backends,
    )


@pytest.mark.parametrize(
    "backends", [pytest.param(("shm", "collective"), id="cpu"), pytest.param(("nvlink",), id="nvlink", marks=pytest.mark.gpu)]
)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_routings(backends, data):
    """A few cases for one start of the ranks."""
    num_ranks = data.draw(st.integers(1, 6))
    check_cases([draw_case(data.draw, num_ranks, backends) for _ in range(data.draw(st.integers(1, 6)))])
