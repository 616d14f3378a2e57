#include "pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cloister {

namespace {

constexpr auto spin_time = std::chrono::microseconds(80);  // longer than from list to list, shorter than from step to step

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void sleep_until_changed(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    word.wait(seen);
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
    word.notify_all();
#endif
}

// All teams, so that a fork can wait for the steps that they are in.
struct Teams {
    std::mutex mutex;
    std::vector<Pool*> pools;
};

Teams& teams() {
    static Teams* all = new Teams;  // a team may end after static objects did
    return *all;
}

}  // namespace

// A fork comes between two steps (pthread_atfork(3)): buffers and KV are whole in the child, and no lock is held by a thread that
// it does not have. The threads end before, so that a process that forks and has nothing else to do has one thread.
void Pool::before_fork() {
    teams().mutex.lock();
    for (Pool* pool : teams().pools) {
        pool->turn_.lock();
        pool->end_workers();
    }
}

void Pool::after_fork() {
    for (Pool* pool : teams().pools) pool->turn_.unlock();
    teams().mutex.unlock();
}

Pool::Pool(int num_threads) : shares_(size_t(num_threads > 1 ? num_threads : 1)) {
    static const int watching = pthread_atfork(before_fork, after_fork, after_fork);
    if (watching != 0) throw std::bad_alloc();
    auto turn = take_turn();
    {
        std::lock_guard<std::mutex> lock(teams().mutex);
        teams().pools.push_back(this);
    }
    try {
        start();
    } catch (...) {
        turn.unlock();
        stop();
        throw;
    }
}

Pool::~Pool() { stop(); }

void Pool::start() {
    while (int(workers_.size()) < num_threads() - 1) {
        int thread = int(workers_.size()) + 1;
        workers_.emplace_back([this, thread] { serve(thread); });
    }
}

void Pool::stop() {
    {
        std::lock_guard<std::mutex> lock(teams().mutex);
        std::vector<Pool*>& pools = teams().pools;
        pools.erase(std::find(pools.begin(), pools.end(), this));
    }
    end_workers();
}

void Pool::end_workers() {
    stopping_ = true;
    generation_.fetch_add(1);
    wake_all(generation_);
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
    generation_ = 0;  // where those that start later begin
}

void Pool::share(int num_tasks, int grain, Call call, void* work) {
    if (int(workers_.size()) < num_threads() - 1) start();
    call_ = call;
    work_ = work;
    grain_ = grain;
    int threads = num_threads();
    for (int thread = 0; thread < threads; thread++) {
        shares_[size_t(thread)].next.store(int(int64_t(num_tasks) * thread / threads), std::memory_order_relaxed);
        shares_[size_t(thread)].end = int(int64_t(num_tasks) * (thread + 1) / threads);
    }
    busy_.store(threads - 1, std::memory_order_relaxed);
    generation_.fetch_add(1);  // sequentially consistent, and so ordered against the count of sleepers
    if (sleeping_.load()) wake_all(generation_);
    take(0);
    for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; spins++) {
        pause_briefly();
        if (spins > 1000) std::this_thread::yield();  // the core that a worker needs may be this one
    }
}

void Pool::take(int thread) {
    int threads = num_threads();
    for (int turn = 0; turn < (helps_ ? threads : 1); turn++) {
        Share& share = shares_[size_t((thread + turn) % threads)];
        while (true) {
            int task = share.next.fetch_add(grain_, std::memory_order_relaxed);
            if (task >= share.end) break;
            int end = task + grain_ < share.end ? task + grain_ : share.end;
            for (; task < end; task++) call_(work_, task, thread);
        }
    }
}

void Pool::serve(int thread) {
    uint32_t seen = 0;
    while (true) {
        auto give_up = std::chrono::steady_clock::now() + spin_time;
        for (int spins = 0; generation_.load(std::memory_order_acquire) == seen; spins++) {
            pause_briefly();
            if (spins % 64 != 63 || std::chrono::steady_clock::now() < give_up) continue;
            sleeping_.fetch_add(1);
            while (generation_.load() == seen) sleep_until_changed(generation_, seen);
            sleeping_.fetch_sub(1);
        }
        seen = generation_.load(std::memory_order_acquire);
        if (stopping_) return;
        take(thread);
        busy_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace cloister
