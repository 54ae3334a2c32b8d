"""Find what a step leaves to Python's garbage collector. An autograd graph in a reference cycle keeps its activations until the collector
runs, and trainers run it rarely."""

import gc
from collections.abc import Callable
from typing import Any

import torch


def assert_leaves_no_graph(step: Callable[[], Any]) -> None:
    """Two more steps, without the collector, leave no more tensors with a graph than one."""
    step()
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        of_one = _tensors_with_graph()
        step()
        step()
        of_three = _tensors_with_graph()
        assert len(of_three) <= len(of_one), f"one step leaves {of_one}, two more {of_three}"
    finally:
        if was_enabled:
            gc.enable()


def _tensors_with_graph() -> list[str]:
    tensors = (x for x in gc.get_objects() if type(x) is torch.Tensor and x.grad_fn is not None)
    return [f"{tuple(tensor.shape)} of {tensor.grad_fn}" for tensor in tensors]
