#include "runtime/nvlink/watch.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace deepep_moe {
namespace {

// Blocks signals for the calling thread and the threads that it starts.
class SignalsBlocked {
public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

private:
    sigset_t before_;
};

}  // namespace

// Owns the thread, which runs while there are watches.
class Watcher {
public:
    static Watcher& get() {
        static auto* const instance = new Watcher;  // never destroyed, because its thread may be the last to run
        return *instance;
    }

    // CUDA frees the words that watches write when it ends, so no watch may be left then. Exit handlers set later run earlier.
    Watcher() {
        std::atexit([] {
            if (getpid() == get().owner_pid_) get().remove_all();
        });
    }

    void add(Watch* watch) {
        const std::lock_guard lock(mutex_);
        if (!is_running_) start();
        is_running_ = true;
        watches_.push_back(watch);
    }

    void remove(Watch* watch) {
        const std::lock_guard lock(mutex_);
        std::erase(watches_, watch);
        changed_.notify_all();
    }

    void remove_all() {
        const std::lock_guard lock(mutex_);
        watches_.clear();
    }

private:
    static constexpr auto kBetweenLooks = std::chrono::milliseconds(100);

    void start() {
        const SignalsBlocked blocked;  // signals are for the program's own threads
        std::thread([this] { run(); }).detach();
    }

    void run() {
        std::unique_lock lock(mutex_);
        while (!watches_.empty()) {
            look();
            changed_.wait_for(lock, kBetweenLooks);
        }
        is_running_ = false;
    }

    void look() {
        std::map<Process, bool> gone;  // a cache, because buffers mostly have the same ranks
        for (const Watch* watch : watches_)
            for (size_t rank = 0; rank < watch->processes_.size(); ++rank) {
                const Process& process = watch->processes_[rank];
                const auto [entry, is_new] = gone.try_emplace(process);
                if (is_new) entry->second = process.is_gone();
                if (entry->second) watch->ended_->fetch_or(1u << (watch->first_ + rank));
            }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Watch*> watches_;
    bool is_running_ = false;
    const int owner_pid_ = getpid();
};

Watch::Watch(std::vector<Process> processes, std::atomic<unsigned>* ended, int first_rank)
    : processes_(std::move(processes)), ended_(ended), first_(first_rank), owner_pid_(getpid()) {
    Watcher::get().add(this);
}

Watch::~Watch() {
    if (getpid() == owner_pid_) Watcher::get().remove(this);
}

}  // namespace deepep_moe
