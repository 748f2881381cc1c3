// Threads for the kernels: started when first needed, kept, shared by every caller, rebuilt after a fork.
#pragma once

#include <cstdint>

namespace regardant {

// Do work(context, task) for every task in 0 … tasks − 1 on up to `threads` threads, the caller's among them, and
// return when all are done: true if every one returned true. Tasks begin in order. May be called from many
// threads at once; the caller works whether or not others come to help, so no call waits for another.
bool parallel(std::int64_t tasks, int threads, bool (*work)(void* context, std::int64_t task), void* context);

// Tasks that add to the same memory take turns, so that sums have one order. A task waits until `turn` is `mine`; what
// was written before the turn was passed is then seen. For as long as a task waits for earlier ones alone, none waits
// for ever: tasks begin in order.
void wait_for_turn(const std::int64_t& turn, std::int64_t mine);
void pass_turn(std::int64_t& turn, std::int64_t next);

// Memory that begins on a cache line, for so many bytes, or null; to be given back by `release`.
void* allocate(std::int64_t bytes);
void release(void* memory);

// At least so many bytes, in whole cache lines, for the calling thread's own use until it asks again; null if there
// are none. The memory stays with the thread: to fetch it anew for every task would cost more than small tasks do.
void* workspace(std::int64_t bytes);

}  // namespace regardant
