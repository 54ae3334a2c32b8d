"""The GPU tests of the nvlink backend, on a device that a processor plays (tests/emulation): what its kernels do, not how fast."""

import emulated_gpu
import pytest

pytestmark = pytest.mark.timeout(3600)  # the first one builds the device


def check(*arguments: str) -> None:
    result = emulated_gpu.run(*arguments, "-k", f"not ({emulated_gpu.NEEDS_A_GPU})")
    assert result.returncode == 0, result.stdout[-20000:]
    assert " passed" in result.stdout and " skipped" not in result.stdout, result.stdout


def check_some(names: tuple[str, ...]) -> None:
    check(*sorted({name.split("::")[0] for name in names}), *(f"--select={name}" for name in names))


def test_some_of_each_kind():
    check_some(emulated_gpu.SLICE)


@pytest.mark.slow
@pytest.mark.parametrize("suite", emulated_gpu.SUITES)
def test_all_others(suite):
    """Every test, with two of its cases. `python tests/emulated_gpu.py` runs all cases, as a GPU does."""
    check(*emulated_gpu.SUITES[suite], *(f"--deselect={name}" for name in emulated_gpu.SLICE), "--cases=2")


@pytest.mark.slow
def test_what_the_sanitizer_runs():
    """`.ci/sanitize` needs a GPU; that its program is right does not."""
    result = emulated_gpu.execute("tests/sanitize.py", "exchange", "by_expert", "low_latency", "gate", "copies")
    assert result.returncode == 0 and result.stdout.count("is right") == 9, result.stdout[-20000:]
