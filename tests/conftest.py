"""Shared fixtures. GPU tests are skipped, with a message, on machines without the devices."""

import sys
from collections import defaultdict
from pathlib import Path

import emulated_gpu
import preload
import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "examples" / "common")]  # benchmarks, and what examples share; an installed package stays first


def pytest_addoption(parser):
    parser.addoption("--select", action="append", default=[], help="only tests whose names begin so, as those of --deselect")
    parser.addoption("--cases", type=int, help="at most so many cases of a parametrized test, from the first to the last")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    if begins := tuple(config.option.select):
        if unknown := [name for name in begins if not any(item.nodeid.startswith(name) for item in items)]:
            raise pytest.UsageError(f"--select={unknown[0]} selects no test")
        config.hook.pytest_deselected(items=[item for item in items if not item.nodeid.startswith(begins)])
        items[:] = [item for item in items if item.nodeid.startswith(begins)]
    if config.option.cases:
        left_out = set(items) - set(sample(items, config.option.cases))
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    num_gpus = 1 if emulated_gpu.is_chosen() else torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("multi_gpu")
        needed = marker.args[0] if marker else 1 if item.get_closest_marker("gpu") else 0
        if needed > num_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, this machine has {num_gpus}"))
    items.sort(key=minutes_allowed, reverse=True)  # so that no lane is left with a long test at the end


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The CPU, and a GPU if there is one, as operators take it."""
    from exchange_cases import device_of

    return device_of("nvlink" if request.param == "cuda" else "shm", 0)


def minutes_allowed(item):
    """Return the limit of a test that takes minutes, and 0 for all others, which keep their order."""
    marker = item.get_closest_marker("timeout")
    return marker.args[0] // 60 if marker else 0


def sample(items, most):
    """Keep at most so many cases of each test function, evenly spread, including the first and the last."""
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        step = (len(cases) - 1) / max(most - 1, 1)
        yield from cases if len(cases) <= most else (cases[round(step * n)] for n in range(most))


@pytest.hookimpl(tryfirst=True)  # xdist's own hook is the loop of a lane; the process that only deals out the tests has no items
def pytest_runtestloop(session):
    """Ranks fork from a process that has the test modules. Not beside GPUs: what a module asks of CUDA would be lost by the fork."""
    if session.items and torch.cuda.device_count() == 0 and not session.config.option.collectonly:
        preload.start_server({"pytest", "torch._dynamo", "deepep_moe.testing"} | {item.module.__name__ for item in session.items})
