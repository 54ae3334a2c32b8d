// How the kernels of the exchange and of low-latency calls divide a GPU: every constant and setting that changes their speed and neither
// their results nor what ranks agree on. docs/limits.md says what was measured.
#pragma once

#include <cstdint>

namespace deepep_moe {

// How the rows of a kernel travel through shared memory: `warps` rings of `stages` rows each; no stages: loads and stores instead.
struct GpuRing {
    int warps, stages;
};

// Settings of a buffer, fitted to the device when it is made (runtime/nvlink/fit.h); a profile or a benchmark may change them between
// calls.
struct GpuTuning {
    GpuRing ring{6, 4};            // of one block, as far as its rows are to be on their way at once
    bool uses_bulk_copies = true;  // false: 16-byte loads and stores, the only way before sm_90
    int num_receive_blocks = 64;   // of a dispatch
    int num_work_blocks = 0;       // of a combine; 0: all SMs that do not send
    int num_sms = 1;               // SMs that send, where the caller does not say
    int num_sms_of_sums = 1;       // of a combine that sums rows for several peers
    int max_sms = 0;               // that a call takes, those that send among them; 0: all
    int num_rail_sms = 4;          // that send to other nodes, and look for what comes from there
};

namespace tuning {

// The ring of a block.
constexpr int kMaxRingWarps = 11;
constexpr int kRingBytes = 184 * 1024;  // of a block's rows on their way: the link is slower where more are
constexpr int kRowsBehindFlag = 3;      // rows sent after those that a flag announces, before it is due: by then they have landed

// Plan.
constexpr int kPlanThreads = 512;  // of one block, which counts one segment of the tokens
constexpr int kMaxSegments = 64;   // blocks, fewer where the GPU does not hold them all at once
constexpr int kTokensAtOnce = 16;  // of a warp
constexpr int kPlanLoads = 8;      // that a thread has in flight
constexpr int kQuickLooks = 32;    // at words of peers, before each is waited for with a deadline

// Dispatch.
constexpr int kReceiveTaskRows = 2;         // rows that a receiving warp takes at a time
constexpr int kMaxLaneBlocks = 48;          // with those that send and receive no more than there are SMs
constexpr int64_t kLanesOfLaneBlock = 512;  // of top-k, whose targets a block tells the peers

// Combine.
constexpr int kCombineThreads = 384;
constexpr int kCombineBatch = 4;       // pieces that a lane sums at a time
constexpr int kFewestWorkers = 8;      // blocks that do not send
constexpr int kPiecesForLink = 128;    // of a row that a warp sums at a time: small tasks end soon after the last rows came,
constexpr int kPiecesForMemory = 256;  // large ones read faster, which counts where half the rows stay on the GPU

// Waits.
constexpr unsigned kPauseNs = 100;  // between two looks at a flag: what is on its way needs the memory too
constexpr unsigned kLowLatencyPauseNs = 0;
constexpr int kLowLatencyLooks = 64;                           // at a flag, between two at the clock
constexpr unsigned long long kNsBetweenHostLooks = 1'000'000;  // for processes that have ended

// Low latency.
constexpr int kLowLatencyThreads = 512;  // of a block of dispatch and of combine
constexpr int kLowLatencyControlThreads = 256;
constexpr int kLowLatencyBatch = 2;  // pieces of 16 bytes that a lane of combine sums at a time
constexpr int kRowsOnTheirWay = 7;   // of a token, to the block that sums them
constexpr int kRanksAtOnce = 2;      // whose parts are on their way to the thread that adds them

}  // namespace tuning
}  // namespace deepep_moe
