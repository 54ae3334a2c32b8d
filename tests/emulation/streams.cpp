// Streams: a thread for each, which does in order what was enqueued. The null stream has none: its work is done when it is enqueued.
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "cuda_runtime_api.h"

struct EmulatedStream {
    std::deque<std::function<void()>> work;
    uint64_t num_enqueued = 0, num_done = 0;
    bool is_destroyed = false;
};

struct EmulatedEvent {
    std::shared_ptr<bool> has_passed;  // of the last record; null before the first
};

namespace {

struct Device {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t num_pending = 0;  // pieces of work on all streams
};

// Never destroyed: threads of streams may go on while the process ends.
Device& device() {
    static auto* const made = new Device;
    return *made;
}

void work(EmulatedStream* stream) {
    Device& d = device();
    std::unique_lock lock(d.mutex);
    while (true) {
        d.changed.wait(lock, [&] { return !stream->work.empty() || stream->is_destroyed; });
        if (stream->work.empty()) break;
        const std::function<void()> next = std::move(stream->work.front());
        stream->work.pop_front();
        lock.unlock();
        next();
        lock.lock();
        ++stream->num_done;
        --d.num_pending;
        d.changed.notify_all();
    }
    delete stream;
}

void wait_for(const std::shared_ptr<bool>& has_passed) {
    std::unique_lock lock(device().mutex);
    device().changed.wait(lock, [&] { return *has_passed; });
}

}  // namespace

void emulation::enqueue(cudaStream_t stream, std::function<void()> work) {
    if (stream == nullptr) return work();
    const std::lock_guard lock(device().mutex);
    stream->work.push_back(std::move(work));
    ++stream->num_enqueued;
    ++device().num_pending;
    device().changed.notify_all();
}

// ---- streams ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    if (flags != cudaStreamNonBlocking) return cudaErrorInvalidValue;  // the others wait for the null stream, which is not emulated
    std::thread(work, *stream = new EmulatedStream).detach();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) { return cudaStreamCreateWithFlags(stream, flags); }

// Its thread ends once it has done what was enqueued.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const std::lock_guard lock(device().mutex);
    stream->is_destroyed = true;
    device().changed.notify_all();
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (stream == nullptr) return cudaSuccess;
    const std::lock_guard lock(device().mutex);
    return stream->num_done == stream->num_enqueued ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (stream == nullptr) return cudaSuccess;
    std::unique_lock lock(device().mutex);
    const uint64_t last = stream->num_enqueued;
    device().changed.wait(lock, [&] { return stream->num_done >= last; });
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    std::unique_lock lock(device().mutex);
    device().changed.wait(lock, [] { return device().num_pending == 0; });
    return cudaSuccess;
}

// ---- events ----

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = new EmulatedEvent, cudaSuccess; }

cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const auto has_passed = std::make_shared<bool>(false);
    {
        const std::lock_guard lock(device().mutex);
        event->has_passed = has_passed;
    }
    emulation::enqueue(stream, [has_passed] {
        const std::lock_guard lock(device().mutex);
        *has_passed = true;
        device().changed.notify_all();
    });
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    const std::lock_guard lock(device().mutex);
    return event->has_passed == nullptr || *event->has_passed ? cudaSuccess : cudaErrorNotReady;
}

// Wait for the work before the event's last record so far; a later record changes nothing.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    std::unique_lock lock(device().mutex);
    const std::shared_ptr<bool> has_passed = event->has_passed;
    lock.unlock();
    if (has_passed != nullptr) emulation::enqueue(stream, [has_passed] { wait_for(has_passed); });
    return cudaSuccess;
}

// ---- copies ----

cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
    emulation::enqueue(stream, [=] { std::memset(at, value, bytes); });
    return cudaSuccess;
}

// The host's memory may change once the call has returned, as pageable memory may; that of the GPU is read in turn.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    if (kind == cudaMemcpyHostToDevice) {
        const auto* const begin = static_cast<const char*>(from);
        emulation::enqueue(stream, [to, copy = std::string(begin, begin + bytes)] { std::memcpy(to, copy.data(), copy.size()); });
    } else {
        emulation::enqueue(stream, [=] { std::memcpy(to, from, bytes); });
    }
    return cudaSuccess;
}
