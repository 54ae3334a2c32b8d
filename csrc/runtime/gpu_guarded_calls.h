// The calls of a communicator for modules that it must not throw into.
#pragma once

#include <exception>

#include "common/gpu_calls.h"

namespace deepep_moe {

class GpuCommunicator;

class GpuGuardedCalls final : public GpuCalls {
public:
    explicit GpuGuardedCalls(GpuCommunicator& communicator) : communicator_(communicator) {}
    bool has_failed() noexcept override;
    int64_t num_calls() noexcept override;
    int64_t dispatch(const GpuDispatchCall& call, int num_sms, uintptr_t stream, int64_t* numbers) noexcept override;
    void abandon() noexcept override;
    bool end_dispatch(const GpuDispatchCall& call, uintptr_t stream) noexcept override;
    bool dispatch_cached(const GpuDispatchCall& call, int num_sms, uintptr_t stream) noexcept override;
    bool combine(const GpuCombineCall& call, int num_sms, uintptr_t stream) noexcept override;

    void raise_failure();  // of the latest call, if it failed, once

private:
    template <class Steps>
    bool guarded(const Steps& steps) noexcept;

    GpuCommunicator& communicator_;
    std::exception_ptr failure_;
};

}  // namespace deepep_moe
