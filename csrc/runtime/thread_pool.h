// A few threads that run the channels of one call.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace deepep_moe {

class ThreadPool {
public:
    // `num_threads` counts the caller of `run`.
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;

    // Runs job(0) to job(num_threads - 1), job(0) in the caller. Rethrows the first exception once all are done.
    void run(const std::function<void(int)>& job);
    // Leaves the threads alone: for a process forked from their owner, where they do not exist.
    void abandon();

private:
    void work(int index);

    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    const std::function<void(int)>* job_ = nullptr;
    uint64_t round_ = 0;
    int running_ = 0;
    bool stopping_ = false;
    std::exception_ptr error_;
    std::vector<std::thread> threads_;
};

}  // namespace deepep_moe
