// The exchange for a module that does not link it (csrc/torch): another compiler's run, so nothing is thrown across the border. What failed
// is kept, and `raise_failure` of the Python object raises it.
#pragma once

#include "runtime/nvlink/call.h"

namespace deepep_moe {

class ExchangeShim {
public:
    // Calls `allocate(context, num_rows, is_guess)` of the other module; false where it failed, and has kept why.
    using AllocateFunction = bool (*)(void* context, int64_t num_rows, bool is_guess) noexcept;

    virtual bool has_failed() noexcept = 0;    // by what kernels have reported
    virtual int64_t num_calls() noexcept = 0;  // entered or refused so far
    // As of NvlinkExchange; -1 or false where something failed.
    virtual int64_t dispatch(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, AllocateFunction allocate,
                             void* context) noexcept = 0;
    virtual bool dispatch_cached(const GpuDispatchCall& call, const CallMode& mode) noexcept = 0;
    virtual bool combine(const GpuCombineCall& call, const CallMode& mode) noexcept = 0;

protected:
    ~ExchangeShim() = default;
};

// Of the capsule that holds an `ExchangeShim*`, with a number that counts changes of it; and a size by which modules of different sources
// are told apart.
constexpr const char* kShimName = "deepep_moe.ExchangeShim 3";
constexpr size_t kShimBytes = sizeof(GpuDispatchCall) + sizeof(GpuCombineCall) + sizeof(CallMode);

}  // namespace deepep_moe
