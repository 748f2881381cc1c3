// The two matrix products of attention for a full group of query rows: K · Qᵀ and Vᵀ · P, with the rows in lanes.
//
// Both are register tiles of M × N vectors: one number of K (or V), broadcast, meets N vectors of Q (or P). K and V
// are read where they lie.
#pragma once

#include "tile.hpp"

namespace regardant::REGARDANT_ISA {

// M · N accumulators, N vectors and a broadcast number fill the registers.
#if REGARDANT_BYTES == 64
constexpr int tile_rows = 12, tile_vectors = 2;
#elif defined(__aarch64__)
constexpr int tile_rows = 6, tile_vectors = 4;
#else
constexpr int tile_rows = 6, tile_vectors = 2;
#endif

template <class A, int M, int N = tile_vectors>
using Tile = Vec<A>[M][N];

// How numbers of one kind are multiplied and added: `spread` reads one for all lanes, `add` takes its products in.
template <class A>
struct Plainly {
    using Number = A;
    using Sum = A;

    static Vec<A> spread(const char* at) {
        A number;
        std::memcpy(&number, at, sizeof number);
        return all(number);
    }
    static Vec<A> vector(const A* from) { return load(from); }
    static Vec<A> add(Vec<A> sum, Vec<A> left, Vec<A> right) { return sum + left * right; }
};

// tile[m][lane] += Σ_i left[m][i] · right[i][lane], where left[m][i] lies m · between + i · step bytes on, and the
// vectors of i `pitch` numbers after those of i − 1.
// Unrolled: a taken branch for every i would take as long as what it guards.
template <class Maths, int M, int N = tile_vectors>
__attribute__((always_inline)) inline void multiply(const char* left, i64 between, i64 step,
                                                    const typename Maths::Number* right, i64 pitch, i64 count,
                                                    Tile<typename Maths::Sum, M, N>& tile) {
    constexpr int W = Simd<typename Maths::Sum>::W;
#pragma GCC unroll 4
    for (i64 i = 0; i < count; ++i) {
        decltype(Maths::vector(right)) vectors[N];
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) vectors[v] = Maths::vector(right + i * pitch + v * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const auto number = Maths::spread(left + m * between + i * step);
#pragma GCC unroll 4
            for (int v = 0; v < N; ++v) tile[m][v] = Maths::add(tile[m][v], number, vectors[v]);
        }
    }
}

// s[m][lane] = scale · Σ_i left[m][i] · right[i][lane].
template <class Maths, int M>
inline void product(const char* left, i64 between, i64 step, const typename Maths::Number* right, i64 count,
                    typename Maths::Sum scale, typename Maths::Sum* s) {
    using A = typename Maths::Sum;
    constexpr int N = tile_vectors, W = Simd<A>::W, L = N * W;
    Tile<A, M> tile = {};
    multiply<Maths, M>(left, between, step, right, L, count, tile);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) store<A>(s + m * L + v * W, tile[m][v] * scale);
    }
}

// o[m][lane] = fade[lane] · o[m][lane] + Σ_j v[j][m] · p[j][lane] for M columns of V. The sum over these keys is begun
// anew and then added: one chain of additions over all keys would lose a digit over some thousands of them.
template <class Maths, int M>
inline void mix_columns(const typename Maths::Number* p, i64 keys, const char* v_data, i64 row,
                        const Vec<typename Maths::Sum> (&fade)[tile_vectors], typename Maths::Sum* o) {
    using A = typename Maths::Sum;
    constexpr int N = tile_vectors, W = Simd<A>::W, L = N * W;
    Tile<A, M> tile = {};
    multiply<Maths, M>(v_data, sizeof(typename Maths::Number), row, p, L, keys, tile);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) {
            A* const at = o + m * L + v * W;
            store<A>(at, load(at) * fade[v] + tile[m][v]);
        }
    }
}

// Cut `count` rows into tiles of at most `tile_rows`, as equal as can be, and call f<M>(first row) for each: a small
// remainder would leave most of the registers idle.
template <int M, class F>
inline void call_tile(int rows, i64 first, const F& f) {
    if constexpr (M > 0) {
        if (rows == M) {
            f.template operator()<M>(first);
        } else {
            call_tile<M - 1>(rows, first, f);
        }
    }
}

template <class F>
inline void tiles(i64 count, const F& f) {
    const i64 parts = (count + tile_rows - 1) / tile_rows;
    for (i64 part = 0, first = 0; part < parts; ++part) {
        const i64 next = count * (part + 1) / parts;
        call_tile<tile_rows>(static_cast<int>(next - first), first, f);
        first = next;
    }
}

// All scores of some keys, and all columns of the values: rows of K and V are `row` bytes apart.
template <class Maths>
inline void scores(const void* k, i64 row, i64 keys, const typename Maths::Number* q, i64 count,
                   typename Maths::Sum scale, typename Maths::Sum* s) {
    constexpr int L = tile_vectors * Simd<typename Maths::Sum>::W;
    constexpr i64 item = sizeof(typename Maths::Number);
    const char* const start = static_cast<const char*>(k);
    tiles(keys, [=]<int M>(i64 first) {
        product<Maths, M>(start + first * row, row, item, q, count, scale, s + first * L);
    });
}

template <class Maths>
inline void mix(const typename Maths::Number* p, i64 keys, const void* v, i64 row, i64 E,
                const Vec<typename Maths::Sum> (&fade)[tile_vectors], typename Maths::Sum* o) {
    constexpr int L = tile_vectors * Simd<typename Maths::Sum>::W;
    constexpr i64 item = sizeof(typename Maths::Number);
    const char* const start = static_cast<const char*>(v);
    tiles(E, [&]<int M>(i64 first) { mix_columns<Maths, M>(p, keys, start + first * item, row, fade, o + first * L); });
}

// The queries of a group as (D, L), so that a vector holds one coordinate of W rows; empty lanes are 0.
template <class A>
inline void pack_queries(const Problem& p, const Group<A, tile_vectors>& g, A* q) {
    constexpr int W = Simd<A>::W, L = tile_vectors * W;
    constexpr i64 at_once = 64;
    const i64* strides = p.q.strides;
    const bool as_it_lies = p.type == (sizeof(A) == 8 ? Type::float64 : Type::float32) && strides[3] == 1;
    for (int first = 0; first < L; first += W) {
        A copies[W][at_once] = {};
        for (i64 from = 0; from < p.D; from += at_once) {
            const i64 width = smaller_of(at_once, p.D - from);
            const A* rows[W];
            for (int i = 0; i < W; ++i) {
                rows[i] = copies[i];
                if (first + i >= g.count) continue;
                const i64 at = g.b * strides[0] + g.head[first + i] * strides[1] + g.query[first + i] * strides[2];
                const char* data = p.q.data + (at + from * strides[3]) * size_of(p.type);
                if (as_it_lies && width % W == 0) {
                    rows[i] = reinterpret_cast<const A*>(data);
                } else {
                    widen_rows<A>(p.type, data, 0, strides[3], 1, width, copies[i], at_once);
                }
            }
            for (i64 d = 0; d < width; d += W) {
                Vec<A> square[W];
#pragma GCC unroll 16
                for (int i = 0; i < W; ++i) square[i] = load(rows[i] + d);
                transpose<A>(square);
                for (i64 i = 0; i < smaller_of(W, width - d); ++i) store<A>(q + (from + d + i) * L + first, square[i]);
            }
        }
    }
}

// Keys or values of one head as rows of A: where they lie if they lie so, else a copy of what is asked for.
template <class A>
class Rows_of {
  public:
    Rows_of(const Problem& p, const Array4& array, i64 b, i64 g, i64 width, A* copies)
        : type_(p.type), data_(array.data + (b * array.strides[0] + g * array.strides[1]) * size_of(p.type)),
          row_(array.strides[2]), column_(array.strides[3]), width_(width), copies_(copies) {}

    static bool in_place(const Problem& p, const Array4& array, i64 width) {
        return p.type == (sizeof(A) == 8 ? Type::float64 : Type::float32) && (array.strides[3] == 1 || width == 1);
    }

    // Rows [from, to); `pitch` is set to their distance.
    const A* rows(i64 from, i64 to, i64& pitch) const {
        const char* start = data_ + from * row_ * size_of(type_);
        if (!copies_) {
            pitch = row_;
            return reinterpret_cast<const A*>(start);
        }
        pitch = width_;
        widen_rows<A>(type_, start, row_, column_, to - from, width_, copies_, width_);
        return copies_;
    }

  private:
    Type type_;
    const char* data_;
    i64 row_, column_, width_;
    A* copies_;
};

// Whether a row, times 0, is all 0: neither Inf nor NaN in any of `count` rows.
template <class A>
bool finite(const A* rows, i64 pitch, i64 count, i64 width) {
    constexpr int W = Simd<A>::W;
    Vec<A> sums[2] = {};                     // of zeros, or of NaN
    A rest = 0;
    for (i64 r = 0; r < count; ++r) {
        const A* const row = rows + r * pitch;
        i64 c = 0;
        for (; c + 2 * W <= width; c += 2 * W) {
            sums[0] += load(row + c) * 0;
            sums[1] += load(row + c + W) * 0;
        }
        for (; c < width; ++c) rest += row[c] * 0;
    }
    return sum<A>(sums[0] + sums[1]) + rest == 0;
}

// Both products in A, whatever the arrays' type: the arithmetic of every instruction set. One head's keys and values
// at a time, and of these one block.
template <class In>
class Wide {
  public:
    using A = In;
    using Query = A;                         // what packed queries are made of
    static constexpr bool in_pairs = false;
    static constexpr i64 item = sizeof(A);

    static i64 bytes(const Problem& p, i64 block) {
        return padded(block * p.D * sizeof(A)) + padded(block * p.E * sizeof(A));
    }
    static i64 query_numbers(const Problem& p) { return p.D * tile_vectors * Simd<A>::W; }

    Wide(const Problem& p, i64 block, Scratch& scratch)
        : p_(p), k_copies_(Rows_of<A>::in_place(p, p.k, p.D) ? nullptr : scratch.take<A>(block * p.D)),
          v_copies_(Rows_of<A>::in_place(p, p.v, p.E) ? nullptr : scratch.take<A>(block * p.E)) {}

    void begin(i64 b, i64 g) {
        b_ = b;
        g_ = g;
    }

    void pack(const Group<A, tile_vectors>& group, Query* q) const { pack_queries(p_, group, q); }

    // Keys and values [start, end) from now on.
    void take(i64 start, i64 end) {
        start_ = start;
        end_ = end;
        k_ = Rows_of<A>(p_, p_.k, b_, g_, p_.D, k_copies_).rows(start, end, k_row_);
        v_ = Rows_of<A>(p_, p_.v, b_, g_, p_.E, v_copies_).rows(start, end, v_row_);
    }

    void score(i64 j, i64 n, const Query* q, A* s) const {
        scores<Plainly<A>>(k_ + (j - start_) * k_row_, k_row_ * item, n, q, p_.D, static_cast<A>(p_.scale), s);
    }

    void add(i64 j, i64 n, A* s, const Vec<A> (&fade)[tile_vectors], A* o) const {
        mix<Plainly<A>>(s, n, v_ + (j - start_) * v_row_, v_row_ * item, p_.E, fade, o);
    }

    bool values_finite() const { return finite(v_, v_row_, end_ - start_, p_.E); }

  private:
    const Problem& p_;
    A *k_copies_, *v_copies_;
    i64 b_ = 0, g_ = 0, start_ = 0, end_ = 0, k_row_ = 0, v_row_ = 0;
    const A *k_ = nullptr, *v_ = nullptr;
};

}  // namespace regardant::REGARDANT_ISA
