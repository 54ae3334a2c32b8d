// NvlinkExchange behind the shim: exceptions are kept, not thrown.
#pragma once

#include <exception>

#include "runtime/nvlink/exchange.h"
#include "runtime/nvlink/shim.h"

namespace deepep_moe {

class GuardedExchange final : public ExchangeShim {
public:
    explicit GuardedExchange(NvlinkExchange& exchange) : exchange_(exchange) {}
    bool has_failed() noexcept override { return exchange_.has_failed(); }
    int64_t num_calls() noexcept override { return exchange_.num_calls(); }
    int64_t dispatch(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, AllocateFunction allocate,
                     void* context) noexcept override;
    bool dispatch_cached(const GpuDispatchCall& call, const CallMode& mode) noexcept override;
    bool combine(const GpuCombineCall& call, const CallMode& mode) noexcept override;

    void raise_failure();  // of the latest call, if it failed, once

private:
    template <class Call>
    bool guarded(const Call& call) noexcept;

    NvlinkExchange& exchange_;
    std::exception_ptr failure_;
};

}  // namespace deepep_moe
