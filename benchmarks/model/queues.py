"""Servers that take jobs one after the other: links, NICs, and the SMs of one role.

The protocol sends no job back, so a simulation solves one kind of server after the other, each in the order of its jobs' arrivals. That
gives the times that an event loop over all servers gives (a test compares them), without a Python step for every event.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def serve(server: Ints, arrival: Floats, service: Floats, order: Floats | None = None) -> Floats:
    """Return when each job ends, if a job begins once it is there and the jobs before it on its `server` have ended.

    Jobs are taken by arrival; those that arrive together by `order`, else as they are listed. All arguments are [num_jobs].
    """
    return _by_server(server, arrival, service, order, is_through=False)


def pass_through(server: Ints, arrival: Floats, service: Floats) -> Floats:
    """Return when the last byte of each job has passed a link, if that byte is there at `arrival`, and others may have gone before it.

    A lone job passes without delay. The link only bounds the rate of many: a job ends no earlier than `service` after the one before it.
    """
    return _by_server(server, arrival, service, None, is_through=True)


def _by_server(server: Ints, arrival: Floats, service: Floats, order: Floats | None, *, is_through: bool) -> Floats:
    if len(server) == 0:
        return np.zeros(0)
    sequence = np.lexsort((arrival, server)) if order is None else np.lexsort((order, arrival, server))
    starts = np.flatnonzero(np.diff(server[sequence], prepend=-1))
    end = np.empty(len(server))
    for jobs in np.split(sequence, starts[1:]):
        busy = np.cumsum(service[jobs])
        earliest = arrival[jobs] - busy if is_through else arrival[jobs] - busy + service[jobs]
        end[jobs] = busy + np.maximum.accumulate(earliest)
    return end


def busiest(server: Ints, service: Floats) -> float:
    """Return how long the server with the most work is busy."""
    return float(np.bincount(server, weights=service).max()) if len(server) else 0.0
