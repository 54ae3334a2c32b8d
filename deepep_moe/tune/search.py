"""The search: one setting at a time, by successive halving, until a round changes nothing; then default against best, in turns.

Every rank runs it with the same times, so all ranks make the same decisions.

Successive halving is that of Karnin, Koren and Somekh, "Almost optimal exploration in multi-armed bandits" (ICML 2013).
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from deepep_moe.tune.intervals import LOOKS, Verdict, judge
from deepep_moe.tuning import Machine, Values

SENDERS = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
RECEIVERS = (4, 8, 16, 32, 48, 64, 96, 128)
RINGS = ((4, 3), (4, 4), (6, 3), (6, 4), (6, 6), (8, 3), (8, 4), (11, 3), (11, 4))
_SAMPLES = 8  # calls of each contender in the first round; twice as many in each later one
_MARGIN = 0.002  # a contender must be faster by this part to replace the best so far
SEARCH_SHARE = 0.7  # part of the time; the rest is for the last comparison

Say = Callable[[str], None]
Axis = Callable[[Values], list[Values]]


@dataclass
class Meter:
    """Measures one setting. Collective: the numbers are the same on all ranks."""

    sample: Callable[[Values, int], list[float]]
    """Return so many times of a setting, microseconds, of the slowest rank."""
    elapsed_s: Callable[[], float]
    """Return how long the run has taken by its last sample, the longest of all ranks."""
    limit_s: float
    say: Say

    def is_over(self, share: float = 1.0) -> bool:
        return self.elapsed_s() > share * self.limit_s


def axes(machine: Machine) -> list[Axis]:
    """Return, for each setting that counts on `machine`, what gives its other values."""

    def along(name: str, candidates: list[int]) -> Axis:
        return lambda values: [replace(values, **{name: other}) for other in candidates if other != getattr(values, name)]

    def rings(values: Values) -> list[Values]:
        others = [replace(values, ring_warps=warps, ring_stages=stages) for warps, stages in RINGS]
        return [other for other in others if other != values]

    senders = [n for n in SENDERS if n <= machine.num_sms // 2]
    receivers = [n for n in RECEIVERS if n < machine.num_sms]
    workers = [0, machine.num_sms // 4, machine.num_sms // 2, machine.num_sms * 3 // 4]
    searched = [along("num_sms", senders)]
    if machine.num_ranks > 2:  # with two ranks no sum is for several peers
        searched.append(along("num_sms_of_sums", senders))
    return [*searched, rings, along("num_receive_blocks", receivers), along("num_work_blocks", workers)]


def search(default: Values, machine: Machine, meter: Meter) -> Values:
    """Return the fastest values found, `default` where nothing is faster."""
    best = default
    while True:
        before = best
        for axis in axes(machine):
            if meter.is_over(SEARCH_SHARE):
                return best
            best = _fastest(best, axis(best), meter)
        if best == before:
            return best


def _fastest(best: Values, others: list[Values], meter: Meter) -> Values:
    """Return the fastest of `best` and `others` by successive halving; `best` where the others are hardly faster."""
    times: dict[Values, list[float]] = {values: [] for values in (best, *others)}
    contenders, num_samples = list(times), _SAMPLES
    while len(contenders) > 1 and not meter.is_over(SEARCH_SHARE):
        for values in contenders:
            if not meter.is_over(SEARCH_SHARE):
                times[values] += meter.sample(values, num_samples)
        contenders = sorted((values for values in contenders if times[values]), key=lambda values: statistics.median(times[values]))
        us, before_us = (statistics.median(times[values]) for values in (contenders[0], best))
        meter.say(f"best so far {us:.1f} us: {_difference(best, contenders[0])} (of {len(contenders)}; before: {before_us:.1f} us)")
        contenders, num_samples = contenders[: (len(contenders) + 1) // 2], 2 * num_samples
    winner = contenders[0]
    if not times[winner] or winner == best:
        return best
    is_faster = statistics.median(times[winner]) < (1 - _MARGIN) * statistics.median(times[best])
    return winner if is_faster else best


def _difference(best: Values, other: Values) -> str:
    changed = [f"{name} {value}" for name, value in vars(other).items() if value != getattr(best, name)]
    return ", ".join(changed) or "no change"


def compare(default: Values, best: Values, meter: Meter) -> Verdict | None:
    """Compare by pairs, the order of which alternates, until the interval of the gain lies on one side of 0 or the looks or the time end.
    None where the time ends before the first look."""
    verdict: Verdict | None = None
    pairs: list[tuple[float, float]] = []
    for pair in _pairs(default, best, meter):
        pairs.append(pair)
        if len(pairs) in LOOKS:
            verdict = judge(pairs)
            meter.say(f"default against best: {verdict}")
            if verdict.is_settled:
                break
    return verdict


def _pairs(default: Values, best: Values, meter: Meter) -> Iterator[tuple[float, float]]:
    for index in range(max(LOOKS)):
        if meter.is_over():
            return
        order = (default, best) if index % 2 == 0 else (best, default)
        times = {values: meter.sample(values, 1)[0] for values in order}
        yield times[default], times[best]
