// How fast does memory take rows that multiprocessors write? What bounds a dispatch into the expert layout on few ranks.
//
//   nvcc -std=c++20 -O3 -arch=sm_90 hbm_writes.cu -o hbm_writes && ./hbm_writes
//
// Warps write whole rows of 14336 bytes from shared memory by bulk copies, or with 16-byte stores, in three orders: one after the other,
// shuffled, and as a dispatch does, at the front of one of 128 groups each time. A line per case: microseconds, GB/s.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "probe.cuh"

constexpr int kRowBytes = 14336, kRows = 40960, kGroups = 128, kWarps = 4;
constexpr size_t kBytes = static_cast<size_t>(kRowBytes) * kRows;

__global__ void bulk_copies(char* out, const int* order) {
    extern __shared__ __align__(128) char rows[];
    const int warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < kRowBytes * kWarps / 4; i += blockDim.x) reinterpret_cast<int*>(rows)[i] = i;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x % 32 != 0) return;
    for (int i = blockIdx.x * kWarps + warp; i < kRows; i += gridDim.x * kWarps) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out + static_cast<size_t>(order[i]) * kRowBytes),
                     "r"(shared_address(rows + warp * kRowBytes)), "r"(kRowBytes)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;");
        asm volatile("cp.async.bulk.wait_group.read 4;" ::: "memory");
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__global__ void stores(char* out, const int* order) {
    const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, num_warps = gridDim.x * blockDim.x / 32, lane = threadIdx.x % 32;
    const uint4 value = make_uint4(warp, lane, 1, 2);
    for (int i = warp; i < kRows; i += num_warps) {
        auto* to = reinterpret_cast<uint4*>(out + static_cast<size_t>(order[i]) * kRowBytes);
        for (int j = lane; j < kRowBytes / 16; j += 32) to[j] = value;
    }
}

template <class Work>
void show(const char* what, int num_blocks, double bytes, Work work) {
    constexpr int kIterations = 10;
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    work();
    CHECK(cudaEventRecord(begin));
    for (int i = 0; i < kIterations; ++i) work();
    CHECK(cudaEventRecord(end));
    CHECK(cudaDeviceSynchronize());
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    std::printf("%-28s %4d blocks  %7.1f us  %5.0f GB/s\n", what, num_blocks, ms * 1e3 / kIterations, bytes * kIterations / ms * 1e-6);
}

int main() {
    char *out, *in;
    CHECK(cudaMalloc(&out, kBytes));
    CHECK(cudaMalloc(&in, kBytes));
    std::vector<int> orders[3];
    std::mt19937 random(1);
    for (auto& order : orders) order.resize(kRows), std::iota(order.begin(), order.end(), 0);
    std::shuffle(orders[1].begin(), orders[1].end(), random);
    std::vector<int> groups(kRows), next(kGroups);
    for (int i = 0; i < kRows; ++i) groups[i] = i % kGroups;
    std::shuffle(groups.begin(), groups.end(), random);
    for (int i = 0; i < kRows; ++i) orders[2][i] = groups[i] * (kRows / kGroups) + next[groups[i]]++;
    show("cudaMemset", 0, kBytes, [&] { CHECK(cudaMemsetAsync(out, 1, kBytes)); });
    show("cudaMemcpy, read + written", 0, 2.0 * kBytes, [&] { CHECK(cudaMemcpyAsync(out, in, kBytes, cudaMemcpyDeviceToDevice)); });
    CHECK(cudaFuncSetAttribute(bulk_copies, cudaFuncAttributeMaxDynamicSharedMemorySize, kWarps * kRowBytes));
    const char* names[3] = {"in order", "shuffled", "into 128 groups"};
    for (int i = 0; i < 3; ++i) {
        int* order;
        CHECK(cudaMalloc(&order, kRows * sizeof(int)));
        CHECK(cudaMemcpy(order, orders[i].data(), kRows * sizeof(int), cudaMemcpyHostToDevice));
        for (int blocks : {8, 16, 32, 64, 132}) {
            std::printf("%-16s ", names[i]);
            show("bulk copies", blocks, kBytes, [&] { bulk_copies<<<blocks, 32 * kWarps, kWarps * kRowBytes>>>(out, order); });
        }
        std::printf("%-16s ", names[i]);
        show("16-byte stores", 264, kBytes, [&] { stores<<<264, 1024>>>(out, order); });
    }
    CHECK(cudaGetLastError());
}
