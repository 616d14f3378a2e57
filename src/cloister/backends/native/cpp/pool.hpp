// A team of threads that works on one list of tasks after another. Between lists a worker spins for a while, so that the many
// short lists of a step cost little, then sleeps, so that an idle server takes no time. Threads are not pinned: where cores are
// shared, the system knows better. The threads end before a fork; parent and child start others when they have work for them.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace cloister {

class Pool {
public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return int(shares_.size()); }

    // Waits until nobody else uses the team, and keeps it until the lock goes: for a whole step, whose buffers are used by one
    // caller at a time too. Who waits must not hold the GIL.
    std::unique_lock<std::mutex> take_turn() { return std::unique_lock<std::mutex>(turn_); }

    // Calls work(task, thread) for every task; the caller is thread 0. Each thread has a run of neighbouring tasks, `grain` of
    // which it takes at a time, and helps the others when it is done. The work must not throw. The caller has the turn.
    template <class Work> void run(int num_tasks, Work&& work, int grain = 1) {
        if (num_tasks <= grain || num_threads() == 1) {
            for (int task = 0; task < num_tasks; task++) work(task, 0);
            return;
        }
        using Plain = std::remove_reference_t<Work>;
        share(num_tasks, grain, [](void* w, int task, int thread) { (*static_cast<Plain*>(w))(task, thread); }, (void*)&work);
    }

    // Calls work(thread) once on every thread.
    template <class Work> void run_on_each(Work&& work) {
        using Plain = std::remove_reference_t<Work>;
        helps_ = false;
        share(num_threads(), 1, [](void* w, int, int thread) { (*static_cast<Plain*>(w))(thread); }, (void*)&work);
        helps_ = true;
    }

private:
    using Call = void (*)(void*, int, int);

    static void before_fork();
    static void after_fork();
    void start();
    void stop();
    void end_workers();
    void share(int num_tasks, int grain, Call call, void* work);
    void take(int thread);
    void serve(int thread);

    std::mutex turn_;
    std::vector<std::thread> workers_;
    Call call_ = nullptr;
    void* work_ = nullptr;
    int grain_ = 1;
    bool helps_ = true;  // whether a thread takes tasks of others
    struct alignas(64) Share { std::atomic<int> next{0}; int end = 0; };
    std::vector<Share> shares_;
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<int> busy_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stopping_{false};
};

}  // namespace cloister
