// Launchers of the GPU kernels. All are asynchronous on `stream` (a cudaStream_t) and throw std::runtime_error where CUDA refuses.
#pragma once

#include "common/gpu_params.h"

namespace deepep_moe {

void launch_plan(const GpuPlanParams& params, void* stream);
void launch_dispatch(const GpuDispatchParams& params, void* stream);
void launch_combine(const GpuCombineParams& params, void* stream);

}  // namespace deepep_moe
