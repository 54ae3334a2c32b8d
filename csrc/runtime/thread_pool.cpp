#include "runtime/thread_pool.h"

namespace deepep_moe {

ThreadPool::ThreadPool(int num_threads) {
    for (int index = 1; index < num_threads; ++index) threads_.emplace_back([this, index] { work(index); });
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::abandon() {
    // Destroying a joinable std::thread would terminate; the handles are left behind on purpose.
    new std::vector<std::thread>(std::move(threads_));
    threads_.clear();
}

void ThreadPool::run(const std::function<void(int)>& job) {
    {
        std::lock_guard lock(mutex_);
        job_ = &job;
        running_ = static_cast<int>(threads_.size());
        error_ = nullptr;
        ++round_;
    }
    wake_.notify_all();
    std::exception_ptr own_error;
    try {
        job(0);
    } catch (...) {
        own_error = std::current_exception();
    }
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return running_ == 0; });
    if (own_error || error_) std::rethrow_exception(own_error ? own_error : error_);
}

void ThreadPool::work(int index) {
    for (uint64_t seen = 0;;) {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
        if (stopping_) return;
        seen = round_;
        const std::function<void(int)>& job = *job_;
        lock.unlock();
        std::exception_ptr error;
        try {
            job(index);
        } catch (...) {
            error = std::current_exception();
        }
        lock.lock();
        if (error && !error_) error_ = error;
        if (--running_ == 0) idle_.notify_one();
    }
}

}  // namespace deepep_moe
