"""When is one setting faster than another? Statistics that assume no distribution of times."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.99
LOOKS = (16, 32, 64, 128)
"""Numbers of pairs after which one may stop. Each look has its share of the error, so that all together have the confidence above."""


def median_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return an interval that covers the median of what `values` are drawn from with at least this confidence.

    Its ends are the k-th smallest and the k-th largest value. A value is below the median with probability 1/2, so k follows from the
    binomial distribution (the interval of the sign test). With too few values it is infinite.
    """
    n, tail, k = len(values), 0.0, 0
    while k < n // 2:
        tail += math.comb(n, k) / 2**n  # of fewer than k + 1 values below the median
        if 2 * tail > 1 - confidence:
            break
        k += 1
    if k == 0:
        return -math.inf, math.inf
    ordered = sorted(values)
    return ordered[k - 1], ordered[n - k]


@dataclass(frozen=True)
class Verdict:
    """The result of a paired run. `gain`: the median share of time that the second of a pair saves. `low`, `high`: its interval."""

    gain: float
    low: float
    high: float
    pairs: tuple[tuple[float, float], ...]
    """Times of both, microseconds."""

    @property
    def num_pairs(self) -> int:
        return len(self.pairs)

    @property
    def us(self) -> tuple[float, float]:
        """Return the medians of both, microseconds."""
        return statistics.median(first for first, _ in self.pairs), statistics.median(second for _, second in self.pairs)

    @property
    def is_faster(self) -> bool:
        return self.low > 0

    @property
    def is_settled(self) -> bool:
        """Return whether the interval lies on one side of 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return (
            f"{self.us[1]:.1f} us against {self.us[0]:.1f} us, gain {self.gain:.2%}, {CONFIDENCE:.0%} interval {self.low:.2%} to "
            f"{self.high:.2%}, {self.num_pairs} pairs"
        )


def judge(pairs: Sequence[tuple[float, float]]) -> Verdict:
    """Judge pairs of times (default, other), microseconds, at one of the `LOOKS`."""
    gains = [1 - other / default for default, other in pairs]
    low, high = median_interval(gains, 1 - (1 - CONFIDENCE) / len(LOOKS))
    return Verdict(statistics.median(gains), low, high, tuple(pairs))
