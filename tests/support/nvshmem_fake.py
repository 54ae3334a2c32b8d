"""Stands for the module `deepep_moe._nvshmem` in one process: it keeps NVSHMEM's rules and talks to nobody."""

import os
import time

from deepep_moe import nvshmem_module
from deepep_moe.group import nvshmem_world
from deepep_moe.group.settings import Settings

FIRST_ADDRESS = 1 << 40


class FakeNvshmem:
    def __init__(self, *, built=(3, 4, 5), found=(3, 4, 5), status=0, pe=-1, num_pes=0, heap_bytes=1 << 20):
        self.built, self.found, self.now, self.pe, self.num = built, found, status, pe, num_pes
        self.gpu_bytes = 1 << 40
        self.heap_bytes, self.sizes, self.calls, self.next_address = heap_bytes, {}, [], FIRST_ADDRESS
        self.init_error, self.init_takes_s, self.pe_after_init = None, 0.0, None

    def version_built(self):
        return self.built

    def version_found(self):
        return self.found

    def status(self):
        return self.now

    def unique_id(self):
        self.calls.append("unique_id")
        return os.urandom(128)

    def init(self, unique_id, rank, num_ranks, device):
        assert self.now == 0 and len(unique_id) == 128
        self.calls.append("init")
        time.sleep(self.init_takes_s)
        if self.init_error:
            self.now = 1
            raise RuntimeError(self.init_error)
        self.now, self.num = 2, num_ranks
        self.pe = num_ranks - 1 - rank if self.pe_after_init is None else self.pe_after_init

    def attach(self, device):
        assert self.now >= 2
        self.calls.append("attach")

    def my_pe(self):
        assert self.now >= 2, "NVSHMEM ends the process here"
        return self.pe

    def num_pes(self):
        assert self.now >= 2, "NVSHMEM ends the process here"
        return self.num

    def free_bytes(self):
        return self.gpu_bytes

    def allocate(self, num_bytes):
        if num_bytes > self.heap_bytes - sum(self.sizes.values()):
            raise RuntimeError(f"NVSHMEM's symmetric heap has no {num_bytes} bytes left; set NVSHMEM_SYMMETRIC_SIZE higher")
        self.next_address += 128
        self.sizes[self.next_address] = num_bytes
        return self.next_address

    def free(self, address):
        del self.sizes[address]

    def quiet(self, timeout_s):
        self.calls.append("quiet")
        return True


def join(rank, num_ranks, module, *, group=None, timeout_s=60.0, hosts=None, device=0, heap_bytes=1 << 20):
    """`nvshmem_world.join` with `module`, or with the reason why there is none."""
    import torch.distributed as dist

    nvshmem_module.load = lambda: module
    settings = Settings(num_ranks, rank, 8, 16, 4, 2, timeout_s)
    return nvshmem_world.join(settings, group or dist.group.WORLD, hosts=hosts or ["a"] * num_ranks, device=device, heap_bytes=heap_bytes)
