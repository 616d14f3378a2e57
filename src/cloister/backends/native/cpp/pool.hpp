// A team of threads that works on one list of tasks after another. Between lists a worker spins for a while, so that the many
// short lists of a step cost little, then sleeps, so that an idle server takes no time. Threads are not pinned: where cores are
// shared, the system knows better.
#pragma once
#include <atomic>
#include <cstdint>
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

    int num_threads() const { return int(workers_.size()) + 1; }

    // Calls work(task, thread) for every task; the caller is thread 0. Each thread has a run of neighbouring tasks, `grain` of
    // which it takes at a time, and helps the others when it is done. The work must not throw. One caller at a time.
    template <class Work> void run(int num_tasks, Work&& work, int grain = 1) {
        if (num_tasks <= grain || workers_.empty()) {
            for (int task = 0; task < num_tasks; task++) work(task, 0);
            return;
        }
        using Plain = std::remove_reference_t<Work>;
        share(num_tasks, grain, [](void* w, int task, int thread) { (*static_cast<Plain*>(w))(task, thread); }, (void*)&work);
    }

private:
    using Call = void (*)(void*, int, int);

    void share(int num_tasks, int grain, Call call, void* work);
    void take(int thread);
    void serve(int thread);

    std::vector<std::thread> workers_;
    Call call_ = nullptr;
    void* work_ = nullptr;
    int grain_ = 1;
    struct alignas(64) Share { std::atomic<int> next{0}; int end = 0; };
    std::vector<Share> shares_;
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<int> busy_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stopping_{false};
};

}  // namespace cloister
