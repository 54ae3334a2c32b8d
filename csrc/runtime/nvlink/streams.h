// The streams of a buffer's calls: in what order they run, and what sends beside them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

namespace deepep_moe {

inline cudaStream_t as_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }
bool is_capturing(cudaStream_t stream);
unsigned long long capture_of(cudaStream_t stream);  // the number of the capture that goes on there, or 0

// The streams of a buffer's last calls. A call on another stream than the last one waits for that call; a call that is captured in a graph
// waits for the last one captured there.
class LastStreams {
public:
    void create();  // on the current device, before use
    void destroy();
    void follow(cudaStream_t stream);  // a call begins
    void go_on(cudaStream_t stream);   // the rest of the call is on this stream
    cudaStream_t running() const { return running_.value_or(nullptr); }

private:
    std::optional<cudaStream_t> running_, captured_;
    cudaEvent_t followed_ = nullptr;
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
    void announce_after(cudaStream_t copies);  // `announcing` waits for what is on `copies` by now

    cudaStream_t sending = nullptr, copying = nullptr, announcing = nullptr;

private:
    cudaEvent_t forked_ = nullptr, sent_ = nullptr, copied_ = nullptr;
    bool is_sending_ = false;
    unsigned long long sends_in_ = 0;  // the capture that the fork was in; 0: none
};

}  // namespace deepep_moe
