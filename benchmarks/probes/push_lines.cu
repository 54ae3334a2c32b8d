// How long does a kernel take that does nothing but store low-latency rows to all peers? What the sending half of a call cannot be shorter
// than.
//
//   nvcc -std=c++20 -O3 -arch=sm_90 -I../../csrc push_lines.cu -o push_lines && ./push_lines [--json FILE]
//
// Every GPU stores `rows` rows of lines of 128 bytes to each peer, a row a block at a time, as csrc/cuda/low_latency_dispatch.cu does:
// eight lanes a line, relaxed and for all GPUs to see. Nothing is loaded, no flag awaited. Microseconds a launch of a graph of 50, of the
// slowest GPU, with the empty kernel beside it; GB/s of what remains without that. A row of 8192 bytes is one of 7168 columns in fp8 with
// its flags and scales, 16384 one in bf16. With uniform routing of 128 tokens to 8 of 256 experts, 116 rows go to each of three peers, 128
// to one.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "cuda/device/ptx.cuh"
#include "probe.cuh"

constexpr int kMaxRanks = 8, kThreads = 512, kLaunches = 50;

struct Params {
    uint4* peers[kMaxRanks];  // memory of each rank, [num_ranks] parts, of which this rank writes its own
    int rank, num_ranks, rows, row_pieces;
};

__global__ void __launch_bounds__(kThreads, 2) push_lines(const __grid_constant__ Params p) {
    const uint4 value = make_uint4(threadIdx.x, blockIdx.x, 1, 2);
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x)
        for (int first = threadIdx.x / 32 * 32; first < p.row_pieces; first += kThreads)
            for (int turn = 1; turn < p.num_ranks; ++turn) {
                uint4* const to = p.peers[(p.rank + turn) % p.num_ranks] + (static_cast<int64_t>(p.rank) * p.rows + row) * p.row_pieces;
                deepep_moe::store_part(to + first + threadIdx.x % 32, value, first + threadIdx.x % 32 < p.row_pieces);
            }
}

double measure(const std::vector<Params>& params, int num_blocks) {
    const int num_ranks = params[0].num_ranks;
    std::vector<float> ms(num_ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank)
        threads.emplace_back([&, rank] {
            CHECK(cudaSetDevice(rank));
            cudaStream_t stream;
            cudaEvent_t begin, end;
            cudaGraph_t graph;
            cudaGraphExec_t launches;
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            CHECK(cudaEventCreate(&begin));
            CHECK(cudaEventCreate(&end));
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            for (int i = 0; i < kLaunches; ++i) push_lines<<<num_blocks, kThreads, 0, stream>>>(params[rank]);
            CHECK(cudaStreamEndCapture(stream, &graph));
            CHECK(cudaGraphInstantiate(&launches, graph, 0));
            for (int i = 0; i < 3; ++i) CHECK(cudaGraphLaunch(launches, stream));
            CHECK(cudaEventRecord(begin, stream));
            for (int i = 0; i < 10; ++i) CHECK(cudaGraphLaunch(launches, stream));
            CHECK(cudaEventRecord(end, stream));
            CHECK(cudaGraphLaunch(launches, stream));  // the others' last ones are not alone
            CHECK(cudaStreamSynchronize(stream));
            CHECK(cudaEventElapsedTime(&ms[rank], begin, end));
            CHECK(cudaGraphExecDestroy(launches));
            CHECK(cudaGraphDestroy(graph));
            CHECK(cudaStreamDestroy(stream));
        });
    for (auto& thread : threads) thread.join();
    return *std::max_element(ms.begin(), ms.end()) * 1e3 / (10 * kLaunches);
}

int main(int argc, char** argv) {
    int num_devices = 0, num_multiprocessors = 0;
    CHECK(cudaGetDeviceCount(&num_devices));
    num_devices = std::min(num_devices, kMaxRanks);
    if (num_devices < 2) return std::fprintf(stderr, "needs 2 to %d GPUs\n", kMaxRanks), 1;
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    CHECK(cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    std::FILE* json = argc == 3 && std::strcmp(argv[1], "--json") == 0 ? std::fopen(argv[2], "w") : nullptr;
    const char* separator = "[";
    std::vector<uint4*> landing(num_devices);
    for (int rank = 0; rank < num_devices; ++rank) {
        CHECK(cudaSetDevice(rank));
        for (int peer = 0; peer < num_devices; ++peer)
            if (peer != rank) CHECK(cudaDeviceEnablePeerAccess(peer, 0));
        CHECK(cudaMalloc(&landing[rank], int64_t{kMaxRanks} * 512 * 16384));
    }
    for (int num_ranks = 2; num_ranks <= num_devices; num_ranks += 2) {
        std::vector<Params> params(num_ranks);
        for (int rank = 0; rank < num_ranks; ++rank) {
            std::copy(landing.begin(), landing.end(), params[rank].peers);
            params[rank].rank = rank, params[rank].num_ranks = num_ranks, params[rank].row_pieces = 512, params[rank].rows = 0;
        }
        const double empty_us = measure(params, num_multiprocessors);
        std::printf("%d GPUs: an empty kernel takes %.1f us\n", num_ranks, empty_us);
        for (const int row_bytes : {8192, 16384})
            for (const int rows : {num_ranks == 2 ? 128 : 116, 256})
                for (const int num_blocks : {num_multiprocessors, 2 * num_multiprocessors}) {
                    for (Params& p : params) p.rows = rows, p.row_pieces = row_bytes / 16;
                    const double us = measure(params, num_blocks), bytes = 1.0 * rows * row_bytes * (num_ranks - 1);
                    std::printf("  %3d rows of %5d bytes to each peer, %d blocks: %5.1f us, %.0f GB/s\n", rows, row_bytes, num_blocks, us,
                                bytes / (us - empty_us) * 1e-3);
                    if (json == nullptr) continue;
                    std::fprintf(json, "%s\n {\n  \"probe\": \"push_lines\",\n  \"hardware\": \"%d x %s\",\n  \"rows_to_each_peer\": %d,\n",
                                 separator, num_ranks, properties.name, rows);
                    std::fprintf(json, "  \"row_bytes\": %d,\n  \"num_blocks\": %d,\n  \"us\": %.2f,\n  \"us_empty\": %.2f\n }", row_bytes,
                                 num_blocks, us, empty_us);
                    separator = ",";
                }
    }
    if (json != nullptr) std::fprintf(json, "\n]\n"), std::fclose(json);
}
