// What do the links of this host carry when multiprocessors offer them more or less?
//
//   nvcc -std=c++20 -O3 -arch=sm_90 link_pace.cu -o link_pace && ./link_pace [row_bytes=14336] [rows=12288]
//
// Every GPU pushes whole rows to all its peers at once, four warps a block, each through a ring of three rows. Each warp sends a row no
// sooner than its share of the offered rate allows; 0: as fast as it can. A line per offered rate: GB/s per direction of the slowest GPU,
// per number of blocks.
#include <algorithm>
#include <thread>
#include <vector>

#include "probe.cuh"

constexpr int kMaxRanks = 8, kWarps = 4, kStages = 3, kAhead = 1;
constexpr double kGigahertz = 1.98;  // of a multiprocessor

struct Params {
    char* local;             // [rows, row_bytes]
    char* peers[kMaxRanks];  // one [rows, row_bytes] per rank
    int rank, num_ranks, rows, row_bytes, cycles_per_row;
};

__device__ void load_row(void* smem, const void* gmem, uint32_t bytes, uint64_t* full) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(smem)),
                 "l"(gmem), "r"(bytes), "r"(shared_address(full))
                 : "memory");
}

__device__ void store_row(void* gmem, const void* smem, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem), "r"(shared_address(smem)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;");
}

__device__ void wait_full(uint64_t* full, uint32_t parity) {
    asm volatile(
        "{ .reg .pred done; again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra out_%=; bra again_%=; out_%=: }" ::
            "r"(shared_address(full)),
        "r"(parity)
        : "memory");
}

__global__ void push_rows(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char shared[];
    __shared__ uint64_t barriers[kWarps][kStages];
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0) return;
    uint64_t* full = barriers[warp];
    char* ring = shared + static_cast<size_t>(warp) * kStages * p.row_bytes;
    for (int i = 0; i < kStages; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[i])));
    asm volatile("fence.mbarrier_init.release.cluster;");

    const int me = blockIdx.x + warp * gridDim.x, num_warps = gridDim.x * kWarps, mine = (p.rows - me + num_warps - 1) / num_warps;
    const auto offset = [&](int i) { return (me + static_cast<size_t>(i) * num_warps) * p.row_bytes; };
    long long next = clock64();
    for (int i = 0; i < mine + kAhead; ++i) {
        if (i < mine) {
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            load_row(ring + (i % kStages) * p.row_bytes, p.local + offset(i), p.row_bytes, &full[i % kStages]);
        }
        if (const int j = i - kAhead; j >= 0) {
            wait_full(&full[j % kStages], (j / kStages) & 1);
            while (p.cycles_per_row > 0 && clock64() < next) {
            }
            next = max(next, clock64() - 4 * p.cycles_per_row) + p.cycles_per_row;
            char* peer = p.peers[(p.rank + 1 + (j + me) % (p.num_ranks - 1)) % p.num_ranks];
            store_row(peer + offset(j), ring + (j % kStages) * p.row_bytes, p.row_bytes);
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

double measure(std::vector<Params> params, const std::vector<cudaStream_t>& streams, int num_blocks) {
    constexpr int kIterations = 10, kWarmup = 2;
    const int num_ranks = params[0].num_ranks, smem = kWarps * kStages * params[0].row_bytes;
    std::vector<float> ms(num_ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank)
        threads.emplace_back([&, rank] {
            CHECK(cudaSetDevice(rank));
            CHECK(cudaFuncSetAttribute(push_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
            cudaEvent_t begin, end;
            CHECK(cudaEventCreate(&begin));
            CHECK(cudaEventCreate(&end));
            for (int i = 0; i < kWarmup + kIterations; ++i) {
                if (i == kWarmup) CHECK(cudaEventRecord(begin, streams[rank]));
                push_rows<<<num_blocks, 32 * kWarps, smem, streams[rank]>>>(params[rank]);
            }
            CHECK(cudaEventRecord(end, streams[rank]));
            CHECK(cudaStreamSynchronize(streams[rank]));
            CHECK(cudaEventElapsedTime(&ms[rank], begin, end));
        });
    for (auto& thread : threads) thread.join();
    const double seconds = *std::max_element(ms.begin(), ms.end()) / kIterations * 1e-3;
    return static_cast<double>(params[0].rows) * params[0].row_bytes / seconds * 1e-9;
}

int main(int argc, char** argv) {
    const int row_bytes = argc > 1 ? std::atoi(argv[1]) : 14336, rows = argc > 2 ? std::atoi(argv[2]) : 12288;
    int num_ranks = 0;
    CHECK(cudaGetDeviceCount(&num_ranks));
    if (num_ranks < 2 || num_ranks > kMaxRanks || row_bytes % 16 != 0)
        return std::fprintf(stderr, "needs 2 to %d GPUs and rows of a multiple of 16 bytes\n", kMaxRanks), 1;
    std::vector<Params> params(num_ranks);
    std::vector<cudaStream_t> streams(num_ranks);
    std::vector<char*> landing(num_ranks);
    const size_t bytes = static_cast<size_t>(rows) * row_bytes;
    for (int rank = 0; rank < num_ranks; ++rank) {
        CHECK(cudaSetDevice(rank));
        for (int peer = 0; peer < num_ranks; ++peer)
            if (peer != rank) CHECK(cudaDeviceEnablePeerAccess(peer, 0));
        CHECK(cudaMalloc(&params[rank].local, bytes));
        CHECK(cudaMalloc(&landing[rank], bytes));
        CHECK(cudaStreamCreateWithFlags(&streams[rank], cudaStreamNonBlocking));
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
        params[rank].rank = rank, params[rank].num_ranks = num_ranks, params[rank].rows = rows, params[rank].row_bytes = row_bytes;
        std::copy(landing.begin(), landing.end(), params[rank].peers);
    }
    std::printf("%d GPUs, %d rows of %d bytes, GB/s per direction\n", num_ranks, rows, row_bytes);
    for (const int offered : {0, 340, 355, 360, 365, 370, 380, 400}) {
        std::printf("offered %3d:", offered);
        for (const int num_blocks : {8, 12, 16, 24, 32}) {
            const double share = 1.0 * row_bytes * num_blocks * kWarps / std::max(offered, 1);  // ns a row
            for (Params& p : params) p.cycles_per_row = offered > 0 ? static_cast<int>(share * kGigahertz) : 0;
            std::printf("  %2d blocks %.0f", num_blocks, measure(params, streams, num_blocks));
        }
        std::printf("\n");
    }
}
