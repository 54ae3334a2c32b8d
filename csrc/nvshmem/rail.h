// Declares the kernels that put to other nodes, for the module that does not link NVSHMEM. It may be built by another compiler, so no
// exception crosses the border.
#pragma once

#include <exception>
#include <string>

#include "cuda/rail.h"

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

const RailShim& rail_shim();

const char* launch_rail_send(const LowLatencyRailDispatch& launch, void* stream) noexcept;
const char* launch_rail_weigh(const LowLatencyRailCombine& launch, void* stream) noexcept;
const char* launch_rail_sum(const LowLatencyRailCombine& launch, void* stream) noexcept;
const char* launch_rail_control(const LowLatencyRailControl& launch, void* stream) noexcept;

}  // namespace deepep_moe
