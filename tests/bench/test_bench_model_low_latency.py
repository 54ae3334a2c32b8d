"""The model of low-latency calls over nodes: by hand, against what others have published, and what the protocol is for."""

from dataclasses import replace

import numpy as np
import pytest

from deepep_moe.bench.model.low_latency import Batch, Latencies, by_message, combine, dispatch, draw, lines
from deepep_moe.bench.model.machine import MACHINES

NONE = Latencies(0.0, 0.0, 0.0, 0.0)
PLAIN = replace(MACHINES["h100"], nic_gbps=1.0, nvlink_gbps=10.0, put_us=5.0, message_us=0.0)


def test_one_token_by_hand():
    """2 nodes of 2 ranks. Rank 0's token has two experts on rank 3, one on rank 2. A row takes 1 us over the network. NVLink passes one
    each 0.1 us."""
    experts_of = np.zeros((4, 1, 4), dtype=np.int64)
    experts_of[0, 0, 2:] = 1, 2
    batch, late = Batch(2, experts_of), np.zeros(4)
    assert dispatch(batch, PLAIN, NONE, 1000, late) == pytest.approx([0, 0, 6.0, 6.1])  # rank 2 has it first
    assert combine(batch, PLAIN, NONE, 1000, late) == pytest.approx([6.1, 0, 0, 0])  # rank 2 has both sums by 0.1
    assert by_message(batch, PLAIN, NONE, 1000, late) == pytest.approx([0, 0, 6, 8])  # three rows leave one after the other


def test_messages_bound_what_bytes_do_not():
    batch, late = draw(16, 8, 64, 8, 256, 0), np.zeros(16)
    many = replace(MACHINES["h100"], message_us=2.0)
    assert np.median(dispatch(batch, many, Latencies(), 64, late)) > 2.0 * 64 / 2
    assert np.median(by_message(batch, many, Latencies(), 64, late)) > 2.0 * 64 * 7


def test_held_against_published_tables():
    """Rates are those of the other model; DeepEP's messages come out within 10% of its table, and too fast but for one."""
    for line in lines(nums_ranks=(16, 32, 64), num_seeds=1):
        assert line.error is not None and -0.10 < line.error < 0.03, line


def test_two_hops_over_nics_of_50_gbps():
    made = {line.op: line for line in lines(replace(MACHINES["h100"], nic_gbps=50.0), (16,), num_seeds=1)}
    assert made["dispatch"].us_p99 < 60 and made["combine"].us_p99 < 85, made
    assert all(line.us < line.by_message_us / 3 for line in made.values())


def test_late_ranks_hold_up_others():
    late = np.zeros(16)
    late[5] = 100.0
    batch = draw(16, 8, 32, 8, 256, 0)
    for call in (dispatch, combine):
        took = call(batch, MACHINES["h100"], Latencies(), 7392, late)
        assert took.argmin() == 5 and (np.delete(took, 5) > 95).all()
