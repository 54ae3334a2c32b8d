"""The GPU tests of the nvlink backend, on a device that a processor plays (tests/emulation): what its kernels do, not how fast."""

import emulated_gpu
import pytest

pytestmark = pytest.mark.timeout(3600)  # the first one builds the device


def check(*arguments: str) -> None:
    result = emulated_gpu.run(*arguments, "-k", f"not ({emulated_gpu.NEEDS_A_GPU})")
    assert result.returncode == 0, result.stdout[-20000:]
    assert " passed" in result.stdout and " skipped" not in result.stdout, result.stdout


def test_some_of_each_kind():
    files = sorted({name.split("::")[0] for name in emulated_gpu.SLICE})
    check(*files, *(f"--select={name}" for name in emulated_gpu.SLICE))


@pytest.mark.slow
@pytest.mark.parametrize("suite", emulated_gpu.SUITES)
def test_all_others(suite):
    check(*emulated_gpu.SUITES[suite], *(f"--deselect={name}" for name in emulated_gpu.SLICE))


@pytest.mark.slow
def test_what_the_sanitizer_runs():
    """`.ci/sanitize` needs a GPU; that its program is right does not."""
    result = emulated_gpu.execute("tests/sanitize.py")
    assert result.returncode == 0 and result.stdout.count("is right") == 7, result.stdout[-20000:]
