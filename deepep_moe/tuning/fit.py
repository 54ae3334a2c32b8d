"""Chooses how many SMs send on a machine that nobody has tuned. docs/tuning.md has the reasoning and the measurements."""

import math

_MEASURED_SMS = 12  # the best of a sweep on 2 and on 4 H200s
_LINK_GBPS = {9: 357.0, 10: 714.0}  # GB/s that their SMs push at most, by compute capability; NVLink 5 has twice the rate of NVLink 4
# As many bytes are in flight as the link carries in this time at its highest rate: 11 to 12 rings of 184 KiB at 357 GB/s.
_US_ON_THEIR_WAY = 5.9
_RING_BYTES = 184 * 1024  # kRingBytes of csrc/cuda/tuning.h
_SMS_PER_SENDER = 4  # the other SMs receive and sum, and touch each row more often than senders do
_SENDERS_PER_EXTRA = 6  # a sender of sums sometimes waits for them; one more for each 6 senders makes up for it


def fit(num_multiprocessors: int, capability_major: int, link_gbps: float | None = None) -> tuple[int, int]:
    """Return `num_sms` and `num_sms_of_sums` of `_C.GpuTuning`.

    num_multiprocessors: SMs that this process may use. link_gbps: the rate in GB/s at which SMs can push to the peers, in one direction.
    None stands for what was measured or published for this compute capability, if anything."""
    link = _LINK_GBPS.get(capability_major, 0.0) if link_gbps is None else link_gbps
    has_rings = capability_major >= 9 and link > 0
    wanted = math.ceil(link * _US_ON_THEIR_WAY * 1e3 / _RING_BYTES) if has_rings else _MEASURED_SMS
    num_sms = max(1, min(wanted, num_multiprocessors // _SMS_PER_SENDER))
    return num_sms, num_sms + math.ceil(num_sms / _SENDERS_PER_EXTRA)
