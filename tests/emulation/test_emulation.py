"""The GPU tests of the nvlink backend, on a device that a processor plays (tests/emulation): what its kernels do, not how fast."""

import emulated_gpu
import pytest


@pytest.mark.parametrize("suite", emulated_gpu.SUITES)
def test_kernels_on_an_emulated_gpu(suite):
    result = emulated_gpu.run(*emulated_gpu.SUITES[suite], "-k", f"not ({emulated_gpu.NEEDS_A_GPU})")
    assert result.returncode == 0, result.stdout[-20000:]
    assert " passed" in result.stdout and " skipped" not in result.stdout, result.stdout


def test_what_the_sanitizer_runs():
    """`.ci/sanitize` needs a GPU; that its program is right does not."""
    result = emulated_gpu.execute("tests/sanitize.py")
    assert result.returncode == 0 and result.stdout.count("is right") == 7, result.stdout[-20000:]
