"""The nvlink backend against the reference, bit for bit; several ranks share a GPU where there are fewer."""

import pytest
import torch
from exchange_cases import Case, check_case

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
