"""The search: one setting at a time, by successive halving, until a round changes nothing; then default against best, in turns.

Every rank runs it with the same times, so all ranks make the same decisions. The statistics assume no distribution of times.

Successive halving is that of Karnin, Koren and Somekh, "Almost optimal exploration in multi-armed bandits" (ICML 2013).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deepep_moe.tuning import Machine, Values

SENDERS = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
RECEIVERS = (4, 8, 16, 32, 48, 64, 96, 128)
RINGS = ((4, 3), (4, 4), (6, 3), (6, 4), (6, 6), (8, 3), (8, 4), (11, 3), (11, 4))
_SAMPLES = 8  # calls of each contender in the first round; twice as many in each later one
_MARGIN = 0.002  # a contender must be faster by this part to replace the best so far
PAIRS = 128  # of the last comparison
CONFIDENCE = 0.99


@dataclass
class Meter:
    """Measures one setting. Collective: the numbers are the same on all ranks."""

    sample: Callable[[Values, int], list[float]]
    """Return so many times of a setting, microseconds, of the slowest rank."""
    is_over: Callable[[], bool]
    """Return whether the time for the search has ended."""
    say: Callable[[str], None]


def axes(machine: Machine) -> list[list[dict[str, int]]]:
    """Return what to change, one list after the other: each has the values of a setting that counts on `machine`."""

    def along(name: str, values: list[int]) -> list[dict[str, int]]:
        return [{name: value} for value in values]

    senders = [n for n in SENDERS if n <= machine.num_sms // 2]
    receivers = [n for n in RECEIVERS if n < machine.num_sms]
    workers = [0, machine.num_sms // 4, machine.num_sms // 2, machine.num_sms * 3 // 4]
    of_sums = [along("num_sms_of_sums", senders)] if machine.num_ranks > 2 else []  # with two ranks no sum is for several peers
    rings = [{"ring_warps": warps, "ring_stages": stages} for warps, stages in RINGS]
    return [along("num_sms", senders), *of_sums, rings, along("num_receive_blocks", receivers), along("num_work_blocks", workers)]


def search(default: Values, machine: Machine, meter: Meter) -> Values:
    """Return the fastest values found, `default` where nothing is faster."""
    best = default
    while True:
        before = best
        for axis in axes(machine):
            if meter.is_over():
                return best
            best = _fastest(best, [replace(best, **change) for change in axis], meter)
        if best == before:
            return best


def _fastest(best: Values, others: list[Values], meter: Meter) -> Values:
    """Return the fastest of `best` and `others` by successive halving; `best` where the others are hardly faster."""
    times: dict[Values, list[float]] = {values: [] for values in (best, *others)}
    contenders, num_samples = list(times), _SAMPLES
    while len(contenders) > 1 and not meter.is_over():
        for values in contenders:
            if not meter.is_over():
                times[values] += meter.sample(values, num_samples)
        contenders = sorted((values for values in contenders if times[values]), key=lambda values: statistics.median(times[values]))
        meter.say(f"best so far {statistics.median(times[contenders[0]]):.1f} us: {contenders[0]} (of {len(contenders)})")
        contenders, num_samples = contenders[: (len(contenders) + 1) // 2], 2 * num_samples
    winner = contenders[0]
    if not times[winner] or winner == best:
        return best
    is_faster = statistics.median(times[winner]) < (1 - _MARGIN) * statistics.median(times[best])
    return winner if is_faster else best


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison. `gain`: the median share of time that the second setting saves; `low` and `high`: its interval. `us`: the
    median times of both, microseconds."""

    gain: float
    low: float
    high: float
    us: tuple[float, float]

    def __str__(self) -> str:
        interval = f"{CONFIDENCE:.0%} interval {self.low:.2%} to {self.high:.2%}"
        return f"{self.us[1]:.1f} us against {self.us[0]:.1f} us, gain {self.gain:.2%}, {interval}"


def compare(default: Values, best: Values, meter: Meter) -> Verdict:
    """Time both by turns, in pairs whose order alternates."""
    times: dict[Values, list[float]] = {default: [], best: []}
    for index in range(PAIRS):
        for values in (default, best) if index % 2 == 0 else (best, default):
            times[values] += meter.sample(values, 1)
    return judge(times[default], times[best])


def judge(default_us: Sequence[float], other_us: Sequence[float]) -> Verdict:
    """Judge times of pairs, microseconds."""
    gains = [1 - other / default for default, other in zip(default_us, other_us, strict=True)]
    us = statistics.median(default_us), statistics.median(other_us)
    return Verdict(statistics.median(gains), *median_interval(gains, CONFIDENCE), us)


def median_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return an interval that covers the median of what `values` are drawn from with at least this confidence.

    Its ends are the k-th smallest and the k-th largest value. A value is below the median with probability 1/2, so k follows from the
    binomial distribution (the interval of the sign test). With too few values it is infinite.
    """
    n, k = len(values), 0
    tail = 1 / 2**n  # the probability of at most k values below the median
    while 2 * tail <= 1 - confidence:
        k += 1
        tail += math.comb(n, k) / 2**n
    if k == 0:
        return -math.inf, math.inf
    ordered = sorted(values)
    return ordered[k - 1], ordered[n - k]
