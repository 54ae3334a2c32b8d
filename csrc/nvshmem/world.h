// NVSHMEM in this process: one world, and its symmetric heap. Errors of NVSHMEM are std::runtime_error with its number and what to do.
//
// NVSHMEM ends the process where a call comes at the wrong time, so every function here looks at `status` first. Collective: all PEs must
// call it, in the same order, and none returns before.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deepep_moe::nvshmem {

struct Version {
    int major, minor, patch;
};
Version version_built();
Version version_found();  // of the host library in this process

// 0: not initialized, 1: bootstrapped and not initialized, 2 and more: initialized.
int status();

// Of a new world; bound to an address of this host, so for rank 0 alone.
std::string unique_id();

// The first half of `init`, which NVSHMEM leaves at status 1 where it can use no GPU. Collective.
void bootstrap(const std::string& unique_id, int rank, int num_ranks);

// Makes the world of `num_ranks` processes, this one with `device`. Collective.
void init(const std::string& unique_id, int rank, int num_ranks, int device);

// Makes an initialized world, which another library may have made, known to the kernels of this module.
void attach(int device);

int my_pe();
int num_pes();

// Memory of this GPU that is free, which bounds what the heap can grow by.
int64_t free_bytes();

// Memory of the symmetric heap, aligned to 128 bytes and zero; other PEs may write to it once they know that all have it. Collective.
uint64_t allocate(int64_t bytes);
void free(uint64_t address);                // collective
uint64_t mapped(uint64_t address, int pe);  // what lies at `address` on a PE, where loads of this GPU reach it, else 0
// Do kernels of a GPU see what a network card writes to its memory in the order in which it is written, without a call of the host?
bool orders_network_writes(int device);
void barrier();  // collective, without a deadline

// Waits until what this process has put has arrived: its kernels first, then the network. Needs no other PE. False: not within the
// deadline; it is waited for all the same by a thread that may never end, and with it whatever synchronizes the device.
bool quiet(double timeout_s);

// Sends a word from every PE to every other one; returns a PingState for each PE. `address`: `ping_bytes(num_pes())` from `allocate`, which
// no earlier call has used. Collective.
std::vector<int> check_links(uint64_t address, double timeout_s);

}  // namespace deepep_moe::nvshmem
