// Launches kernels for the module that does not link NVSHMEM. It may be built by another compiler, so no exception crosses the border.
#pragma once

#include <string>

#include "cuda/device/launch.cuh"

namespace deepep_moe {

// Returns nullptr, or why `launcher` has failed.
template <class Launcher>
const char* why_failed(const Launcher& launcher) noexcept {
    static thread_local std::string error;
    try {
        launcher();
        return nullptr;
    } catch (const std::exception& caught) {
        error = caught.what();
        return error.c_str();
    }
}

}  // namespace deepep_moe
