// Manages NVSHMEM in this process: one world, and its symmetric heap. Its errors are std::runtime_error with their number and what to do.
//
// NVSHMEM ends the process if a call comes at the wrong time, so every function here checks `status` first. A "Collective" function is one
// that all PEs must call in the same order; it returns after all have called it.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

namespace deepep_moe::nvshmem {

using Version = std::tuple<int, int, int>;  // major, minor, patch
Version version_built();
Version version_found();  // version of the host library in this process

// Returns 0: not initialized, 1: bootstrapped and not initialized, 2 and more: initialized.
int status();

// Return the id of a new world. Only rank 0 calls it, because the id is bound to an address of its host.
std::string unique_id();

// Runs the first half of `init`. NVSHMEM stays at status 1 if it can use no GPU. Collective.
void bootstrap(const std::string& unique_id, int rank, int num_ranks);

// Create the world of `num_ranks` processes, with `device` for this one. Collective.
void init(const std::string& unique_id, int rank, int num_ranks, int device);

// Make an initialized world, perhaps another library's, known to the kernels of this module.
void attach(int device);

int my_pe();
int num_pes();

// Returns the free memory of this GPU, in bytes, which bounds how much the heap can grow.
int64_t free_bytes();

// Allocate symmetric memory, aligned to 128 bytes and zeroed. Other PEs may write to it once they know that all have it. Collective.
uint64_t allocate(int64_t bytes);
void free(uint64_t address);                // collective
uint64_t mapped(uint64_t address, int pe);  // address in this process of `address` on a PE, if loads of this GPU reach it, else 0
// Returns whether kernels of a GPU see a network card's writes to its memory in the order of writing, without a call of the host.
bool orders_network_writes(int device);

// Wait until everything that this process has put has arrived. It needs no other PE. Returns false past the deadline; then a thread that
// may never end goes on waiting, and so does anything that synchronizes the device.
bool quiet(double timeout_s);

}  // namespace deepep_moe::nvshmem
