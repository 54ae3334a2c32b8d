// The kernels of the exchange and of low-latency calls divide a GPU by these constants and settings. They change the speed only: not
// results, and not what ranks must agree on. docs/limits.md has the measurements.
#pragma once

#include <cstdint>

namespace deepep_moe {

// A kernel's rows travel through shared memory in `warps` rings of `stages` rows each. 0 stages: plain loads and stores instead.
struct GpuRing {
    int warps, stages;
};

// The settings of a buffer are fitted to the device at first (deepep_moe/tuning/fit.py). A profile or benchmark may change them between
// calls.
struct GpuTuning {
    GpuRing ring{6, 4};            // ring of one block, if its rows fit into kRingBytes
    bool uses_bulk_copies = true;  // if not, rows move by 16-byte loads and stores, the only way before sm_90
    int num_receive_blocks = 64;   // blocks of a dispatch that receive
    int num_work_blocks = 0;       // blocks of a combine that work; 0: all SMs that do not send
    int num_sms = 1;               // SMs that send, unless the caller sets a number
    int num_sms_of_sums = 1;       // the same for a combine that sums rows for several peers
    int max_sms = 0;               // SMs that a call may use, including those that send; 0: all
    int num_rail_sms = 4;          // SMs that send to other nodes and poll for rows from there
};

namespace tuning {

// Ring of a block.
constexpr int kMaxRingWarps = 11;
constexpr int kRingBytes = 184 * 1024;                 // bytes of a block's rows in flight; the link is slower with more
constexpr GpuRing kRingOfGradients{kMaxRingWarps, 4};  // in a return of gradients, whose rows are small
constexpr int kReadersForSender = 2;                   // SMs that read over the link as fast as one writes
constexpr int kRowsBehindFlag = 3;                     // rows sent after a chunk before its flag is set: by then the chunk has landed

// Plan.
constexpr int kPlanThreads = 512;  // threads of one block, which counts one segment of the tokens
constexpr int kMaxSegments = 64;   // blocks; fewer if the GPU cannot hold them all at once
constexpr int kTokensAtOnce = 16;  // tokens that a warp counts at once
constexpr int kPlanLoads = 8;      // loads that a thread has in flight
constexpr int kQuickLooks = 32;    // polls of the peers' words, before the thread waits for each with a deadline

// Dispatch.
constexpr int kReceiveTaskRows = 2;         // rows that a receiving warp takes at a time
constexpr int kMaxLaneBlocks = 48;          // lane, send and receive blocks together are no more than the SMs
constexpr int64_t kLanesOfLaneBlock = 512;  // top-k entries whose targets one block sends to the peers

// Combine.
constexpr int kCombineThreads = 384;
constexpr int kCombineBatch = 4;       // pieces that a thread sums at a time
constexpr int kFewestWorkers = 8;      // blocks that do not send
constexpr int kPiecesForLink = 128;    // pieces of a row in a warp's task: small tasks end soon after the last rows have come,
constexpr int kPiecesForMemory = 256;  // large tasks read faster, which matters where half of the rows stay on the GPU

// Waits.
constexpr unsigned kPauseNs = 100;  // between two polls of a flag: polling competes with incoming rows for memory
constexpr unsigned kLowLatencyPauseNs = 0;
constexpr int kLowLatencyLooks = 64;                           // polls of a flag between two reads of the clock
constexpr unsigned long long kNsBetweenHostLooks = 1'000'000;  // between two reads of the host's mask of ended processes

// Low latency.
constexpr int kLowLatencyThreads = 512;  // threads of a block of dispatch and of combine
constexpr int kLowLatencyControlThreads = 256;
constexpr int kLowLatencyBatch = 2;  // pieces of 16 bytes that a thread of a combine sums at a time
constexpr int kRowsOnTheirWay = 7;   // rows of a token that the block which sums them has in flight
constexpr int kRanksAtOnce = 2;      // ranks whose parts the thread that adds them has in flight

}  // namespace tuning
}  // namespace deepep_moe
