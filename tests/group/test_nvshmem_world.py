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
from nvshmem_fake import FakeNvshmem, join
from on_ranks import on_ranks

from deepep_moe import nvshmem_module
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.group import nvshmem_world
from deepep_moe.group.settings import Settings
from deepep_moe.testing import run_ranks

REFUSED = "NVSHMEM cannot serve these ranks: "


def refusals(rank, num_ranks, fakes, options):
    """What `join` raises on this rank, and what it called of NVSHMEM. `fakes`: arguments of each rank's module, or why there is none;
    `options`: of `join`, for all ranks or by rank."""
    given = fakes[rank]
    module = given if isinstance(given, str) else FakeNvshmem(**given)
    option = {name: value[rank] if isinstance(value, tuple) else value for name, value in options.items()}
    with pytest.raises(BackendUnavailableError) as info:
        join(rank, num_ranks, module, **option)
    return str(info.value), [] if isinstance(module, str) else module.calls


WORLD_OF_4 = [{"status": 2, "pe": 0, "num_pes": 4}, {"status": 2, "pe": 1, "num_pes": 4}]


@pytest.mark.parametrize(
    ("fakes", "options", "message"),
    [
        pytest.param([{}, "it is not built; install it"], {}, r"on rank 1: it is not built; install it", id="not built"),
        pytest.param(["it is not built"] * 2, {}, r"on ranks 0, 1: it is not built", id="not built anywhere"),
        pytest.param(
            [{}, {"built": (3, 5, 21), "found": (3, 5, 21)}], {},
            r"different versions of NVSHMEM \(rank 0: built for 3.4.5, found 3.4.5, rank 1: built for 3.5.21, found 3.5.21\); install the",
            id="versions of ranks",
        ),
        pytest.param([{}, {}], {"device": (0, None)}, r"on rank 1: this process sees no CUDA device; start it where", id="no device"),
        pytest.param(
            WORLD_OF_4, {},
            r"initialized already, and not for exactly the 2 ranks of this group, 0 to 1 \(its PEs: rank 0: PE 0 of 4, rank 1: PE 1 of 4; "
            r"ranks of the job: 2\)\. A process has one NVSHMEM world: make the Buffer for the group",
            id="another world",
        ),
        pytest.param([{"status": 2, "pe": 0, "num_pes": 2}, {}], {}, r"rank 0: PE 0 of 2, rank 1: none; ranks of", id="one has a world"),
        pytest.param([{"status": 2, "pe": 0, "num_pes": 2}] * 2, {}, r"rank 0: PE 0 of 2, rank 1: PE 0 of 2; ranks of", id="two worlds"),
        pytest.param([{"status": 1}, {}], {}, r"earlier initialization of NVSHMEM in this job ended half-way \(.*: \[1, 0\]\)", id="half"),
        pytest.param([{}, {}], {"heap_bytes": (1024, 2048)}, r" NVSHMEM_SYMMETRIC_SIZE .*\(rank 0: 1024, rank 1: 2048\)", id="heaps"),
    ],
)  # fmt: skip
def test_refused_before_any_call(fakes, options, message):
    first, second = run_ranks(refusals, 2, fakes, options)
    assert first == second and re.match(REFUSED + ".*" + message, first[0]) and first[1] == []


def test_uneven_hosts():
    answers = run_ranks(refusals, 3, [{}] * 3, {"hosts": ["a", "a", "b"]})
    assert (
        answers
        == [(REFUSED + "NVSHMEM needs the same number of ranks on every host, and these have {'a': 2, 'b': 1}; start as many on each", [])]
        * 3
    )


# ---- a new world ----


def makes_world(rank, num_ranks):
    os.environ["NVSHMEM_DISABLE_NVLS"] = "0"
    for name in ("NVSHMEM_DISABLE_MNNVL", "NVSHMEM_SYMMETRIC_SIZE", "NVSHMEM_REMOTE_TRANSPORT"):
        os.environ.pop(name, None)
    module = FakeNvshmem()
    world = join(rank, num_ranks, module, hosts=["a", "a", "b", "b"][:num_ranks], heap_bytes=4096)
    again = join(rank, num_ranks, module, group=dist.new_group(backend="gloo"), hosts=["a"] * num_ranks)  # another group of the same ranks
    assert again.pe_of == world.pe_of and again.variables == {} and again.version == "3.4.5"
    assert os.environ["NVSHMEM_DISABLE_NVLS"] == "0" and os.environ["NVSHMEM_SYMMETRIC_SIZE"] == "4096"
    return world.pe_of, world.variables, module.calls


@pytest.mark.parametrize("num_ranks", (2, 4))
def test_world_is_made_once(num_ranks):
    """PEs need not be ranks. Variables that a user has set stay, and the others are recorded."""
    set_here = {"NVSHMEM_DISABLE_MNNVL": "1", "NVSHMEM_SYMMETRIC_SIZE": "4096"}
    if num_ranks == 2:  # on one host
        set_here["NVSHMEM_REMOTE_TRANSPORT"] = "none"
    for rank, (pe_of, variables, calls) in enumerate(run_ranks(makes_world, num_ranks)):
        assert pe_of == tuple(range(num_ranks - 1, -1, -1)) and variables == set_here
        assert calls == ["unique_id"] * (rank == 0) + ["init", "attach"]


def uses_world_of_job(rank, num_ranks):
    module = FakeNvshmem(status=4, pe=(rank + 1) % num_ranks, num_pes=num_ranks)
    world = join(rank, num_ranks, module)
    return world.pe_of, world.variables, module.calls


def test_world_of_pytorch_is_used():
    assert run_ranks(uses_world_of_job, 2) == [((1, 0), {}, ["attach"])] * 2


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
    module, own = FakeNvshmem(), (0, 1) if rank < 2 else (2, 3)
    for _ in range(2):  # the second time it is there
        assert join(rank % 2, 2, module, group=groups[own]).pe_of == (1, 0)
    across = (0, 3) if rank in (0, 3) else (1, 2)
    with pytest.raises(BackendUnavailableError, match=r"initialized already, and not for exactly .*rank 0: PE \d of 2, rank 1: PE \d of 2"):
        join(across.index(rank), 2, module, group=groups[across])


def fails_to_start(rank, num_ranks, changes, timeout_s):
    module = FakeNvshmem()
    for name, value in changes[rank].items():
        setattr(module, name, value)
    told = []
    for _ in range(2):
        with pytest.raises(BackendUnavailableError) as info:
            join(rank, num_ranks, module, timeout_s=timeout_s)
        told.append(str(info.value))
    return told, module.calls.count("init")


@pytest.mark.parametrize(
    ("changes", "message", "timeout_s"),
    [
        pytest.param([{}, {"init_error": "returned 7"}], "on rank 1: returned 7", 60.0, id="error"),
        pytest.param([{}, {"init_takes_s": 20.0}], "on rank 1: NVSHMEM has not initialized within 3 s; look for a rank", 3.0, id="stall"),
        pytest.param([{"pe_after_init": 1}] * 2, r"NVSHMEM gave the ranks the PEs \[1, 1\], and not each of 0 to 1", 60.0, id="PEs"),
    ],
)  # fmt: skip
def test_failed_initialization(changes, message, timeout_s):
    """All ranks raise the same, and call no NVSHMEM after it."""
    first, second = run_ranks(fails_to_start, 2, changes, timeout_s)
    assert first == second and first[1] == 1
    assert re.match(REFUSED + message, first[0][0])
    assert re.match(REFUSED + r"on ranks 0, 1: NVSHMEM's initialization failed before in this process \(.*" + message, first[0][1])


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


def checks_links(rank, num_ranks):
    module = FakeNvshmem()
    world = join(rank, num_ranks, module)
    assert world.check_links() == []
    module.silent = (0,) if rank == 0 else ()  # PE 0 is the last rank
    lines = world.check_links(2.0)
    kept = world.allocate(8)
    assert sorted(module.sizes.values()) == [8, module.link_bytes(num_ranks)] and kept in module.sizes  # a late word finds its place
    module.check_links = lambda address, timeout_s: (_ for _ in ()).throw(RuntimeError("launch of ping failed"))
    with pytest.raises(BackendUnavailableError, match="on ranks 0, 1, 2: launch of ping failed"):
        world.check_links()
    return lines


def test_links():
    assert run_ranks(checks_links, 3) == [["rank 0 has no word from rank 2 after 2 s"]] * 3


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
    assert re.match(
        r"deepep_moe._nvshmem was built for NVSHMEM 3\.4\.5, and this process has 3\.5\.19 \(.*libnvshmem_host.so.3.*\); "
        r"install NVSHMEM 3\.4, or build",
        newer,
    )
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
    for name, arguments in (("my_pe", ()), ("num_pes", ()), ("allocate", (8,)), ("free", (8,)), ("barrier", ()), ("check_links", (8, 1.0))):
        with pytest.raises(RuntimeError, match=f"{name} needs an initialized NVSHMEM, and its status is 0; call init first"):
            getattr(module, name)(*arguments)
    with pytest.raises(RuntimeError, match="attach needs an initialized NVSHMEM"):
        module.attach(0)
    with pytest.raises(ValueError, match="unique_id has 5 bytes; it must have 128"):
        module.bootstrap(b"short", 0, 1)
    with pytest.raises(ValueError, match="rank is 2 of 2; it must be less"):
        module.bootstrap(bytes(128), 2, 2)
    assert module.status() == 0


def joins_without_gpu(rank, num_ranks):
    module = real_module()
    with pytest.raises(BackendUnavailableError) as info:
        nvshmem_world.join(Settings(num_ranks, rank, 8, 16, 4, 2, 60.0), dist.group.WORLD, hosts=["a"] * 2, device=0, heap_bytes=1 << 20)
    assert module.status() == 0
    return str(info.value)


@needs_module
@needs_no_gpu
def test_real_join_without_gpu():
    """The check of the device comes before NVSHMEM's initialization, so nothing is left half-way."""
    first, second = run_ranks(joins_without_gpu, 2)
    assert first == second and re.match(REFUSED + r"on ranks 0, 1: NVSHMEM needs a CUDA device, and cudaSetDevice\(0\) says: ", first)


def bootstraps(rank, num_ranks):
    """As far as NVSHMEM goes without a GPU: the processes meet."""
    module = real_module()
    ids = [None] * num_ranks
    dist.all_gather_object(ids, module.unique_id() if rank == 0 else None)
    error = ""
    try:
        module.bootstrap(ids[0], rank, num_ranks)
    except RuntimeError as failure:
        error = str(failure)
    status = module.status()
    with pytest.raises(BackendUnavailableError) as info:
        nvshmem_world.join(Settings(num_ranks, rank, 8, 16, 4, 2, 60.0), dist.group.WORLD, hosts=["a"] * 2, device=0, heap_bytes=1 << 20)
    return module.version_found()[:2], error, status, str(info.value)


@needs_module
@needs_no_gpu
def test_real_bootstrap():
    """The processes live, whatever NVSHMEM says of a machine without a GPU."""
    first, second = run_ranks(bootstraps, 2, timeout_s=120)
    assert first == second
    version, error, status, refused = first
    if version == (3, 4):
        assert (error, status) == ("", 1)
        assert re.match(REFUSED + r"an earlier initialization .* half-way \(status by rank: \[1, 1\]\); start the processes again", refused)
    else:  # 3.8 looks for a GPU first
        assert status == 1 or re.match(r"nvshmemx_hostlib_init_attr returned \d+; set NVSHMEM_DEBUG=INFO", error)


@needs_module
@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", (2, pytest.param(4, marks=pytest.mark.slow)))
@on_ranks(timeout_s=300, start_method="spawn")
def test_real_world(rank, num_ranks):
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    settings = Settings(num_ranks, rank, 8, 16, 4, 2, 120.0)
    world = nvshmem_world.join(settings, dist.group.WORLD, hosts=["a"] * num_ranks, device=device, heap_bytes=1 << 28)
    assert sorted(world.pe_of) == list(range(num_ranks)) and world.pe_of[rank] == real_module().my_pe()
    for _ in range(3):  # in memory that was used before
        assert world.check_links() == []
    again = nvshmem_world.join(settings, dist.new_group(backend="gloo"), hosts=["a"] * num_ranks, device=device, heap_bytes=1 << 20)
    assert again.pe_of == world.pe_of and again.variables == {} and world.variables["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    with pytest.raises(BackendUnavailableError, match=r"on ranks? 0.*: NVSHMEM's symmetric heap has no \d+ bytes left"):
        world.allocate(1 << 50)
