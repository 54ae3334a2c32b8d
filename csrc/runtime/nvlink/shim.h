// Offers GPU calls to a module that does not link them (csrc/torch). It may be built by another compiler, so no exception crosses the
// border. A failure is kept, and `raise_failure` of the Python object raises it on the same thread. A capsule that holds a pointer to a
// shim has its `kName`, with a number that is raised when the shim changes.
#pragma once

#include "common/gate.h"
#include "common/low_latency.h"
#include "common/tensor_arg.h"
#include "runtime/nvlink/call.h"

namespace deepep_moe {

class ExchangeShim {
public:
    static constexpr const char* kName = "deepep_moe.ExchangeShim 7";
    // The other module allocates by this. It returns false if it has failed, and keeps the reason.
    using AllocateFunction = bool (*)(void* context, int64_t num_rows, bool is_guess) noexcept;

    virtual const GpuWorkspaceConfig& sizes() noexcept = 0;
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
    virtual bool end(const GpuDispatchCall& call, uintptr_t stream) noexcept = 0;
    virtual bool end(const GpuCombineCall& call, uintptr_t stream) noexcept = 0;

protected:
    ~ExchangeShim() = default;
};

class LowLatencyShim {
public:
    static constexpr const char* kName = "deepep_moe.LowLatencyShim 4";
    virtual const LowLatencyConfig& sizes() noexcept = 0;
    virtual int64_t bytes_of_handle() noexcept = 0;
    virtual bool is_ready() noexcept = 0;  // kernels have reported no failure, and no rank is masked
    // The next two make halves of a call of NvlinkLowLatency, and return false if that fails.
    virtual bool make(const LowLatencyDispatchParams& params, bool sends, bool receives, uintptr_t stream) noexcept = 0;
    virtual bool make(const LowLatencyCombineParams& params, bool sends, bool receives, uintptr_t stream) noexcept = 0;

protected:
    ~LowLatencyShim() = default;
};

// Launches kernels of one GPU. A function returns false if a kernel could not be launched. Then `_C.gpu_gate_check` raises the reason of a
// gate on the same thread.
struct KernelShim {
    static constexpr const char* kName = "deepep_moe.KernelShim 2";
    bool (*gate)(GpuGateParams params, uintptr_t stream) noexcept;  // without `failure`
    bool (*gate_backward)(const GpuGateBackwardParams& params, uintptr_t stream) noexcept;
    bool (*is_capturing)(uintptr_t stream) noexcept;
    bool (*swiglu)(const GpuSwigluParams& params, uintptr_t stream) noexcept;
    bool (*swiglu_backward)(const GpuSwigluParams& params, uintptr_t stream) noexcept;
    bool (*add_weight_gradients)(const GpuWeightGradientParams& params, uintptr_t stream) noexcept;  // false on other GPUs than Hopper too
    bool (*lanes_of_map)(const LanesOfMapParams& params, uintptr_t stream) noexcept;
    bool (*dense_of_lanes)(const DenseOfLanesParams& params, uintptr_t stream) noexcept;
    bool (*count_lanes)(const CountLanesParams& params, uintptr_t stream) noexcept;
};

inline GpuSwigluParams swiglu_of(const TensorArg& inner, const TensorArg& probs, const TensorArg& group_ends, const TensorArg& y,
                                 DType dtype) {
    GpuSwigluParams params{};
    params.num_rows = inner.num_rows;
    params.num_columns = inner.num_columns / 2;
    params.dtype = dtype;
    params.group_ends = group_ends.as<const int*>();
    params.num_groups = group_ends.num_rows;
    params.inner = inner.as<const std::byte*>();
    params.probs = probs.as<const float*>();
    params.y = y.as<std::byte*>();
    return params;
}

inline GpuWeightGradientParams weight_gradients_of(const TensorArg& grads, const TensorArg& rows, const TensorArg& group_ends,
                                                   const TensorArg& sums) {
    return {grads.num_rows,
            static_cast<int>(grads.num_columns),
            static_cast<int>(rows.num_columns),
            static_cast<int>(group_ends.num_rows),
            grads.as<const std::byte*>(),
            rows.as<const std::byte*>(),
            group_ends.as<const int*>(),
            sums.as<float*>()};
}

// Tells modules of different sources apart.
constexpr size_t kShimBytes = sizeof(GpuDispatchCall) + sizeof(GpuCombineCall) + sizeof(CombineOptions) + sizeof(CallMode) +
                              sizeof(LowLatencyDispatchParams) + sizeof(LowLatencyCombineParams) + sizeof(GpuGateParams) +
                              sizeof(GpuGateBackwardParams) + sizeof(GpuSwigluParams) + sizeof(GpuWeightGradientParams) +
                              sizeof(LanesOfMapParams) + sizeof(DenseOfLanesParams) + sizeof(CountLanesParams) + sizeof(KernelShim) +
                              sizeof(GpuWorkspaceConfig) + sizeof(LowLatencyConfig);

}  // namespace deepep_moe
