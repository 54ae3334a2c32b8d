// Checks of the guarantees of the emulated device's streams and events, one each.
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "cuda/device/launch.cuh"
#include "cuda/device/ptx.cuh"

namespace deepep_moe {
namespace {

using Word = unsigned long long;

struct WaitParams {
    const Word* flag;
    Word value;
    Word* to;  // becomes `then` after `flag` is `value`
    Word then;
};

void wait_and_set(const WaitParams& p) {
    while (load_acquire(p.flag) < p.value) pause_ns(100);
    if (threadIdx.x == 0 && blockIdx.x == 0) store_release(p.to, p.then);
}

void check(bool is_right, const char* what) {
    if (is_right) return;
    std::printf("not so: %s\n", what);
    std::exit(1);
}

void start(const WaitParams& p, cudaStream_t stream) { launch<wait_and_set>("wait_and_set", 2, 64, 0, p, stream); }

struct Fixture {
    Word* words = nullptr;  // [8] zeroes
    cudaStream_t first = nullptr, second = nullptr;
    cudaEvent_t event = nullptr;

    Fixture() {
        void* memory = nullptr;
        cudaMalloc(&memory, 64);
        cudaMemset(memory, 0, 64);
        words = static_cast<Word*>(memory);
        cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking);
        cudaStreamCreateWithPriority(&second, cudaStreamNonBlocking, -1);
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    }
    ~Fixture() {
        cudaEventDestroy(event);
        cudaStreamDestroy(first), cudaStreamDestroy(second);
        cudaFree(words);
    }
};

void kernels_wait_for_later_ones() {
    Fixture f;
    start({f.words, 1, f.words + 1, 1}, f.first);
    check(cudaStreamQuery(f.first) == cudaErrorNotReady, "a stream whose kernel waits is not ready");
    start({f.words + 1, 0, f.words, 1}, f.second);
    check(cudaStreamSynchronize(f.first) == cudaSuccess && f.words[1] == 1, "a kernel on one stream ends by one launched later on another");
    start({f.words + 2, 1, f.words + 3, 1}, f.first);
    start({f.words + 2, 0, f.words + 2, 1}, nullptr);
    check(f.words[2] == 1, "what is launched on the null stream has run");
    cudaDeviceSynchronize();
    check(f.words[3] == 1 && cudaStreamQuery(f.first) == cudaSuccess, "all has been done once the device is synchronised");
}

void work_is_in_order() {
    Fixture f;
    start({f.words, 1, f.words + 1, 5}, f.first);
    cudaMemcpyAsync(f.words + 2, f.words + 1, 8, cudaMemcpyDeviceToDevice, f.first);
    cudaMemsetAsync(f.words + 1, 0, 8, f.first);
    WaitParams p{f.words + 1, 0, f.words + 3, 6};
    start(p, f.first);
    Word value = 7;
    cudaMemcpyAsync(f.words + 4, &value, 8, cudaMemcpyHostToDevice, f.first);
    p.then = value = 8;
    check(f.words[2] == 0, "a copy waits for the kernel before it");
    store_release(f.words, 1);
    cudaDeviceSynchronize();
    check(f.words[2] == 5 && f.words[1] == 0, "copies are made in order");
    check(f.words[3] == 6 && f.words[4] == 7, "parameters and the host's memory are read at the call");
}

void events_order_streams() {
    Fixture f;
    check(cudaEventQuery(f.event) == cudaSuccess, "an event that was never recorded has passed");
    cudaEventRecord(f.event, nullptr);
    check(cudaEventQuery(f.event) == cudaSuccess, "an event of the null stream has passed at once");
    start({f.words, 1, f.words + 1, 1}, f.first);
    cudaEventRecord(f.event, f.first);
    check(cudaEventQuery(f.event) == cudaErrorNotReady, "an event has not passed while a kernel before it runs");
    cudaStreamWaitEvent(f.second, f.event, 0);
    start({f.words + 1, 0, f.words + 2, 1}, f.second);
    start({f.words + 3, 1, f.words + 4, 1}, f.first);
    cudaEventRecord(f.event, f.first);  // the wait of the second stream is for the record before
    check(load_relaxed(f.words + 2) == 0, "a stream waits for an event of another");
    store_release(f.words, 1);
    cudaStreamSynchronize(f.second);
    check(f.words[2] == 1 && f.words[4] == 0, "a wait is for the record that was the last when it was asked for");
    start({f.words + 2, 0, f.words + 3, 1}, f.second);
    cudaStreamWaitEvent(nullptr, f.event, 0);
    check(f.words[4] == 1 && cudaEventQuery(f.event) == cudaSuccess, "the null stream waits for an event before the call returns");
}

void a_destroyed_stream_ends_its_work() {
    Fixture f;
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, 0) == cudaErrorInvalidValue, "there are no streams that wait for the null stream");
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    start({f.words, 1, f.words + 1, 1}, stream);
    cudaEventRecord(f.event, stream);
    cudaStreamDestroy(stream);
    store_release(f.words, 1);
    cudaStreamWaitEvent(nullptr, f.event, 0);
    check(f.words[1] == 1, "work on a destroyed stream is done");
}

}  // namespace
}  // namespace deepep_moe

int main() {
    for (int round = 0; round < 20; ++round) {
        deepep_moe::kernels_wait_for_later_ones();
        deepep_moe::work_is_in_order();
        deepep_moe::events_order_streams();
        deepep_moe::a_destroyed_stream_ends_its_work();
    }
    std::printf("all as promised\n");
    // A process may end while a kernel runs.
    deepep_moe::Fixture* const left = new deepep_moe::Fixture;
    deepep_moe::start({left->words, 1, left->words + 1, 1}, left->first);
    return 0;
}
