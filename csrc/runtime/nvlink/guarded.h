// Puts the exchange and low-latency calls behind their shims: exceptions are kept, not thrown, as the module that calls may link another
// libstdc++, which could not catch them.
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "runtime/nvlink/exchange.h"
#include "runtime/nvlink/low_latency.h"
#include "runtime/nvlink/shim.h"

namespace deepep_moe {

class Guarded {
public:
    // Rethrow the failure of this thread's latest call, once.
    static void raise_failure() {
        if (const std::exception_ptr failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
    }

protected:
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

class GuardedExchange final : public ExchangeShim, public Guarded {
public:
    explicit GuardedExchange(NvlinkExchange& exchange) : exchange_(exchange) {}
    bool has_failed() noexcept override { return exchange_.has_failed(); }
    int64_t num_calls() noexcept override { return exchange_.num_calls(); }
    bool can_count() noexcept override { return exchange_.can_count(); }
    int64_t dispatch(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, AllocateFunction allocate,
                     void* context) noexcept override {
        return rows_of<&NvlinkExchange::dispatch>(call, mode, numbers, allocate, context);
    }
    int64_t count_late(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, AllocateFunction allocate,
                       void* context) noexcept override {
        return rows_of<&NvlinkExchange::count_late>(call, mode, numbers, allocate, context);
    }
    bool dispatch_cached(const GpuDispatchCall& call, const CallMode& mode) noexcept override {
        return guarded([&] { exchange_.dispatch_cached(call, mode); });
    }
    bool combine(const GpuCombineCall& call, const CallMode& mode) noexcept override {
        return guarded([&] { exchange_.combine(call, mode); });
    }
    bool end_dispatch(const GpuDispatchCall& call, uintptr_t stream) noexcept override {
        return guarded([&] { exchange_.end_dispatch(call, stream); });
    }
    bool end_combine(const GpuCombineCall& call, uintptr_t stream) noexcept override {
        return guarded([&] { exchange_.end_combine(call, stream); });
    }

private:
    template <auto kMethod>
    int64_t rows_of(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, AllocateFunction allocate, void* context) noexcept {
        int64_t num_rows = -1;
        guarded([&] {
            num_rows = (exchange_.*kMethod)(call, mode, numbers, [=](int64_t rows, bool is_guess) {
                if (!allocate(context, rows, is_guess)) throw std::bad_alloc();  // the other module has kept the real error
            });
        });
        return num_rows;
    }

    NvlinkExchange& exchange_;
};

class GuardedLowLatency final : public LowLatencyShim, public Guarded {
public:
    explicit GuardedLowLatency(NvlinkLowLatency& calls) : calls_(calls) {}
    bool is_ready() noexcept override { return !calls_.has_failed() && calls_.masks() == 0; }
    bool dispatch(const LowLatencyDispatchParams& params, bool sends, bool receives, uintptr_t stream) noexcept override {
        return guarded([&] { calls_.dispatch(params, sends, receives, stream); });
    }
    bool combine(const LowLatencyCombineParams& params, bool sends, bool receives, uintptr_t stream) noexcept override {
        return guarded([&] { calls_.combine(params, sends, receives, stream); });
    }

private:
    NvlinkLowLatency& calls_;
};

}  // namespace deepep_moe
