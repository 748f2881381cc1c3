// What this machine can do, for benchmarks to be shares of: multiply-adds in registers, and reads from memory.
#include "tile.hpp"

namespace regardant::REGARDANT_ISA {

// `rounds` rounds on every thread; returns the floating-point operations done, a multiply-add counted as two.
double multiply_adds(i64 rounds, int threads) {
    using V = Vec<float>;
    constexpr int chains = 12;               // more than latency times units of any machine that this is compiled for
    const auto work = [rounds](i64) {
        V sums[chains];
        for (int i = 0; i < chains; ++i) sums[i] = all(1.0f + static_cast<float>(i));
        const V factor = all(0.999f), addend = all(0.001f);
        for (i64 round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
            for (int i = 0; i < chains; ++i) sums[i] = sums[i] * factor + addend;
        }
        V total{};
        for (int i = 0; i < chains; ++i) total += sums[i];
        return sum<float>(total) != 0;       // so that the work is not optimised away
    };
    each(threads, threads, work);
    return 2.0 * chains * Simd<float>::W * static_cast<double>(rounds) * threads;
}

// Reads `bytes` from `data`, each thread a part of it; returns a number that depends on all of them.
bool read_all(const char* data, i64 bytes, int threads) {
    const i64 part = bytes / threads / 4096 * 4096;
    return each(threads, threads, [=](i64 task) {
        constexpr int streams = 8, W = Simd<float>::W;
        const float* const from = reinterpret_cast<const float*>(data + task * part);
        Ints<float> sums[streams] = {};
        for (i64 i = 0; i + streams * W <= part / 4; i += streams * W) {
#pragma GCC unroll 8
            for (int s = 0; s < streams; ++s) sums[s] ^= (Ints<float>)load(from + i + s * W);
        }
        Ints<float> total{};
        for (int s = 0; s < streams; ++s) total ^= sums[s];
        unsigned mixed = 0;
        for (int i = 0; i < W; ++i) mixed ^= static_cast<unsigned>(total[i]);
        return mixed != 0x5bd1e995u;         // so that the reads are not optimised away
    });
}

}  // namespace regardant::REGARDANT_ISA
