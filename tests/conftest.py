"""Shared fixtures. GPU tests run where the devices are and are skipped, saying so, where they are not."""

import sys
from pathlib import Path

import emulated_gpu
import preload
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # benchmarks; at the end, so that the package that is installed stays first


def pytest_addoption(parser):
    parser.addoption("--select", action="append", default=[], help="only tests whose names begin so, as those of --deselect")


def pytest_collection_modifyitems(config, items):
    if begins := tuple(config.option.select):
        config.hook.pytest_deselected(items=[item for item in items if not item.nodeid.startswith(begins)])
        items[:] = [item for item in items if item.nodeid.startswith(begins)]
    num_gpus = 1 if emulated_gpu.is_chosen() else torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("multi_gpu")
        needed = marker.args[0] if marker else 1 if item.get_closest_marker("gpu") else 0
        if needed > num_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, this machine has {num_gpus}"))


def pytest_runtestloop(session):
    """Ranks fork from a process that has the test modules. Not beside GPUs: what a module asks of CUDA would be lost by the fork."""
    if torch.cuda.device_count() == 0 and not session.config.option.collectonly:
        preload.start_server({"pytest", "deepep_moe.testing"} | {item.module.__name__ for item in session.items})
