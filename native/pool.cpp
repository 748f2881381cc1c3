#include "pool.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif
#elif defined(_WIN32)
#include <malloc.h>
#endif

namespace regardant {
namespace {

// Which processors a thread may run on. Linux alone lets it be chosen for another thread; elsewhere nothing is done.
class Processors {
  public:
#if defined(__linux__)
    using Thread = pthread_t;
    static Thread this_thread() { return pthread_self(); }

    // Those of the calling thread, and those but the one that it is on.
    Processors() {
        if (sched_getaffinity(0, sizeof all_, &all_) != 0) return;
        others_ = all_;
        const int here = sched_getcpu();
        if (here >= 0 && here < CPU_SETSIZE) CPU_CLR(here, &others_);
        known_ = CPU_COUNT(&others_) > 0;
    }

    void keep_to_others(Thread thread) const {
        if (known_) pthread_setaffinity_np(thread, sizeof others_, &others_);
    }

    void allow_all() const {
        if (known_) pthread_setaffinity_np(pthread_self(), sizeof all_, &all_);
    }

  private:
    cpu_set_t all_, others_;
    bool known_ = false;
#else
    struct Thread {};
    static Thread this_thread() { return {}; }
    void keep_to_others(Thread) const {}
    void allow_all() const {}
#endif
};

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

// All of it is guarded by the pool's mutex.
struct Helper {
    Processors::Thread thread;
    std::condition_variable called;
    bool awake = true;
};

class Pool {
  public:
    void run(Job& job) {
        // Where another library's threads still spin on the other cores, or where the system saves cores, a thread is often
        // woken on its caller's own core, and waits there for the caller to end.
        const Processors processors;
        {
            std::lock_guard lock(mutex_);
            grow(job.wanted);
            jobs_.push_back({&job, &processors});
            for (int calls = job.wanted; calls > 0 && !idle_.empty(); --calls) {
                Helper& helper = *idle_.back();
                idle_.pop_back();
                helper.awake = true;
                processors.keep_to_others(helper.thread);
                helper.called.notify_one();
            }
        }
        job.run();
        std::unique_lock lock(mutex_);
        remove(job);                         // whoever has not come by now is not needed
        left_.wait(lock, [&] { return job.helping == 0; });
    }

  private:
    struct Call {
        Job* job;
        const Processors* processors;        // of the caller
    };

    // A machine that refuses a thread still computes, on fewer.
    void grow(int wanted) {
        for (; helpers_ < wanted; ++helpers_) {
            try {
                idle_.reserve(static_cast<std::size_t>(wanted));
                std::thread([this] { help(); }).detach();
            } catch (const std::exception&) {
                return;
            }
        }
    }

    void help() {
        Helper self{Processors::this_thread(), {}};
        std::unique_lock lock(mutex_);
        for (;;) {
            while (jobs_.empty()) {
                self.awake = false;
                idle_.push_back(&self);
                self.called.wait(lock, [&] { return self.awake; });
            }
            const auto [job, processors] = jobs_.front();
            ++job->helping;
            if (--job->wanted == 0) remove(*job);
            lock.unlock();
            processors->allow_all();
            job->run();
            lock.lock();
            remove(*job);
            if (--job->helping == 0) left_.notify_all();
        }
    }

    void remove(const Job& job) {
        const auto at = std::find_if(jobs_.begin(), jobs_.end(), [&](const Call& call) { return call.job == &job; });
        if (at != jobs_.end()) jobs_.erase(at);
    }

    std::mutex mutex_;
    std::condition_variable left_;
    std::vector<Call> jobs_;
    std::vector<Helper*> idle_;
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
