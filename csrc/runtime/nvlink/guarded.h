// Makes the exchange and low-latency calls by their shims: exceptions are kept, not thrown, because the module that calls may link another
// libstdc++, which could not catch them.
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "runtime/nvlink/exchange.h"
#include "runtime/nvlink/low_latency.h"
#include "runtime/nvlink/shim.h"

namespace deepep_moe {

// Makes calls of `Of`.
template <class Of>
class Guarded {
public:
    // Rethrow the failure of this thread's latest call, once.
    static void raise_failure() {
        if (const std::exception_ptr failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
    }

    // Returns false if `call` has failed.
    template <class Call>
    static bool guarded(const Call& call) noexcept {
        failure_ = nullptr;
        try {
            call();
            return true;
        } catch (...) {
            failure_ = std::current_exception();
            return false;
        }
    }

private:
    // Each thread has its own, because two threads may be in calls of one buffer, and then one of them gets the error.
    static inline thread_local std::exception_ptr failure_;
};

class GuardedExchange final : public NvlinkExchange, public ExchangeShim, public Guarded<NvlinkExchange> {
public:
    using Shim = ExchangeShim;
    using NvlinkExchange::NvlinkExchange;
    const GpuWorkspaceConfig& sizes() noexcept override { return config(); }
    bool has_failed() noexcept override { return NvlinkExchange::has_failed(); }
    int64_t num_calls() noexcept override { return NvlinkExchange::num_calls(); }
    bool can_count() noexcept override { return NvlinkExchange::can_count(); }
    int64_t dispatch(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, AllocateFunction allocate,
                     void* context) noexcept override {
        return rows_of<&NvlinkExchange::dispatch>(call, mode, numbers, allocate, context);
    }
    int64_t count_late(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, AllocateFunction allocate,
                       void* context) noexcept override {
        return rows_of<&NvlinkExchange::count_late>(call, mode, numbers, allocate, context);
    }
    bool dispatch_cached(const GpuDispatchCall& call, const CallMode& mode) noexcept override {
        return guarded([&] { NvlinkExchange::dispatch_cached(call, mode); });
    }
    bool combine(const GpuCombineCall& call, const CallMode& mode) noexcept override {
        return guarded([&] { NvlinkExchange::combine(call, mode); });
    }
    bool end(const GpuDispatchCall& call, uintptr_t stream) noexcept override {
        return guarded([&] { NvlinkExchange::end(call, stream); });
    }
    bool end(const GpuCombineCall& call, uintptr_t stream) noexcept override {
        return guarded([&] { NvlinkExchange::end(call, stream); });
    }

private:
    template <auto kMethod>
    int64_t rows_of(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, AllocateFunction allocate, void* context) noexcept {
        int64_t num_rows = -1;
        guarded([&] {
            num_rows = (this->*kMethod)(call, mode, numbers, [=](int64_t rows, bool is_guess) {
                if (!allocate(context, rows, is_guess)) throw std::bad_alloc();  // the other module has kept the real error
            });
        });
        return num_rows;
    }
};

class GuardedLowLatency final : public NvlinkLowLatency, public LowLatencyShim, public Guarded<NvlinkLowLatency> {
public:
    using Shim = LowLatencyShim;
    using NvlinkLowLatency::NvlinkLowLatency;
    const LowLatencyConfig& sizes() noexcept override { return config(); }
    int64_t bytes_of_handle() noexcept override { return handle_bytes(); }
    bool is_ready() noexcept override { return !has_failed() && masks() == 0; }
    bool make(const LowLatencyDispatchParams& params, bool sends, bool receives, uintptr_t stream) noexcept override {
        return guarded([&] { NvlinkLowLatency::make(params, sends, receives, stream); });
    }
    bool make(const LowLatencyCombineParams& params, bool sends, bool receives, uintptr_t stream) noexcept override {
        return guarded([&] { NvlinkLowLatency::make(params, sends, receives, stream); });
    }
};

}  // namespace deepep_moe
