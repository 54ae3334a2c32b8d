// Follows PyTorch's streams: where calls go, what runs beside them, and when memory may be used again. A device without streams makes all
// of this nothing: its calls are over when they return.
#pragma once

#include <c10/core/Event.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "torch/tensors.h"

namespace deepep_moe {

// Returns the address of the device's current stream, as calls take it (`kExternalStream`); 0 where there is none. The GIL is held.
uintptr_t call_stream(const at::Device& device);

// Launches a kernel of `KernelShim` on the device's current stream. The GIL is held.
template <class Params>
void launch_kernel(bool (*kernel)(const Params&, uintptr_t) noexcept, const Params& params, const at::Device& device) {
    const c10::OptionalDeviceGuard guard(device);
    if (!kernel(params, call_stream(device))) throw std::runtime_error("a kernel cannot be launched; the GPU has failed before");
}

// Marks a moment on a stream.
class Recorded {
public:
    explicit Recorded(const at::Device& device);  // records what the current stream has been given by now
    // `stream` began after what `caller` had been given, and uses `tensors` until this moment. They are held until `caller` waits for it.
    // That wait orders whatever has their memory next, if it is memory of `caller`. `record_stream` of each tensor would cost more than
    // the rest of an asynchronous call.
    Recorded(const c10::Stream& stream, const c10::Stream& caller, variable_list tensors);
    ~Recorded();
    void wait();         // lets the device's current stream wait for it
    bool query() const;  // Has it come? CUDA lets nobody ask while a graph is captured.

private:
    void release_to(const c10::Stream* waiting);

    const at::Device device_;
    c10::Event event_;
    std::optional<c10::Stream> stream_, caller_;
    variable_list tensors_;
};

// The rest of a call that was split. It holds the call's tensors until it is over.
class SecondHalf {
public:
    explicit SecondHalf(std::function<bool()> rest) : rest_(std::move(rest)) {}
    bool finish() {  // on the stream that is current by now; false where the buffer was destroyed before
        is_begun_ = true;
        return rest_();
    }
    bool is_begun() const { return is_begun_; }

private:
    const std::function<bool()> rest_;
    bool is_begun_ = false;
};

// The rest of a call that has returned.
struct InFlight {
    std::shared_ptr<SecondHalf> second_half;  // set in a split call
    std::shared_ptr<Recorded> recorded;       // set in an asynchronous call: when its results are there
};

// Memory of these is not used again before the device's current stream is through with what it has been given by then.
void keep_for_current(const at::Device& device, at::TensorList tensors);

// A stream of a buffer's own, for calls that run beside the caller's.
class OwnStream {
public:
    explicit OwnStream(const at::Device& device) : device_(device) {}
    uintptr_t follow();  // lets it go on after what the current stream has been given; its address. The first call holds the GIL
    void keep(at::TensorList tensors) const;                        // does what `keep_for_current` does, for this stream
    std::shared_ptr<Recorded> record(variable_list tensors) const;  // records this stream by now. tensors: those used since `follow`

private:
    const at::Device device_;
    std::optional<c10::Stream> stream_, caller_;  // the latter: that was current at the last `follow`
    std::optional<c10::Event> given_;             // to the current stream, at the last `follow`
    uintptr_t address_ = 0;                       // of `stream_`
};

}  // namespace deepep_moe
