// The streams of a buffer's calls: in what order they run, and what sends beside them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "runtime/nvlink/call.h"

namespace deepep_moe {

inline bool is_external(uintptr_t stream) { return (stream & kExternalStream) != 0; }
inline cudaStream_t as_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream & ~kExternalStream); }
bool is_capturing(cudaStream_t stream);
unsigned long long capture_of(cudaStream_t stream);  // the number of the capture that goes on there, or 0

// The streams of a buffer's last calls. A call on another stream than the last one waits for that call; a call that is captured in a graph
// waits for the last one of that capture. An external stream is not touched once its call has ended.
class LastStreams {
public:
    void create();  // on the current device, before use
    void destroy();
    void begins(uintptr_t stream) { is_external_ = is_external(stream); }   // a call, or its second half
    void follow(cudaStream_t stream);                                       // it is the first half, and waits for the call before
    void go_on(cudaStream_t stream) { go_on(stream, capture_of(stream)); }  // the rest of the call is on this stream
    void ends();  // what the call enqueues on its stream is there; a second half may follow
    cudaStream_t running() const { return running_.value_or(nullptr); }  // of the call that is made
    bool is_done() const;  // Is all done that the last call's stream had been given: an external one by the call's end, others by now?
    bool has_captured() const { return capture_ != 0; }

private:
    void go_on(cudaStream_t stream, unsigned long long capture);

    std::optional<cudaStream_t> running_, captured_;
    bool is_external_ = false, captures_ = false;  // the stream of the call that is made
    bool is_marked_ = false;                       // `ended_` stands for `running_`, which is external
    unsigned long long capture_ = 0;               // that `captured_` was in
    cudaEvent_t followed_ = nullptr, ended_ = nullptr;
};

// Streams of the buffer's own, of high priority, on which a call sends while its own stream goes on: `fork` lets `sending` follow the
// call's stream, `has_sent` marks its end, and `join` lets the call's stream wait for it.
class SendStreams {
public:
    void create();
    void destroy();

    void fork(cudaStream_t stream);
    void follow_fork(cudaStream_t stream);  // lets another stream wait for what the last `fork` followed
    void has_sent(cudaStream_t stream);     // what is on `stream` by now is the last of it
    void join(cudaStream_t stream);
    bool is_sending() const { return is_sending_; }
    bool is_done() const;                      // all that these streams were given
    void announce_after(cudaStream_t copies);  // `announcing` waits for what is on `copies` by now

    cudaStream_t sending = nullptr, copying = nullptr, announcing = nullptr;

private:
    cudaEvent_t forked_ = nullptr, sent_ = nullptr, copied_ = nullptr;
    bool is_sending_ = false;
    unsigned long long sends_in_ = 0;  // the capture that the fork was in; 0: none
};

}  // namespace deepep_moe
