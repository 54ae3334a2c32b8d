"""Run Megatron-Core on a machine without a GPU: `enable_cpu()` and `disable_cpu()`.

The dispatchers, the router and the pure-PyTorch experts compute on CPU tensors over gloo, but Megatron-Core calls `torch.cuda`
unconditionally in a few places. This layer answers those calls with the CPU's equivalent, for examples and tests. It is active only
between the two calls, refuses to act where a GPU is present, and puts back every symbol that it replaced.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from megatron_without_te import patch_modules

from deepep_moe.integrations.common.patches import Patches

_log = logging.getLogger(__name__)


class CpuEvent:
    """Takes the place of `torch.cuda.Event`. CPU work is done when a call returns, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing is in flight."""

    def wait(self, stream: Any = None) -> None:
        """Nothing is in flight."""

    def synchronize(self) -> None:
        """Nothing is in flight."""


class CpuStream:
    """Takes the place of `torch.cuda.Stream`: one queue, always empty. All instances are equal, so no code takes a side-stream path."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuStream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: Any) -> None:
        """Nothing is in flight."""

    def wait_event(self, event: Any) -> None:
        """Nothing is in flight."""

    def synchronize(self) -> None:
        """Nothing is in flight."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Return an event that is already complete."""
        return event or CpuEvent()


def _tracker_add(tracker: Any, name: str, seed: int) -> None:
    """Do what `CudaRNGStatesTracker.add` does, with a state of the CPU's generator instead of the GPU's."""
    if seed in tracker.seeds_ or name in tracker.states_:
        raise ValueError(f"random state {name!r} or seed {seed} is already tracked (states: {sorted(tracker.states_)}); reset the tracker")
    tracker._is_initialized = True
    tracker.seeds_.add(seed)
    tracker.states_[name] = torch.Generator().manual_seed(seed).get_state()


@contextlib.contextmanager
def _tracker_fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Do what `CudaRNGStatesTracker.fork` does, on the CPU's generator: use the named state inside, and the outer one again afterwards."""
    if name not in tracker.states_:
        raise ValueError(
            f"random state {name!r} is not tracked (states: {sorted(tracker.states_)}); call model_parallel_cuda_manual_seed first"
        )
    outer = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outer)


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Do what `maybe_move_tensor_to_cpu` does for tensors that are on the CPU already: only change the type."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _patch_torch(patches: Patches) -> None:
    cuda = torch.cuda
    # Megatron-Core allocates with device=torch.cuda.current_device() even under use_cpu_initialization.
    patches.set(cuda, "current_device", lambda: torch.device("cpu"))
    # The alltoall dispatcher, DDP and the shared experts create and compare streams.
    patches.set(cuda, "Stream", CpuStream)
    patches.set(cuda, "Event", CpuEvent)
    patches.set(cuda, "current_stream", lambda device=None: CpuStream())
    patches.set(cuda, "default_stream", lambda device=None: CpuStream())
    patches.set(cuda, "stream", lambda stream: contextlib.nullcontext())
    patches.set(cuda, "synchronize", lambda device=None: None)
    patches.set(torch.Tensor, "record_stream", lambda tensor, stream: None)
    # Megatron-Core's nvtx helpers and schedules push ranges, which the CPU build of PyTorch refuses.
    patches.set(cuda.nvtx, "range_push", lambda message: None)
    patches.set(cuda.nvtx, "range_pop", lambda: None)
    # model_parallel_cuda_manual_seed seeds the GPU's default generator. Here the default generator is the CPU's.
    patches.set(cuda, "manual_seed", lambda seed: torch.manual_seed(seed))


def _patch_megatron(patches: Patches) -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import token_dispatcher

    # Weights and dropout draw from named random states, which Megatron-Core keeps for the GPU's generator only.
    patches.set(CudaRNGStatesTracker, "add", _tracker_add)
    patches.set(CudaRNGStatesTracker, "fork", _tracker_fork)
    # Recomputation saves and restores the GPU's random state beside the CPU's. Here both are the CPU's.
    patches.set(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    patches.set(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    # The alltoall dispatcher converts its splits to arrays, which all_to_all_single needs, only when it copies them from a GPU.
    patches.set(token_dispatcher, "maybe_move_tensor_to_cpu", _move_to_cpu)
    # TransformerEngine needs a GPU.
    patch_modules(patches)


_active: Patches | None = None


def enable_cpu() -> None:
    """Let Megatron-Core train on CPU tensors in this process. Call it before building a model; calling it again changes nothing.

    Raises ValueError where a CUDA device is available, as everything in the process would lose the GPU.
    """
    global _active
    if torch.cuda.is_available():
        raise ValueError(
            f"enable_cpu() found {torch.cuda.device_count()} CUDA device(s); Megatron-Core needs no CPU layer there. "
            "Set CUDA_VISIBLE_DEVICES='' to use the CPU layer all the same"
        )
    if _active is not None:
        return
    patches = Patches()
    try:
        _patch_torch(patches)
        _patch_megatron(patches)
        # Megatron-Core compiles small functions with torch.compile. On the CPU that takes about 17 s in each process and a C++ compiler.
        torch.compiler.set_stance("force_eager")
    except BaseException:
        patches.restore()
        raise
    _active = patches
    _log.info("Megatron-Core runs on CPU tensors in this process (megatron_cpu)")


def disable_cpu() -> None:
    """Put back every symbol that `enable_cpu()` replaced. Does nothing without `enable_cpu()`."""
    global _active
    if _active is not None:
        torch.compiler.set_stance("default")
        _active.restore()
        _active = None
