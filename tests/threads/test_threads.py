"""The program that the thread sanitizer watches is right without it (`.ci/sanitize threads`)."""

import pytest
import rank_threads


@pytest.mark.slow
@pytest.mark.timeout(3600)  # compiles the CPU library
def test_ranks_as_threads():
    result = rank_threads.run()
    assert result.returncode == 0 and result.stdout.count("is right") == 2, result.stdout[-20000:]
