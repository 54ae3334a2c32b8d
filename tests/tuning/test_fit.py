"""How many SMs send on a machine without a profile: csrc/runtime/nvlink/fit.cpp."""

import pytest

from deepep_moe import _C

pytestmark = pytest.mark.skipif(not _C.build_info()["nvlink"], reason="compiled with nvcc only")
BF16, FP8 = 2 * 7168, 7168 + 4 * 56


def fit(num_sms: int, capability: int = 9, row_bytes: int = BF16, link_gbps: float | None = None) -> tuple[int, int]:
    found = _C.gpu_fit_tuning(num_multiprocessors=num_sms, capability_major=capability, row_bytes=row_bytes, link_gbps=link_gbps)
    return found.num_sms, found.num_sms_of_sums


@pytest.mark.parametrize("row_bytes", (FP8, BF16, 2 * BF16))
def test_measured_machines_keep_what_was_measured(row_bytes):
    """H100 and H200 have 132 SMs; rows of the sweep (benchmarks/results/h200-nvlink-2026-11-22.json) are bf16 and fp8."""
    assert fit(132, row_bytes=row_bytes) == (12, 14)


def test_faster_link_takes_more():
    """B200: twice the link, so twice the bytes on their way."""
    assert fit(148, capability=10) == fit(148, link_gbps=714) == (23, 27)
    assert fit(132, link_gbps=178.5) == (6, 7)


def test_short_rows_take_more():
    """A ring of 24 rows holds 96 KiB of rows of 4 KiB."""
    assert fit(132, row_bytes=4096) == (22, 26)
    assert fit(132, row_bytes=16) == fit(132, row_bytes=0) == (33, 39)


@pytest.mark.parametrize(("num_sms", "expected"), [(66, 12), (33, 8), (12, 3), (4, 1), (3, 1), (1, 1)])
def test_small_share_of_a_gpu(num_sms, expected):
    """At most a quarter sends; one does, whatever there is."""
    assert fit(num_sms)[0] == expected


@pytest.mark.parametrize("capability", (8, 12))
def test_unknown_link(capability):
    """What was not measured keeps the number that was."""
    assert fit(108, capability=capability) == fit(108, capability=capability, row_bytes=64) == (12, 14)
    assert _C.gpu_fit_tuning(num_multiprocessors=108, capability_major=capability, row_bytes=64).uses_bulk_copies == (capability >= 9)
