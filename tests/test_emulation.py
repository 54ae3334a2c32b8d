"""The GPU tests of the nvlink backend, on a device that a processor plays (tests/emulation): what its kernels do, not how fast."""

import emulated_gpu
import pytest


@pytest.mark.parametrize("suite", emulated_gpu.SUITES)
def test_kernels_on_an_emulated_gpu(suite):
    result = emulated_gpu.run(*emulated_gpu.SUITES[suite], "-k", f"not ({emulated_gpu.NEEDS_A_GPU})")
    assert result.returncode == 0, result.stdout[-20000:]
    assert " passed" in result.stdout and " skipped" not in result.stdout, result.stdout
