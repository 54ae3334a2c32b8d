// Declares the kernels that put to other nodes, for the module that does not link NVSHMEM.
#pragma once

#include "cuda/low_latency_rail.h"
#include "cuda/rail.h"

namespace deepep_moe {

const RailShim& rail_shim();

const char* launch_rail_send(const LowLatencyRailDispatch& launch, void* stream) noexcept;
const char* launch_rail_weigh(const LowLatencyRailCombine& launch, void* stream) noexcept;
const char* launch_rail_sum(const LowLatencyRailCombine& launch, void* stream) noexcept;
const char* launch_rail_control(const LowLatencyRailControl& launch, void* stream) noexcept;
const LowLatencyRailShim& low_latency_rail_shim();

}  // namespace deepep_moe
