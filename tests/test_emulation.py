"""The GPU tests of the nvlink backend, on a device that a processor plays (tests/emulation): what its kernels do, not how fast."""

import emulated_gpu


def test_kernels_on_an_emulated_gpu():
    result = emulated_gpu.run(*emulated_gpu.TESTS, "-k", f"not ({emulated_gpu.NEEDS_A_GPU})")
    assert result.returncode == 0, result.stdout[-20000:]
    assert " passed" in result.stdout and " skipped" not in result.stdout, result.stdout
