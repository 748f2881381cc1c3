#include "pool.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#elif defined(_WIN32)
#include <malloc.h>
#endif

namespace regardant {
namespace {

struct Job {
    std::int64_t tasks;
    bool (*work)(void*, std::int64_t);
    void* context;
    int wanted;                              // helpers that may still join; guarded by the pool's mutex
    int helping = 0;                         // helpers inside; guarded by the pool's mutex
    std::atomic<std::int64_t> next{0};
    std::atomic<bool> good{true};

    void run() {
        for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
            if (!work(context, task)) good.store(false, std::memory_order_relaxed);
        }
    }
};

class Pool {
  public:
    void run(Job& job) {
        int calls;
        {
            std::lock_guard lock(mutex_);
            grow(job.wanted);
            calls = std::min(job.wanted, helpers_);
            if (calls > 0) jobs_.push_back(&job);
        }
        for (int i = 0; i < calls; ++i) called_.notify_one();
        job.run();
        std::unique_lock lock(mutex_);
        // Whoever has not come by now is not needed.
        if (auto at = std::find(jobs_.begin(), jobs_.end(), &job); at != jobs_.end()) jobs_.erase(at);
        left_.wait(lock, [&] { return job.helping == 0; });
    }

  private:
    // A machine that refuses a thread still computes, on fewer.
    void grow(int wanted) {
        for (; helpers_ < wanted; ++helpers_) {
            try {
                std::thread([this] { help(); }).detach();
            } catch (const std::system_error&) {
                return;
            }
        }
    }

    void help() {
        std::unique_lock lock(mutex_);
        for (;;) {
            called_.wait(lock, [&] { return !jobs_.empty(); });
            Job& job = *jobs_.front();
            ++job.helping;
            if (--job.wanted == 0) jobs_.erase(jobs_.begin());
            lock.unlock();
            job.run();
            lock.lock();
            if (auto at = std::find(jobs_.begin(), jobs_.end(), &job); at != jobs_.end()) jobs_.erase(at);
            if (--job.helping == 0) left_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable called_, left_;
    std::vector<Job*> jobs_;
    int helpers_ = 0;
};

// Never destroyed: helpers may be asleep in it when the process ends.
alignas(Pool) unsigned char storage[sizeof(Pool)];
Pool* pool = new (storage) Pool;

#if defined(__unix__) || defined(__APPLE__)
// A forked child has none of its parent's helpers, and locks in whatever state they were: it begins anew.
const int registered = pthread_atfork(nullptr, nullptr, [] { pool = new (storage) Pool; });
#endif

struct Workspace {
    void* data = nullptr;
    std::int64_t bytes = 0;
    ~Workspace() { release(data); }
};
thread_local Workspace mine;

// Where steps beyond an array are looked for, not a byte more than was asked for, and anew each time.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool exact = true;
#else
constexpr bool exact = false;
#endif

}  // namespace

void wait_for_turn(const std::int64_t& turn, std::int64_t mine) {
    // The other thread is most often about to pass it. If it is not even running, it may want this core.
    for (int tries = 0; __atomic_load_n(&turn, __ATOMIC_ACQUIRE) != mine; ++tries) {
        if (tries >= 1000) std::this_thread::yield();
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }
}

void pass_turn(std::int64_t& turn, std::int64_t next) { __atomic_store_n(&turn, next, __ATOMIC_RELEASE); }

void* allocate(std::int64_t bytes) {
    const auto lines = static_cast<std::size_t>((bytes + 63) / 64 * 64);
#if defined(_WIN32)
    return _aligned_malloc(lines, 64);
#else
    return std::aligned_alloc(64, lines);
#endif
}

void release(void* memory) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    std::free(memory);
#endif
}

void* workspace(std::int64_t bytes) {
    if (bytes > mine.bytes || exact) {
        release(mine.data);
        mine.bytes = exact ? bytes : (bytes + 4095) / 4096 * 4096;
        mine.data = allocate(mine.bytes);
        if (!mine.data) mine.bytes = 0;
    }
    return mine.data;
}

bool parallel(std::int64_t tasks, int threads, bool (*work)(void*, std::int64_t), void* context) {
    Job job{tasks, work, context, static_cast<int>(std::min<std::int64_t>(threads, tasks)) - 1};
    if (job.wanted <= 0) {
        job.run();
    } else {
        pool->run(job);
    }
    return job.good.load();
}

}  // namespace regardant
