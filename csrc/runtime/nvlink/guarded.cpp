#include "runtime/nvlink/guarded.h"

#include <new>

namespace deepep_moe {

static Allocate allocating(ExchangeShim::AllocateFunction allocate, void* context) {
    return [=](int64_t rows, bool is_guess) {
        if (!allocate(context, rows, is_guess)) throw std::bad_alloc();  // the other module has kept the real error
    };
}

int64_t GuardedExchange::dispatch(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, AllocateFunction allocate,
                                  void* context) noexcept {
    int64_t num_rows = -1;
    guarded([&] { num_rows = exchange_.dispatch(call, mode, numbers, allocating(allocate, context)); });
    return num_rows;
}

int64_t GuardedExchange::count_late(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, AllocateFunction allocate,
                                    void* context) noexcept {
    int64_t num_rows = -1;
    guarded([&] { num_rows = exchange_.count_late(call, mode, numbers, allocating(allocate, context)); });
    return num_rows;
}

bool GuardedExchange::dispatch_cached(const GpuDispatchCall& call, const CallMode& mode) noexcept {
    return guarded([&] { exchange_.dispatch_cached(call, mode); });
}

bool GuardedExchange::combine(const GpuCombineCall& call, const CallMode& mode) noexcept {
    return guarded([&] { exchange_.combine(call, mode); });
}

bool GuardedExchange::end_dispatch(const GpuDispatchCall& call, uintptr_t stream) noexcept {
    return guarded([&] { exchange_.end_dispatch(call, stream); });
}

bool GuardedExchange::end_combine(const GpuCombineCall& call, uintptr_t stream) noexcept {
    return guarded([&] { exchange_.end_combine(call, stream); });
}

bool GuardedLowLatency::dispatch(const LowLatencyDispatchParams& params, bool sends, bool receives, uintptr_t stream) noexcept {
    return guarded([&] { calls_.dispatch(params, sends, receives, stream); });
}

bool GuardedLowLatency::combine(const LowLatencyCombineParams& params, bool sends, bool receives, uintptr_t stream) noexcept {
    return guarded([&] { calls_.combine(params, sends, receives, stream); });
}

}  // namespace deepep_moe
