// Stands for csrc/cuda/device/launch.cuh.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cuda_runtime_api.h"

namespace deepep_moe {

inline bool can_start_early(void*) { return false; }
inline bool starts_early() { return false; }

template <auto kKernel, class Params>
void launch(const char*, int blocks, int threads, int64_t shared_bytes, const Params& params, void* stream, bool = false) {
    if (blocks == 0) return;
    emulation::enqueue(static_cast<cudaStream_t>(stream),
                       [=] { emulation::launch(blocks, threads, static_cast<size_t>(shared_bytes), [&] { kKernel(params); }); });
}

template <auto kKernel>
void load() {}

// $DEEPEP_MOE_EMULATED_BLOCKS, or more than a kernel asks for.
template <auto kKernel>
int blocks_per_multiprocessor(int, int64_t) {
    const char* given = std::getenv("DEEPEP_MOE_EMULATED_BLOCKS");
    return given != nullptr ? std::atoi(given) : 1024;
}

}  // namespace deepep_moe
