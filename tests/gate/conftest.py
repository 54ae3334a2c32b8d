"""Tests of the gate run on the CPU, and on a GPU if there is one."""

import pytest
from exchange_cases import device_of


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return device_of("nvlink" if request.param == "cuda" else "shm", 0)
