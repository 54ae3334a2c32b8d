"""Passes of a layer from a CUDA graph, for the benchmarks of layers.

The graph holds what the passes of one optimizer step launch, one after another: the gate, the exchange, the experts, and their backward.
Each pass drops its gradients and makes new ones, as an eager pass of a benchmark does. Copies of weights in fp8 are made in the graph too:
by the first pass where micro-batches share them, or by each pass. The optimizer is in no graph, and in no pass of a benchmark.
"""

import gc

import torch
from torch import Tensor

from benchmarks.layers.passes import Pass, chain

_WARMUP = 3


class Graphed:
    """Run `num_passes` passes of a step from one CUDA graph. The step keeps no result and no copy of a weight afterwards.

    When the graph is made, no result of another pass may share a leaf with the step. The nodes that add up gradients would belong to that
    pass's stream, and those of the default stream cannot be captured.
    """

    def __init__(self, step: Pass, num_passes: int = 1):
        self.num_passes = num_passes
        self._graph = torch.cuda.CUDAGraph()
        try:
            _warm_up(step)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            # Another thread, such as NCCL's watchdog, may ask for events meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                chain(step, num_passes)
            self.peak_bytes = torch.cuda.max_memory_allocated() - before
            """Memory of the passes beyond parameters, measured during the capture, because a replay allocates nothing."""
            self._results = step.last_results()
        finally:
            step.clear()
            step.release()

    def forward(self) -> None:
        self._graph.replay()

    def backward(self) -> None:
        """Do nothing: it is in the graph."""

    def clear(self) -> None:
        """Do nothing: the graph drops gradients itself."""

    def results(self) -> dict[str, Tensor]:
        """Replay once, and return the output and the gradients of the last pass, in the memory of the graph."""
        for tensor in self._results.values():
            tensor.fill_(torch.nan)
        self.forward()
        return self._results


def _warm_up(step: Pass) -> None:
    """Allocate what a capture must not, on a stream of its own. Results and copies of weights are dropped before and after."""
    step.clear()
    step.release()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain(step, _WARMUP)
    torch.cuda.current_stream().wait_stream(stream)
    step.clear()
    step.release()
    gc.collect()
    torch.cuda.synchronize()
