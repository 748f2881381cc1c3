// Vectors of one instruction set, in the compiler's own vector types: the same lines serve 16, 32 and 64 bytes.
//
// Included by the files that are compiled once per instruction set, each time with another REGARDANT_ISA (the
// namespace), REGARDANT_BYTES (a vector's width) and the flags that allow it. Nothing of the C++ library is used
// in such files: an inline function of std:: compiled for a newer machine could be the copy that the linker keeps.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace regardant::REGARDANT_ISA {

using i64 = std::int64_t;

// What follows in registers: V, W numbers; I, W integers of the same size, which also are masks: −1 for true.
template <class A>
struct Simd;

template <>
struct Simd<float> {
    static constexpr int W = REGARDANT_BYTES / 4;
    typedef float V __attribute__((vector_size(REGARDANT_BYTES)));
    typedef std::int32_t I __attribute__((vector_size(REGARDANT_BYTES)));
    typedef std::int32_t Int;
};

template <>
struct Simd<double> {
    static constexpr int W = REGARDANT_BYTES / 8;
    typedef double V __attribute__((vector_size(REGARDANT_BYTES)));
    typedef std::int64_t I __attribute__((vector_size(REGARDANT_BYTES)));
    typedef std::int64_t Int;
};

template <class A>
using Vec = typename Simd<A>::V;
template <class A>
using Ints = typename Simd<A>::I;

template <class A>
inline Vec<A> load(const A* from) {
    Vec<A> v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class A>
inline void store(A* to, Vec<A> v) {
    std::memcpy(to, &v, sizeof v);
}

template <class A>
inline Vec<A> all(A a) {
    return a - Vec<A>{};
}

// Of two numbers the larger; where one is NaN, b.
inline Vec<float> larger(Vec<float> a, Vec<float> b) {
#if REGARDANT_BYTES == 64 && defined(__AVX512F__)
    return (Vec<float>)_mm512_max_ps((__m512)a, (__m512)b);
#elif REGARDANT_BYTES == 32 && defined(__AVX__)
    return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b);
#elif REGARDANT_BYTES == 16 && defined(__SSE2__)
    return (Vec<float>)_mm_max_ps((__m128)a, (__m128)b);
#else
    return a > b ? a : b;
#endif
}

inline Vec<double> larger(Vec<double> a, Vec<double> b) { return a > b ? a : b; }

// One bit per lane in which the mask, of as many lanes as there are numbers of A in a vector, is set.
template <class A>
inline unsigned bits(Ints<A> mask) {
    if constexpr (sizeof(A) == 4) {
#if REGARDANT_BYTES == 64 && defined(__AVX512F__)
        return _mm512_movepi32_mask((__m512i)mask);
#elif REGARDANT_BYTES == 32 && defined(__AVX__)
        return static_cast<unsigned>(_mm256_movemask_ps((__m256)mask));
#elif REGARDANT_BYTES == 16 && defined(__SSE2__)
        return static_cast<unsigned>(_mm_movemask_ps((__m128)mask));
#endif
    }
    unsigned set = 0;
    for (int i = 0; i < Simd<A>::W; ++i) set |= static_cast<unsigned>(mask[i] != 0) << i;
    return set;
}

// e^x for x <= 0, or NaN. Where it is under 2^−126.5, as for −∞, exactly 0. Relative error under (1.5 + |x|/4) · 2^−24,
// most of it of the rounded log₂e; without fused multiplication |x| · 2^−24 more.
inline Vec<float> exp_negative(Vec<float> x) {
    using V = Vec<float>;
    V z = larger(all(-88.029692f), x);                     // −127 · ln 2; in this order NaN stays
    V shifted = z * 1.44269504088896341f + 12582912.0f;    // 1.5 · 2^23: the nearest integer n, in the low bits
    V f = z * 1.44269504088896341f - (shifted - 12582912.0f);  // y − n, in [−½, ½], fused before y is rounded
    V p = all(1.5353362e-4f);                              // 2^f: minimax of relative error, exact at 0
    p = p * f + 1.3398875e-3f;
    p = p * f + 9.61843692e-3f;
    p = p * f + 5.55033237e-2f;
    p = p * f + 2.40226477e-1f;
    p = p * f + 6.93147182e-1f;
    p = p * f + 1.0f;
    Ints<float> exponent = (((Ints<float>)shifted) << 23) + (127 << 23);
    return p * (V)exponent;
}

inline Vec<double> exp_negative(Vec<double> x) {
    Vec<double> y;
    for (int i = 0; i < Simd<double>::W; ++i) y[i] = __builtin_exp(x[i]);
    return y;
}

// tanh, to a few units in the last place.
inline Vec<float> tanh_of(Vec<float> x) {
    using V = Vec<float>;
    V a = x < 0 ? -x : x;
    V e = exp_negative(a * -2.0f);
    V far = 1.0f - 2.0f * e / (1.0f + e);
    V z = x * x;                                           // near 0: x + x³·P(x²), minimax likewise
    V p = all(-5.704983e-3f);
    p = p * z + 2.0639084e-2f;
    p = p * z - 5.3739715e-2f;
    p = p * z + 1.3331442e-1f;
    p = p * z - 3.333328e-1f;
    V near = p * z * x + x;
    return a < 0.625f ? near : (x < 0 ? -far : far);
}

inline Vec<double> tanh_of(Vec<double> x) {
    Vec<double> y;
    for (int i = 0; i < Simd<double>::W; ++i) y[i] = __builtin_tanh(x[i]);
    return y;
}

// Two vectors taken together, lane by lane: a0 b0 a1 b1 … in `low` and then `high`.
template <class A>
inline void zip(Vec<A> a, Vec<A> b, Vec<A>& low, Vec<A>& high) {
    constexpr int W = Simd<A>::W;
    if constexpr (W == 2) {
        low = __builtin_shufflevector(a, b, 0, 2);
        high = __builtin_shufflevector(a, b, 1, 3);
    } else if constexpr (W == 4) {
        low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
        high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    } else if constexpr (W == 8) {
        low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
        high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    } else {
        low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
}

// Rows become columns, in place.
template <class A>
inline void transpose(Vec<A> (&rows)[Simd<A>::W]) {
    constexpr int W = Simd<A>::W;
#pragma GCC unroll 8
    for (int step = 1; step < W; step *= 2) {
        Vec<A> zipped[W];
#pragma GCC unroll 16
        for (int i = 0; i < W / 2; ++i) zip<A>(rows[i], rows[i + W / 2], zipped[2 * i], zipped[2 * i + 1]);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) rows[i] = zipped[i];
    }
}

template <class A>
inline A sum(Vec<A> v) {
    // By halves, so that the order is the same for every caller.
    A lanes[Simd<A>::W];
    store(lanes, v);
    for (int width = Simd<A>::W / 2; width; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

}  // namespace regardant::REGARDANT_ISA
