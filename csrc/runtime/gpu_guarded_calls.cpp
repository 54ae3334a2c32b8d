#include "runtime/gpu_guarded_calls.h"

#include <utility>

#include "runtime/gpu_communicator.h"

namespace deepep_moe {

template <class Steps>
bool GpuGuardedCalls::guarded(const Steps& steps) noexcept {
    try {
        const GpuCommunicator::Step step(communicator_);
        steps();
        return true;
    } catch (...) {
        failure_ = std::current_exception();
        return false;
    }
}

bool GpuGuardedCalls::has_failed() noexcept { return communicator_.has_failed(); }
int64_t GpuGuardedCalls::num_calls() noexcept { return communicator_.num_calls(); }

int64_t GpuGuardedCalls::dispatch(const GpuDispatchCall& call, int num_sms, uintptr_t stream, int64_t* numbers) noexcept {
    int64_t num_rows = -1;
    guarded([&] {
        communicator_.plan(call.plan, call.signature, stream);
        if (call.params.is_guess)
            communicator_.dispatch(call.params, num_sms, stream);
        else
            communicator_.start_dispatch(call.params, num_sms, stream);
        num_rows = communicator_.wait_counts(numbers).num_rows;
    });
    return num_rows;
}

void GpuGuardedCalls::abandon() noexcept {
    guarded([&] { communicator_.abandon(); });
}

bool GpuGuardedCalls::end_dispatch(const GpuDispatchCall& call, uintptr_t stream) noexcept {
    return guarded([&] { communicator_.end_dispatch(call.params, stream); });
}

bool GpuGuardedCalls::dispatch_cached(const GpuDispatchCall& call, int num_sms, uintptr_t stream) noexcept {
    return guarded([&] {
        communicator_.plan(call.plan, call.signature, stream);
        communicator_.dispatch(call.params, num_sms, stream);
    });
}

bool GpuGuardedCalls::combine(const GpuCombineCall& call, int num_sms, uintptr_t stream) noexcept {
    return guarded([&] {
        communicator_.plan(call.plan, call.signature, stream);
        communicator_.combine(call.params, num_sms, true, stream);
    });
}

void GpuGuardedCalls::raise_failure() {
    if (const std::exception_ptr failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
}

}  // namespace deepep_moe
