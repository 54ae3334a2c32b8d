"""The emulated NVSHMEM with its hostile network, and the streams of the emulated device: what they let through and what they stop."""

import os
import re
import subprocess
from pathlib import Path

import emulated_gpu
import pytest

pytestmark = pytest.mark.timeout(900)  # the first one builds the device
FOLDER = Path(__file__).parent
NETWORK = "DEEPEP_MOE_EMULATED_NETWORK"
ALL_ARRIVE = "right, stopped in round 0, 72 messages, 179880 bytes"  # of 12 rounds with 5 chunks and a word of thanks
LATE = "delay_us=1000000,depth=8"  # what is put stays in flight
# Programs that put wrongly, and what the network says.
WRONG = {
    "to": "the destination 0x.* with 64 bytes, of a put to PE ., is not in one block of the symmetric heap",
    "to end": "the destination 0x.* with 3000 bytes, of a put to PE ., is not in one block of the symmetric heap",
    "from": "the source 0x.* with 64 bytes, of a put to PE ., is not in one block of the symmetric heap",
    "from end": "the source 0x.* with 3000 bytes, of a put to PE ., is not in one block of the symmetric heap",
    "signal": "the signal 0x.* with 8 bytes, of a put to PE ., is not in one block of the symmetric heap",
    "odd signal": "a put to PE . with a signal that is not aligned to 8 bytes",
    "signal in payload": "the signal of a put to PE . lies in its own payload",
    "no bytes": "a put of 0 bytes to PE .; call nvshmemx_signal_op",
    "lanes": "the lanes of a warp ask for different puts",
    "same bytes": "two puts in flight to PE . write the same bytes or the same signal",
    "same signal": "two puts in flight to PE . write the same bytes or the same signal",
    "freed": "memory is freed that a put to PE . still reads or writes; wait until it has arrived",
    "depth": "9 puts to PE . are in flight; the queue holds depth=8",
    "add": "a put to PE . with signal operation 10; only NVSHMEM_SIGNAL_SET keeps its meaning when puts overtake",
    "itself": "a put to PE ., which is the sender itself",
    "nobody": "a put to PE 2; there are 2",
    "unequal": "nvshmem_align of 300. here and of 300. on PE .; all PEs must make the same calls",
    "gone": "nvshmem_barrier_all waits for PE 1, whose process is gone",
}


@pytest.fixture(scope="module")
def ranks():
    program = emulated_gpu.build_program(FOLDER / "nvshmem_ranks.cu")

    def run(scenario: str, num_pes: int, network: str = "") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {NETWORK: network}
        return subprocess.run([program, scenario, str(num_pes)], env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_streams_and_events():
    program = emulated_gpu.build_program(FOLDER / "stream_order.cu")
    result = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "all as promised\n", "")


NETWORKS = ("delay_us=500", "stall_us=5000", "flush=1,stall_us=1000", "delay_us=0", "flush=1")


@pytest.mark.parametrize("num_seeds", (5, pytest.param(25, marks=pytest.mark.slow)))
@pytest.mark.parametrize("num_pes", (2, 3, 4, 8))
def test_chunks_arrive_whole(ranks, num_pes, num_seeds):
    for seed in range(num_seeds):
        result = ranks("exchange", num_pes, f"seed={seed},{NETWORKS[seed % 5]}")
        assert result.returncode == 0 and not result.stderr, (seed, result)
        assert sorted(result.stdout.splitlines()) == [f"PE {pe}: {ALL_ARRIVE}" for pe in range(num_pes)], seed


@pytest.mark.parametrize(("scenario", "network"), (("reuse", "delay_us=2000"), ("early", "delay_us=2000"), ("unflushed", "flush=1")))
def test_a_wait_that_is_missing_shows(ranks, scenario, network):
    """The source is changed before it was read, payload is read before its word was seen, or before nvshmem_uint64_test. A busy machine may
    delay a rank for so long that it misses nothing, so five tries are judged together."""
    wrong: set[str] = set()
    for seed in range(5):
        result = ranks(scenario, 2, f"seed={seed},{network}")
        assert result.returncode == 0, (seed, result)
        wrong |= set(re.findall(r"PE (\d): wrong, ", result.stdout))
    assert wrong == {"0", "1"}, wrong


def test_a_receiver_that_is_not_waited_for_shows(ranks):
    result = ranks("impatient", 2)
    assert result.returncode == 1 and re.search(WRONG["same bytes"], result.stderr), result


@pytest.mark.parametrize("what", WRONG)
def test_wrong_puts_end_the_process(ranks, what):
    result = ranks(f"wrong {what}", 2, LATE)
    assert result.returncode == 1 and re.search(rf"^emulated NVSHMEM: rank [01]: {WRONG[what]}$", result.stderr, re.MULTILINE), result
    assert "nobody minds" not in result.stdout


def test_program_that_puts_nothing_ends_well(ranks):
    result = ranks("wrong nothing", 2, LATE)
    assert result.returncode == 0 and result.stdout.count("nobody minds") == 2, result


@pytest.mark.slow
def test_a_lost_rank(ranks):
    """The others go on without it; of what is put from or to it, some arrives before."""
    result = ranks("lost", 2, "lose=1,lose_after=12")
    arrived = [int(number) for number in re.findall(r"right, stopped in round [123], (\d+) messages", result.stdout)]
    assert result.returncode == 0 and len(arrived) == 2 and max(arrived) == 12, result
    result = ranks("lost", 4, "lose=1")
    assert result.returncode == 0 and result.stdout.count("right, stopped in round 1, 72 messages") == 2, result  # from 2 to 3 and 3 to 0
    assert result.stdout.count("right, stopped in round 1, 0 messages") == 2, result


def test_failed_start(ranks):
    result = ranks("exchange", 2, "fail_init=1")
    assert result.returncode == 0 and result.stdout.count("not initialised") == 2, result


@pytest.mark.parametrize("network", ("speed=1", "seed", "seed=-1", "seed=1,,depth=2", "stall_us=1e3"))
def test_unknown_options(ranks, network):
    result = ranks("exchange", 2, network)
    assert result.returncode == 1 and f"emulated NVSHMEM: rank -1: {NETWORK} has '" in result.stderr, result
