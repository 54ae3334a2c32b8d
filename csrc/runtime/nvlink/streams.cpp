#include "runtime/nvlink/streams.h"

#include <utility>

#include "cuda/driver.h"

namespace deepep_moe {

cudaEvent_t new_event() {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return event;
}

cudaStream_t new_urgent_stream() {
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
    return stream;
}

bool is_ready(cudaError_t status) {
    if (status != cudaErrorNotReady) check_cuda(status, "the GPU failed");
    return status == cudaSuccess;
}

void record(cudaEvent_t event, cudaStream_t stream) { check_cuda(cudaEventRecord(event, stream), "cudaEventRecord"); }
void wait(cudaStream_t stream, cudaEvent_t event) { check_cuda(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent"); }

bool is_capturing(cudaStream_t stream) {
    if (stream == nullptr) return false;  // the legacy stream cannot capture, and must not be asked while another does
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

unsigned long long capture_of(cudaStream_t stream) {
    if (stream == nullptr) return 0;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    check_cuda(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo");
    return status == cudaStreamCaptureStatusActive ? id : 0;
}

// ---- the order of calls ----

void LastStreams::create() { followed_ = new_event(), ended_ = new_event(); }

void LastStreams::follow(cudaStream_t stream) {
    const unsigned long long capture = capture_of(stream);
    const bool captures = capture != 0;
    const std::optional<cudaStream_t> last = captures ? captured_ : running_;
    if (last && *last != stream) {
        if (!captures && is_marked_) {
            wait(stream, ended_);
        } else if (captures ? capture_ == capture : !is_capturing(*last)) {
            record(followed_, *last);
            wait(stream, followed_);
        }
    }
    go_on(stream, capture);
}

void LastStreams::go_on(cudaStream_t stream, unsigned long long capture) {
    captures_ = capture != 0;
    if (captures_) {
        captured_ = stream;
        capture_ = capture;
    } else {
        running_ = stream;
        is_marked_ = false;
    }
}

void LastStreams::ends() {
    if (is_external_ && running_ && !captures_) is_marked_ = cudaEventRecord(ended_, *running_) == cudaSuccess;
}

bool LastStreams::is_done() const {
    if (capture_ == 0) return !running_ || is_ready(is_marked_ ? cudaEventQuery(ended_) : cudaStreamQuery(*running_));
    check_cuda(cudaDeviceSynchronize(), "the GPU failed");  // it is not known on which streams graphs run
    return true;
}

// ---- sending beside the call's stream ----

void SendStreams::create() {
    for (Stream* stream : {&sending, &copying, &announcing}) *stream = new_urgent_stream();
    for (Event* event : {&forked_, &sent_, &copied_}) *event = new_event();
}

void SendStreams::fork(cudaStream_t stream) {
    record(forked_, stream);
    wait(sending, forked_);
    is_sending_ = true;
    sends_in_ = capture_of(stream);
}

void SendStreams::follow_fork(cudaStream_t stream) { wait(stream, forked_); }

void SendStreams::has_sent(cudaStream_t stream) { record(sent_, stream); }

void SendStreams::join(cudaStream_t stream) {
    if (std::exchange(is_sending_, false) && capture_of(stream) == sends_in_) wait(stream, sent_);
}

bool SendStreams::is_done() const {
    return is_ready(cudaStreamQuery(sending)) && is_ready(cudaStreamQuery(copying)) && is_ready(cudaStreamQuery(announcing));
}

void SendStreams::announce_after(cudaStream_t copies) {
    record(copied_, copies);
    wait(announcing, copied_);
}

}  // namespace deepep_moe
