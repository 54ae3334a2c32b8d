// Is a line of 128 bytes, which eight lanes store with one instruction and eight lanes load with one, ever seen in part? What low-latency
// rows rely on (csrc/cuda/low_latency.h).
//
//   nvcc -std=c++20 -O3 -arch=sm_90 -I../../csrc torn_lines.cu -o torn_lines && ./torn_lines > records.json
//
// Writers store lines again and again, a round's number in each of the 32 words; readers load them meanwhile. A line is torn where a part
// of it is of an earlier round than its last one, which would have been taken for a flag. Within a GPU, and from each GPU to the next one.
// A third case must find torn lines, or the readers see nothing: there the last part is stored first. Prints a record per case.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "cuda/device/ptx.cuh"

#define CHECK(call)                                                                              \
    do {                                                                                         \
        cudaError_t status_ = (call);                                                            \
        if (status_ != cudaSuccess) {                                                            \
            std::fprintf(stderr, "%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); \
            std::exit(1);                                                                        \
        }                                                                                        \
    } while (0)

using deepep_moe::load_part;
using deepep_moe::store_part;

constexpr int kBlocks = 64, kThreads = 512, kThreadsInAll = kBlocks * kThreads, kRepeats = 8;  // parts of each thread, in as many lines
constexpr unsigned kRounds = 20000;

struct Counts {
    unsigned long long loaded, changed, torn;
};

__global__ void write_lines(uint4* lines, bool flag_first) {
    const int thread = blockIdx.x * kThreads + threadIdx.x;
    const bool is_last = thread % 8 == 7;
    for (unsigned round = 1; round <= kRounds; ++round) {
        for (int i = 0; i < kRepeats; ++i) {
            const uint4 value = make_uint4(round, round, round, round);
            if (!flag_first) {
                store_part(lines + i * kThreadsInAll + thread, value, true);
                continue;
            }
            store_part(lines + i * kThreadsInAll + thread, value, is_last);
            __syncwarp();
            store_part(lines + i * kThreadsInAll + thread, value, !is_last);
        }
    }
}

__global__ void read_lines(const uint4* lines, Counts* totals) {
    const int thread = blockIdx.x * kThreads + threadIdx.x, lane = threadIdx.x % 32;
    unsigned last[kRepeats] = {};
    Counts counts{};
    for (bool done = false; !done;) {
        done = true;
        for (int i = 0; i < kRepeats; ++i) {
            const uint4 part = load_part(lines + i * kThreadsInAll + thread, true);
            const unsigned flag = __shfl_sync(0xffffffffu, part.w, lane | 7);
            const bool torn = part.x < flag || part.y < flag || part.z < flag || part.w < flag;
            const unsigned torn_lanes = __ballot_sync(0xffffffffu, torn) >> (lane & 24) & 0xff;
            if (lane % 8 == 0) {
                ++counts.loaded;
                counts.changed += flag != last[i];
                counts.torn += torn_lanes != 0;
            }
            last[i] = flag;
            done = done && flag == kRounds;
        }
        done = __all_sync(0xffffffffu, done);
    }
    if (lane % 8 != 0) return;
    atomicAdd(&totals->loaded, counts.loaded);
    atomicAdd(&totals->changed, counts.changed);
    atomicAdd(&totals->torn, counts.torn);
}

// A kernel that is loaded while another waits for it would wait for that one.
void load_kernels(int device) {
    cudaFuncAttributes attributes;
    CHECK(cudaSetDevice(device));
    CHECK(cudaFuncGetAttributes(&attributes, write_lines));
    CHECK(cudaFuncGetAttributes(&attributes, read_lines));
}

Counts probe(int writer, int reader, bool flag_first) {
    uint4* lines;
    Counts *totals, result;
    load_kernels(writer);
    load_kernels(reader);
    CHECK(cudaMalloc(&lines, sizeof(uint4) * kRepeats * kThreadsInAll));
    CHECK(cudaMemset(lines, 0, sizeof(uint4) * kRepeats * kThreadsInAll));
    CHECK(cudaMalloc(&totals, sizeof(Counts)));
    CHECK(cudaMemset(totals, 0, sizeof(Counts)));
    CHECK(cudaDeviceSynchronize());
    cudaStream_t reading, writing;
    CHECK(cudaStreamCreate(&reading));
    read_lines<<<kBlocks, kThreads, 0, reading>>>(lines, totals);
    CHECK(cudaSetDevice(writer));
    CHECK(cudaStreamCreate(&writing));
    write_lines<<<kBlocks, kThreads, 0, writing>>>(lines, flag_first);
    CHECK(cudaStreamSynchronize(writing));
    CHECK(cudaSetDevice(reader));
    CHECK(cudaStreamSynchronize(reading));
    CHECK(cudaMemcpy(&result, totals, sizeof(Counts), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(lines));
    CHECK(cudaFree(totals));
    return result;
}

int main() {
    int num_devices = 0;
    CHECK(cudaGetDeviceCount(&num_devices));
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    const char* separator = "[";
    const auto show = [&](const char* what, int writer, int reader, const Counts& f) {
        std::printf("%s\n{\"probe\": \"torn_lines\", \"hardware\": \"%d x %s\", \"case\": \"%s\", \"writer\": %d, \"reader\": %d, ",
                    separator, num_devices, properties.name, what, writer, reader);
        std::printf("\"lines_loaded\": %llu, \"lines_changed\": %llu, \"lines_torn\": %llu}", f.loaded, f.changed, f.torn);
        separator = ",";
    };
    for (int writer = 0; writer < num_devices; ++writer) {
        show("one instruction", writer, writer, probe(writer, writer, false));
        show("its last part first", writer, writer, probe(writer, writer, true));
        const int reader = (writer + 1) % num_devices;
        if (reader == writer) continue;
        CHECK(cudaSetDevice(writer));
        CHECK(cudaDeviceEnablePeerAccess(reader, 0));
        show("one instruction", writer, reader, probe(writer, reader, false));
        show("its last part first", writer, reader, probe(writer, reader, true));
    }
    std::printf("\n]\n");
}
