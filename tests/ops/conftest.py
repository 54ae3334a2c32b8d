"""Tests of operators run on the CPU, and by the kernels if there is a GPU."""

import pytest
import torch
from exchange_cases import device_of


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return device_of("nvlink", 0) if request.param == "cuda" else torch.device("cpu")
