// Offers GPU calls to a module that does not link them (csrc/torch). It may be built by another compiler, so no exception crosses the
// border. A failure is kept, and `raise_failure` of the Python object raises it on the same thread.
#pragma once

#include "common/gate.h"
#include "common/low_latency.h"
#include "cuda/dense_routing.h"
#include "runtime/nvlink/call.h"

namespace deepep_moe {

class ExchangeShim {
public:
    // The other module allocates by this. It returns false if it has failed, and keeps the reason.
    using AllocateFunction = bool (*)(void* context, int64_t num_rows, bool is_guess) noexcept;

    virtual bool has_failed() noexcept = 0;    // whether kernels have reported a failure
    virtual int64_t num_calls() noexcept = 0;  // entered or refused so far
    // NvlinkExchange describes these calls. They return -1 or false if they fail.
    virtual int64_t dispatch(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, AllocateFunction allocate,
                             void* context) noexcept = 0;
    virtual bool can_count() noexcept = 0;
    virtual int64_t count_late(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, AllocateFunction allocate,
                               void* context) noexcept = 0;
    virtual bool dispatch_cached(const GpuDispatchCall& call, const CallMode& mode) noexcept = 0;
    virtual bool combine(const GpuCombineCall& call, const CallMode& mode) noexcept = 0;
    virtual bool end_dispatch(const GpuDispatchCall& call, uintptr_t stream) noexcept = 0;
    virtual bool end_combine(const GpuCombineCall& call, uintptr_t stream) noexcept = 0;

protected:
    ~ExchangeShim() = default;
};

class LowLatencyShim {
public:
    virtual bool is_ready() noexcept = 0;  // kernels have reported no failure, and no rank is masked
    // The next two call NvlinkLowLatency and return false if it fails.
    virtual bool dispatch(const LowLatencyDispatchParams& params, bool sends, bool receives, uintptr_t stream) noexcept = 0;
    virtual bool combine(const LowLatencyCombineParams& params, bool sends, bool receives, uintptr_t stream) noexcept = 0;

protected:
    ~LowLatencyShim() = default;
};

// Calls the gate. If a function returns false, the call was not made, and `_C.gpu_gate_check` raises the reason on the same thread.
struct GateShim {
    bool (*forward)(GpuGateParams params, uintptr_t stream) noexcept;  // without `failure`
    bool (*backward)(const GpuGateBackwardParams& params, uintptr_t stream) noexcept;
    bool (*is_capturing)(uintptr_t stream) noexcept;
};

// Calls grouped experts. A function returns false if the kernel could not be launched.
struct ExpertShim {
    bool (*forward)(const GpuSwigluParams& params, uintptr_t stream) noexcept;
    bool (*backward)(const GpuSwigluParams& params, uintptr_t stream) noexcept;
    bool (*add_weight_gradients)(const GpuWeightGradientParams& params, uintptr_t stream) noexcept;  // false on other GPUs than Hopper too
};

// Calls dense routing. A function returns false if the kernel could not be launched.
struct DenseRoutingShim {
    bool (*lanes_of_map)(const LanesOfMapParams& params, uintptr_t stream) noexcept;
    bool (*dense_of_lanes)(const DenseOfLanesParams& params, uintptr_t stream) noexcept;
    bool (*count_lanes)(const CountLanesParams& params, uintptr_t stream) noexcept;
};

// Kernels of one GPU.
struct KernelShim {
    GateShim gate;
    ExpertShim experts;
    DenseRoutingShim dense_routing;
};

// Names of the capsules that hold a pointer to a shim, with a number that is raised when the shim changes. kShimBytes tells modules of
// different sources apart.
constexpr const char* kShimName = "deepep_moe.ExchangeShim 5";
constexpr const char* kLowLatencyShimName = "deepep_moe.LowLatencyShim 3";
constexpr const char* kKernelShimName = "deepep_moe.KernelShim 1";
constexpr size_t kShimBytes = sizeof(GpuDispatchCall) + sizeof(GpuCombineCall) + sizeof(CombineOptions) + sizeof(CallMode) +
                              sizeof(LowLatencyDispatchParams) + sizeof(LowLatencyCombineParams) + sizeof(GpuGateParams) +
                              sizeof(GpuGateBackwardParams) + sizeof(GpuSwigluParams) + sizeof(GpuWeightGradientParams) +
                              sizeof(LanesOfMapParams) + sizeof(DenseOfLanesParams) + sizeof(CountLanesParams) + sizeof(KernelShim);

}  // namespace deepep_moe
