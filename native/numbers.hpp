// Numbers as they lie in the caller's arrays, read as the type the kernels compute in, and written back.
#pragma once

#include "problem.hpp"
#include "simd.hpp"

namespace regardant::REGARDANT_ISA {

struct Half {
    std::uint16_t bits;
};
struct Brain {
    std::uint16_t bits;
};

inline i64 size_of(Type type) {
    return type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2;
}

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline double widen(double x) { return x; }
inline float widen(float x) { return x; }
inline float widen(Brain x) { return bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }
inline float widen(Half x) {
    const std::uint32_t sign = (x.bits & 0x8000u) << 16, rest = (x.bits & 0x7fffu) << 13;
    // Exponents move by 2^112, which also makes subnormals normal; the largest one means Inf or NaN.
    const std::uint32_t wide =
        rest >= 0x0f800000u ? rest | 0x7f800000u : bit_cast<std::uint32_t>(bit_cast<float>(rest) * 0x1p112f);
    return bit_cast<float>(wide | sign);
}

inline void narrow(double x, double& to) { to = x; }
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, Brain& to) {
    const auto b = bit_cast<std::uint32_t>(x);
    to.bits = static_cast<std::uint16_t>(x != x ? (b >> 16) | 0x40u : (b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
inline void narrow(float x, Half& to) {
    const auto b = bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = (b >> 16) & 0x8000u, rest = b & 0x7fffffffu;
    std::uint32_t half;
    if (rest > 0x7f800000u) {
        half = 0x7e00u;
    } else if (rest >= 0x477ff000u) {  // rounds to 2^16 or more
        half = 0x7c00u;
    } else if (rest < 0x38800000u) {   // subnormal: ½ has its unit, so the adder rounds
        half = bit_cast<std::uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000u;
    } else {
        half = (rest + 0xfffu + ((rest >> 13) & 1u) - 0x38000000u) >> 13;
    }
    to.bits = static_cast<std::uint16_t>(half | sign);
}

// W numbers in a row, widened.
inline Vec<float> load_wide(const float* from) { return load(from); }
inline Vec<double> load_wide(const double* from) { return load(from); }

inline Vec<float> load_wide(const Brain* from) {
#if REGARDANT_BYTES == 64 && defined(__AVX512F__)
    const __m256i shorts = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return (Vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(shorts), 16);
#elif REGARDANT_BYTES == 32 && defined(__AVX2__)
    const __m128i shorts = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(shorts), 16);
#else
    typedef std::uint16_t Shorts __attribute__((vector_size(REGARDANT_BYTES / 2)));
    typedef std::uint32_t Words __attribute__((vector_size(REGARDANT_BYTES)));
    Shorts shorts;
    std::memcpy(&shorts, from, sizeof shorts);
    return (Vec<float>)(__builtin_convertvector(shorts, Words) << 16);
#endif
}

inline Vec<float> load_wide(const Half* from) {
#if REGARDANT_BYTES == 64 && defined(__AVX512F__)
    return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif REGARDANT_BYTES == 32 && defined(__F16C__)
    return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Vec<float> wide;
    for (int i = 0; i < Simd<float>::W; ++i) wide[i] = widen(from[i]);
    return wide;
#endif
}

// W numbers in a row, narrowed, for the types that take half the width.
inline void store_narrow(Brain* to, Vec<float> x) {
    typedef std::uint16_t Shorts __attribute__((vector_size(REGARDANT_BYTES / 2)));
    typedef std::uint32_t Words __attribute__((vector_size(REGARDANT_BYTES)));
    const Words b = (Words)x, rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    const Shorts shorts = __builtin_convertvector(x != x ? (b >> 16) | 0x40u : rounded, Shorts);
    std::memcpy(to, &shorts, sizeof shorts);
}

inline void store_narrow(Half* to, Vec<float> x) {
#if REGARDANT_BYTES == 64 && defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif REGARDANT_BYTES == 32 && defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < Simd<float>::W; ++i) narrow(x[i], to[i]);
#endif
}

// Call f with a pointer of the array's own type.
template <class F>
inline auto typed(Type type, const char* data, F&& f) {
    switch (type) {
        case Type::float64: return f(reinterpret_cast<const double*>(data));
        case Type::float32: return f(reinterpret_cast<const float*>(data));
        case Type::float16: return f(reinterpret_cast<const Half*>(data));
        default: return f(reinterpret_cast<const Brain*>(data));
    }
}

// Rows of an array as contiguous rows of A, `pitch` apart, filled up with zeros to that length.
template <class A>
inline void widen_rows(Type type, const char* data, i64 row, i64 column, i64 rows, i64 columns, A* to, i64 pitch) {
    typed(type, data, [&](auto* from) {
        constexpr int W = Simd<A>::W;
        for (i64 r = 0; r < rows; ++r) {
            i64 c = 0;
            if constexpr (sizeof(A) == 4 && sizeof(*from) < 8) {
                if (column == 1) {
                    for (; c + W <= columns; c += W) store<A>(to + r * pitch + c, load_wide(from + r * row + c));
                }
            }
            for (; c < columns; ++c) to[r * pitch + c] = static_cast<A>(widen(from[r * row + c * column]));
            for (; c < pitch; ++c) to[r * pitch + c] = 0;
        }
    });
}

inline double read(Type type, const char* data, i64 at) {
    return typed(type, data, [at](auto* from) { return static_cast<double>(widen(from[at])); });
}

template <class T>
struct Plain {
    using Is = T;
};
template <class T>
struct Plain<const T&> {
    using Is = T;
};
template <class T>
struct Plain<const T> {
    using Is = T;
};

// A contiguous row of A into the caller's array.
template <class A>
inline void narrow_row(Type type, const A* from, i64 count, char* to) {
    typed(type, to, [&](auto* start) {
        using To = typename Plain<__typeof__(*start)>::Is;
        if constexpr ((sizeof(A) == 8) == (sizeof(To) == 8)) {
            To* const out = const_cast<To*>(start);
            i64 i = 0;
            if constexpr (sizeof(A) == sizeof(To)) {
                std::memcpy(out, from, static_cast<std::size_t>(count) * sizeof(A));
                i = count;
            } else {
                for (; i + Simd<float>::W <= count; i += Simd<float>::W) store_narrow(out + i, load(from + i));
            }
            for (; i < count; ++i) narrow(from[i], out[i]);
        }
    });
}

}  // namespace regardant::REGARDANT_ISA
