// Keeps a buffer's calls in order, whatever streams they are on, and lets them send beside their stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "runtime/nvlink/call.h"
#include "runtime/nvlink/memory.h"

namespace deepep_moe {

inline bool is_external(uintptr_t stream) { return (stream & kExternalStream) != 0; }
inline cudaStream_t as_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream & ~kExternalStream); }
bool is_capturing(cudaStream_t stream);
cudaEvent_t new_event();
cudaStream_t new_urgent_stream();  // of the highest priority
void record(cudaEvent_t event, cudaStream_t stream);
void wait(cudaStream_t stream, cudaEvent_t event);
bool is_ready(cudaError_t status);                   // whether the work that was queried has ended; throws if the GPU has failed in it
unsigned long long capture_of(cudaStream_t stream);  // the number of the stream's capture in progress, or 0

// Holds the streams of a buffer's last calls. A call on another stream than the last one waits for that call; a call that is captured in a
// graph waits for the last one of that capture. An external stream is not touched once its call has ended.
class LastStreams {
public:
    void create();                                                          // on the current device, before use
    void begins(uintptr_t stream) { is_external_ = is_external(stream); }   // a call, or its second half, begins
    void follow(cudaStream_t stream);                                       // a first half begins, and waits for the call before
    void go_on(cudaStream_t stream) { go_on(stream, capture_of(stream)); }  // the rest of the call is on this stream
    void ends();  // the call has enqueued its work on its stream; a second half may follow
    cudaStream_t running() const { return running_.value_or(nullptr); }  // stream of the call in progress
    // Returns whether the last call's stream has finished: an external one what it had at the call's end, others all. If a graph has
    // captured a call, waits for the GPU.
    bool is_done() const;

private:
    void go_on(cudaStream_t stream, unsigned long long capture);

    std::optional<cudaStream_t> running_, captured_;
    bool is_external_ = false, captures_ = false;  // about the stream of the call in progress
    bool is_marked_ = false;                       // `ended_` stands for `running_`, which is external
    unsigned long long capture_ = 0;               // the capture of `captured_`
    Event followed_, ended_;
};

// A call sends on these high-priority streams of the buffer while its own stream goes on. `fork` lets `sending` follow the call's stream.
// `has_sent` marks the end of sending, and `join` lets the call's stream wait for it.
class SendStreams {
public:
    void create();
    void fork(cudaStream_t stream);
    void follow_fork(cudaStream_t stream);  // lets another stream wait for the work that the last `fork` followed
    void has_sent(cudaStream_t stream);     // the last work of the sending is on `stream` now
    void join(cudaStream_t stream);
    bool is_sending() const { return is_sending_; }
    bool is_done() const;                      // whether these streams have finished
    void announce_after(cudaStream_t copies);  // `announcing` waits for the work that is on `copies` now

    Stream sending, copying, announcing;

private:
    Event forked_, sent_, copied_;
    bool is_sending_ = false;
    unsigned long long sends_in_ = 0;  // the capture that the fork was in, or 0
};

}  // namespace deepep_moe
