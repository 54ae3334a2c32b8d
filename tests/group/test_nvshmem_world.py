"""NVSHMEM's world: what all ranks refuse together, before NVSHMEM could end a process or wait forever; and the real module, where it is
built."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fault_cases import outcome
from nvshmem_fake import FakeNvshmem, join
from on_ranks import on_ranks

from deepep_moe import nvshmem_module
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.group import nvshmem_world
from deepep_moe.group.settings import Settings

REFUSED = "NVSHMEM cannot serve these ranks: "


def refused_by_all(rank, num_ranks, message, join_or_allocate, *args, **options):
    """All ranks raise the same."""
    with pytest.raises(BackendUnavailableError) as info:
        join_or_allocate(*args, **options)
    messages = [None] * num_ranks
    dist.all_gather_object(messages, str(info.value))
    assert messages == [messages[0]] * num_ranks and re.match(REFUSED + ".*" + message, messages[0]), (message, messages)


def has_world(pe, num_pes):
    return {"status": 2, "pe": pe, "num_pes": num_pes}


# Arguments of each rank's module, or why there is none; options of `join`, for all ranks or by rank; a piece of the message.
REFUSALS = (
    ([{}, "it is not built; install it"], {}, "on rank 1: it is not built; install it"),
    (["it is not built"] * 2, {}, "on ranks 0, 1: it is not built"),
    (
        [{}, {"built": (3, 5, 21), "found": (3, 5, 21)}],
        {},
        r"\(rank 0: built for 3.4.5, found 3.4.5, rank 1: built for 3.5.21, found 3.5.21\)",
    ),
    ([{}, {}], {"device": (0, None)}, "on rank 1: this process sees no CUDA device"),
    ([has_world(0, 4), has_world(1, 4)], {}, r"initialized already, .* PE 0 of 4, rank 1: PE 1 of 4; ranks of the job: 2\)"),
    ([has_world(0, 2), {}], {}, "rank 0: PE 0 of 2, rank 1: none; ranks of"),
    ([has_world(0, 2)] * 2, {}, "rank 0: PE 0 of 2, rank 1: PE 0 of 2; ranks of"),
    ([{"status": 1}, {}], {}, r"earlier initialization of NVSHMEM in this job ended half-way \(.*: \[1, 0\]\)"),
    ([{}, {}], {"heap_bytes": (1024, 2048)}, r" NVSHMEM_SYMMETRIC_SIZE .*\(rank 0: 1024, rank 1: 2048\)"),
)


@on_ranks(2)
def test_refused_before_any_call(rank, num_ranks):
    for fakes, options, message in REFUSALS:
        module = fakes[rank] if isinstance(fakes[rank], str) else FakeNvshmem(**fakes[rank])
        option = {name: value[rank] for name, value in options.items()}
        refused_by_all(rank, num_ranks, message, join, rank, num_ranks, module, **option)
        assert isinstance(module, str) or module.calls == []


@on_ranks(3)
def test_uneven_hosts(rank, num_ranks):
    message, module = "the same number of ranks on every host, and these have {'a': 2, 'b': 1}", FakeNvshmem()
    refused_by_all(rank, num_ranks, message, join, rank, num_ranks, module, hosts=["a", "a", "b"])
    assert module.calls == []


# ---- a new world ----


@on_ranks((2, 4))
def test_world_is_made_once(rank, num_ranks):
    """PEs need not be ranks. Variables that a user has set stay, and the others are recorded."""
    os.environ["NVSHMEM_DISABLE_NVLS"] = "0"
    for name in ("NVSHMEM_DISABLE_MNNVL", "NVSHMEM_SYMMETRIC_SIZE", "NVSHMEM_REMOTE_TRANSPORT"):
        os.environ.pop(name, None)
    module = FakeNvshmem()
    world = join(rank, num_ranks, module, hosts=["a", "a", "b", "b"][:num_ranks], heap_bytes=4096)
    again = join(rank, num_ranks, module, group=dist.new_group(backend="gloo"), hosts=["a"] * num_ranks)  # another group of the same ranks
    assert again.pe_of == world.pe_of and again.variables == {} and again.version == "3.4.5"
    assert os.environ["NVSHMEM_DISABLE_NVLS"] == "0" and os.environ["NVSHMEM_SYMMETRIC_SIZE"] == "4096"
    set_here = {"NVSHMEM_DISABLE_MNNVL": "1", "NVSHMEM_SYMMETRIC_SIZE": "4096"}
    if num_ranks == 2:  # on one host
        set_here["NVSHMEM_REMOTE_TRANSPORT"] = "none"
    assert world.pe_of == tuple(range(num_ranks - 1, -1, -1)) and world.variables == set_here
    assert module.calls == ["unique_id"] * (rank == 0) + ["init", "attach"]


@on_ranks(2)
def test_world_of_pytorch_is_used(rank, num_ranks):
    module = FakeNvshmem(status=4, pe=(rank + 1) % num_ranks, num_pes=num_ranks)
    world = join(rank, num_ranks, module)
    assert (world.pe_of, world.variables, module.calls) == ((1, 0), {}, ["attach"])


@on_ranks(4)
def test_world_that_may_be_another_ones(rank):
    """Two PEs of two, as they should be, but of worlds that this module has not made: nothing shows that it is one."""
    pair = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])][rank // 2]
    with pytest.raises(BackendUnavailableError, match=r"not for exactly the 2 ranks .*PE 0 of 2, rank 1: PE 1 of 2; ranks of the job: 4"):
        join(rank % 2, 2, FakeNvshmem(status=2, pe=rank % 2, num_pes=2), group=pair)


@on_ranks(4)
def test_worlds_of_parts_of_a_job(rank):
    """Each pair has its world; a pair of processes of both has PEs of the right numbers, and no world."""
    groups = {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in ((0, 1), (2, 3), (0, 3), (1, 2))}
    module, pair = FakeNvshmem(), (0, 1) if rank < 2 else (2, 3)
    for _ in range(2):  # the second time it is there
        assert join(rank % 2, 2, module, group=groups[pair]).pe_of == (1, 0)
    across = (0, 3) if rank in (0, 3) else (1, 2)
    with pytest.raises(BackendUnavailableError, match=r"initialized already, and not for exactly .*rank 0: PE \d of 2, rank 1: PE \d of 2"):
        join(across.index(rank), 2, module, group=groups[across])


@pytest.mark.parametrize(
    ("changes", "message", "timeout_s"),
    [
        pytest.param([{}, {"init_error": "returned 7"}], "on rank 1: returned 7", 60.0, id="error"),
        pytest.param([{}, {"init_takes_s": 20.0}], "on rank 1: NVSHMEM has not initialized within 3 s", 3.0, id="stall"),
        pytest.param([{"pe_after_init": 1}] * 2, r"NVSHMEM gave the ranks the PEs \[1, 1\], and not each of 0 to 1", 60.0, id="PEs"),
    ],
)
@on_ranks(2)
def test_failed_initialization(rank, num_ranks, changes, message, timeout_s):
    """All ranks raise the same, and call no NVSHMEM after it."""
    module = FakeNvshmem()
    for name, value in changes[rank].items():
        setattr(module, name, value)
    refused_by_all(rank, num_ranks, message, join, rank, num_ranks, module, timeout_s=timeout_s)
    again = r"on ranks 0, 1: NVSHMEM's initialization failed before in this process \(.*" + message
    refused_by_all(rank, num_ranks, again, join, rank, num_ranks, module, timeout_s=timeout_s)
    assert module.calls.count("init") == 1


# ---- the symmetric heap ----


@on_ranks(2)
def test_symmetric_memory(rank, num_ranks):
    module = FakeNvshmem(heap_bytes=1000)
    world = join(rank, num_ranks, module)
    with pytest.raises(BackendUnavailableError, match=r"different sizes of symmetric memory, in bytes \(rank 0: 100, rank 1: 101\)"):
        world.allocate(100 + rank)
    first, second = world.allocate(400), world.allocate(500)
    with pytest.raises(BackendUnavailableError, match=r"on ranks 0, 1: NVSHMEM's symmetric heap has no 400 bytes left; set NVSHMEM_SYMM"):
        world.allocate(400)
    world.free(first)
    with pytest.raises(ValueError, match="address is 0x.*that is not free"):
        world.free(first)
    if rank == 0:
        world.free(second)  # the other rank still has it
    assert module.sizes == {first: 400, second: 500}
    third = world.allocate(450)
    assert module.sizes == {second: 500, third: 450}
    module.heap_bytes = 2000 if rank == 0 else 1000
    with pytest.raises(BackendUnavailableError, match="on rank 1: NVSHMEM's symmetric heap has no 600 bytes left"):
        world.allocate(600)
    if rank == 1:
        world.free(second)
    world.free(third)
    module.heap_bytes = 2000
    last = join(rank, num_ranks, module).allocate(10)  # of another buffer
    assert last in module.sizes and second not in module.sizes and third not in module.sizes


# ---- the module ----


def test_reasons_not_to_load(monkeypatch):
    def why_not(**values):
        monkeypatch.setitem(sys.modules, "deepep_moe._nvshmem", SimpleNamespace(**values) if values else None)
        return nvshmem_module.load()

    monkeypatch.setattr(nvshmem_module, "is_built", lambda: False)
    assert why_not().startswith("the module deepep_moe._nvshmem is not built; install NVSHMEM (pip install nvidia-nvshmem-cu13==3.4.5")
    monkeypatch.setattr(nvshmem_module, "is_built", lambda: True)
    assert re.match(r"the module deepep_moe._nvshmem does not load with .*libnvshmem_host.so.3.*: .*; install NVSHMEM", why_not())
    newer = why_not(version_built=lambda: (3, 4, 5), version_found=lambda: (3, 5, 19))
    assert "was built for NVSHMEM 3.4.5, and this process has 3.5.19 " in newer and "install NVSHMEM 3.4, or build" in newer
    patched = why_not(version_built=lambda: (3, 4, 5), version_found=lambda: (3, 4, 6))
    assert patched is sys.modules["deepep_moe._nvshmem"]


def test_library_of_home(monkeypatch, tmp_path):
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    assert nvshmem_module._candidates() == [tmp_path / "lib" / "libnvshmem_host.so.3"]


needs_module = pytest.mark.skipif(
    not nvshmem_module.is_built(), reason="deepep_moe._nvshmem is not built: no NVSHMEM or no nvcc at build time"
)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what NVSHMEM does without a GPU")


def real_module():
    module = nvshmem_module.load()
    assert not isinstance(module, str), module
    return module


@needs_module
def test_real_module_is_apart():
    """It exports nothing that another module's NVSHMEM could take for its own, and links neither PyTorch nor CUDA's shared libraries."""
    file = real_module().__file__
    exported = subprocess.run(["nm", "-D", "--defined-only", file], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in exported.splitlines()] == ["PyInit__nvshmem"]
    needed = subprocess.run(["readelf", "-d", file], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", needed))
    assert "libnvshmem_host.so.3" in needed
    assert needed <= {"libnvshmem_host.so.3", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}, needed


@needs_module
@on_ranks(1)
def test_real_calls_too_early(rank):
    """NVSHMEM itself ends the process for each of these."""
    module = real_module()
    assert module.version_built()[:2] == module.version_found()[:2] and module.status() == 0
    for name, arguments in (("my_pe", ()), ("num_pes", ()), ("allocate", (8,)), ("free", (8,))):
        with pytest.raises(RuntimeError, match=f"{name} needs an initialized NVSHMEM, and its status is 0; call init first"):
            getattr(module, name)(*arguments)
    with pytest.raises(RuntimeError, match="attach needs an initialized NVSHMEM"):
        module.attach(0)
    with pytest.raises(ValueError, match="unique_id has 5 bytes; it must have 128"):
        module.bootstrap(b"short", 0, 1)
    with pytest.raises(ValueError, match="rank is 2 of 2; it must be less"):
        module.bootstrap(bytes(128), 2, 2)
    assert module.status() == 0


def join_really(rank, num_ranks, group=None, timeout_s=60.0, device=0, heap_bytes=1 << 20):
    settings = Settings(num_ranks, rank, 8, 16, 4, 2, timeout_s)
    return nvshmem_world.join(settings, group or dist.group.WORLD, hosts=["a"] * num_ranks, device=device, heap_bytes=heap_bytes)


@needs_module
@needs_no_gpu
@on_ranks(2)
def test_real_join_without_gpu(rank, num_ranks):
    """The check of the device comes before NVSHMEM's initialization, so nothing is left half-way."""
    message = r"on ranks 0, 1: NVSHMEM needs a CUDA device, and cudaSetDevice\(0\) says: "
    refused_by_all(rank, num_ranks, message, join_really, rank, num_ranks)
    assert real_module().status() == 0


@needs_module
@needs_no_gpu
@on_ranks(2, timeout_s=120)
def test_real_bootstrap(rank, num_ranks):
    """Run NVSHMEM as far as it goes without a GPU: the processes meet and survive any error of it."""
    module, ids = real_module(), [None] * num_ranks
    dist.all_gather_object(ids, module.unique_id() if rank == 0 else None)
    error, _ = outcome(lambda: module.bootstrap(ids[0], rank, num_ranks))
    if module.version_found()[:2] == (3, 4):
        assert (error, module.status()) == (None, 1)
        message = r"an earlier initialization .* half-way \(status by rank: \[1, 1\]\)"
    else:  # 3.8 looks for a GPU first
        assert module.status() == 1 or re.match(r"nvshmemx_hostlib_init_attr returned \d+; set NVSHMEM_DEBUG=INFO", str(error))
        message = ""
    refused_by_all(rank, num_ranks, message, join_really, rank, num_ranks)


@needs_module
@pytest.mark.gpu
@on_ranks((2, pytest.param(4, marks=pytest.mark.slow)), timeout_s=300, start_method="spawn")
def test_real_world(rank, num_ranks):
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    world = join_really(rank, num_ranks, timeout_s=120.0, device=device, heap_bytes=1 << 28)
    assert sorted(world.pe_of) == list(range(num_ranks)) and world.pe_of[rank] == real_module().my_pe()
    again = join_really(rank, num_ranks, dist.new_group(backend="gloo"), 120.0, device)
    assert again.pe_of == world.pe_of and again.variables == {} and world.variables["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    with pytest.raises(BackendUnavailableError, match=r"on ranks? 0.*: NVSHMEM's symmetric heap has no \d+ bytes left"):
        world.allocate(1 << 50)
