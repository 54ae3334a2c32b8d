"""Low-latency calls of random sizes, types and routings equal the reference."""

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from low_latency_cases import ALL_BACKENDS, Case, check_cases

from deepep_moe.testing import run_ranks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def draw_cases(draw, num_ranks, per_node):
    """A few cases for one start of the ranks."""
    cases = []
    for _ in range(draw(st.integers(1, 5))):
        fp8, sums = draw(st.booleans()), draw(st.sampled_from(("ranks", "ranks", "lanes", "lanes_fma")))
        max_tokens = draw(st.integers(1, 40))
        num_experts = num_ranks * draw(st.integers(1, 12))
        cases.append(
            Case(
                [draw(st.integers(0, max_tokens)) for _ in range(num_ranks)], max_tokens, num_experts=num_experts,
                hidden=128 * draw(st.integers(1, 5)) if fp8 else 8 * draw(st.integers(1, 40)),
                num_topk=draw(st.integers(1, min(num_experts, 32))), dtype=draw(st.sampled_from(DTYPES)),
                index_dtype=draw(st.sampled_from((torch.int32, torch.int64))), masked=draw(st.sampled_from((0.0, 0.3, 0.9))),
                with_weights=draw(st.booleans()), combine_weights=draw(st.booleans()), fp8=fp8,
                scale_format=draw(st.sampled_from(("fp32", "ue8m0"))) if fp8 else "fp32",
                wire=draw(st.sampled_from((None, "fp8"))) if fp8 and sums == "ranks" else None, sums=sums, ranks_per_node=per_node,
                mode=draw(st.sampled_from(("now", "async", "hook"))),
                seed=draw(st.integers(0, 10**6)),
            )
        )  # fmt: skip
    return cases


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_shapes(backend, data):
    is_over_nodes = backend == "nvshmem"
    num_ranks, per_node = data.draw(
        st.sampled_from(((2, 1), (4, 2), (4, 1), (6, 2)) if is_over_nodes else ((1, None), (2, None), (4, None)))
    )
    run_ranks(check_cases, num_ranks, backend, draw_cases(data.draw, num_ranks, per_node))
