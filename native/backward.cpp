// The gradients of attention, from q, k, v, what attention gave, and the gradient that arrives at its output.
//
//     P_ij = e^(s_ij − lse_i)      dV = Pᵀ dO      dP = dO Vᵀ      dS = P ∘ (dP − delta)      delta_i = dO_i · O_i − dlse_i
//     dQ = scale · dS K            dK = scale · dSᵀ Q              (through the softcap: dS ∘ (1 − (s / softcap)²))
//
// A task is a chunk of keys of one key/value head. It walks along the blocks of queries that may see them, in all heads
// that read them, with five products for each: scores and dP again in tiles with the queries in lanes, then the chunk's
// dK and dV, which stay with the task, and its part of dQ. The parts that chunks add to one block of dQ take turns, in
// the order of the chunks: one order of summation, and so the same bits, for any number of threads, and no memory but
// dQ itself.
//
// What is hidden has no part in it: its P and dS are made 0, and where something is hidden, an Inf or NaN in rows of K,
// Q or dO is taken out of the products and given to those alone who see it.
#include "pairs.hpp"
#include "products.hpp"

namespace regardant::REGARDANT_ISA {
namespace {

#ifndef QB
#define QB 64
#endif
#ifndef KB
#define KB 32
#endif
constexpr i64 query_block = QB;

// Keys whose K, V, dK and dV, and P and dS for a block of queries, stay in the second cache.
constexpr i64 key_block = tile_rows * (tile_rows > 6 ? 16 : KB);

template <class A>
constexpr int lanes = tile_vectors * Simd<A>::W;
template <class A>
constexpr int most_groups = query_block / lanes<A>;

// Widths are filled up to whole vectors.
template <class A>
constexpr i64 filled(i64 width) {
    return (width + Simd<A>::W - 1) / Simd<A>::W * Simd<A>::W;
}

// What a block of queries, or of keys, may have to do with others: the least and greatest of its documents' ids; of
// queries, the keys that any of them sees by position, and the first chunk of keys that they see.
struct Span {
    Interval keys;
    i64 least, greatest, first;
};

inline void take_ids(Span& span, const i64* ids, i64 count) {
    span.least = span.greatest = ids[0];
    for (i64 i = 1; i < count; ++i) {
        span.least = smaller_of(span.least, ids[i]);
        span.greatest = larger_of(span.greatest, ids[i]);
    }
}

// Which blocks of queries see which chunks of keys, as far as positions, padding and documents tell, and whose turn it
// is to add to which block of dQ.
class Plan {
  public:
    explicit Plan(const Problem& p)
        : p_(p), blocks((p.T + query_block - 1) / query_block), chunks((p.S + key_block - 1) / key_block),
          memory_((p.B * (blocks + chunks) * static_cast<i64>(sizeof(Span)) + p.B * p.H * blocks * 8) + 64),
          queries_(static_cast<Span*>(memory_.data)), keys_(queries_ + p.B * blocks),
          turns_(reinterpret_cast<i64*>(keys_ + p.B * chunks)) {
        if (!memory_.data) return;
        for (i64 b = 0; b < p.B; ++b) {
            for (i64 block = 0; block < blocks; ++block) queries_[b * blocks + block] = span_of(b, block);
            for (i64 chunk = 0; chunk < chunks && p.k_segments; ++chunk) {
                const i64 from = chunk * key_block;
                take_ids(keys_[b * chunks + chunk], p.k_segments + b * p.S + from, smaller_of(key_block, p.S - from));
            }
            for (i64 block = 0; block < blocks; ++block) {
                Span& span = queries_[b * blocks + block];
                span.first = next(b, block, 0);
                blind |= span.first == chunks;
                for (i64 h = 0; h < p.H; ++h) turns_[turn(b, h, block)] = span.first;
            }
        }
    }

    explicit operator bool() const { return memory_.data != nullptr; }

    bool sees(i64 b, i64 block, i64 chunk) const {
        const Span& q = queries_[b * blocks + block];
        if (q.keys.low >= smaller_of(p_.S, (chunk + 1) * key_block) || q.keys.high <= chunk * key_block) return false;
        if (!p_.q_segments) return true;
        const Span& k = keys_[b * chunks + chunk];
        return q.least <= k.greatest && k.least <= q.greatest;
    }

    // The first chunk that a block sees, or the number of chunks; and whether one is the last that it sees.
    i64 first(i64 b, i64 block) const { return queries_[b * blocks + block].first; }
    bool last(i64 b, i64 block, i64 chunk) const { return next(b, block, chunk + 1) == chunks; }

    void wait(i64 b, i64 h, i64 block, i64 chunk) const { wait_for_turn(turns_[turn(b, h, block)], chunk); }
    void pass(i64 b, i64 h, i64 block, i64 chunk) const {
        pass_turn(turns_[turn(b, h, block)], next(b, block, chunk + 1));
    }

  private:
    Span span_of(i64 b, i64 block) const {
        Span span{};
        const i64 from = block * query_block, to = smaller_of(from + query_block, p_.T);
        for (i64 i = from; i < to; ++i) {
            const Interval one = interval(p_, b, i);
            if (one.low == one.high) continue;
            const bool first = span.keys.low == span.keys.high;
            span.keys.low = first ? one.low : smaller_of(span.keys.low, one.low);
            span.keys.high = first ? one.high : larger_of(span.keys.high, one.high);
        }
        if (p_.q_segments) take_ids(span, p_.q_segments + b * p_.T + from, to - from);
        return span;
    }

    // The first chunk, from one on, that a block sees.
    i64 next(i64 b, i64 block, i64 chunk) const {
        while (chunk < chunks && !sees(b, block, chunk)) ++chunk;
        return chunk;
    }

    i64 turn(i64 b, i64 h, i64 block) const { return (b * p_.H + h) * blocks + block; }

    const Problem& p_;

  public:
    const i64 blocks, chunks;
    bool blind = false;                      // a block sees nothing

  private:
    Memory memory_;
    Span *queries_, *keys_;
    i64* turns_;
};

// Rows [from, to) of one head as contiguous rows of A, `pitch` apart, filled up with zeros.
template <class A>
void copy_rows(const Problem& p, const Array4& array, i64 b, i64 h, i64 from, i64 to, i64 width, A* rows, i64 pitch) {
    const i64* strides = array.strides;
    const char* start = array.data + (b * strides[0] + h * strides[1] + from * strides[2]) * size_of(p.type);
    widen_rows<A>(p.type, start, strides[2], strides[3], to - from, width, rows, pitch);
}

// L rows, `pitch` apart, as columns: (pitch, L).
template <class A>
void columns_of(const A* rows, i64 pitch, A* columns) {
    constexpr int W = Simd<A>::W, L = lanes<A>;
    for (int first = 0; first < L; first += W) {
        for (i64 d = 0; d < pitch; d += W) {
            Vec<A> square[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) square[i] = load(rows + (first + i) * pitch + d);
            transpose<A>(square);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) store<A>(columns + (d + i) * L + first, square[i]);
        }
    }
}

// The first `count` columns of (width, L) as rows of `width` numbers; `add`: added to what they are.
template <bool add, class A>
void put_columns(const A* columns, int count, i64 width, A* rows) {
    constexpr int W = Simd<A>::W, L = lanes<A>;
    for (int first = 0; first < count; first += W) {
        const int some = static_cast<int>(smaller_of(W, count - first));
        i64 d = 0;
        for (; d + W <= width; d += W) {
            Vec<A> square[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) square[i] = load(columns + (d + i) * L + first);
            transpose<A>(square);
            for (int i = 0; i < some; ++i) {
                A* const at = rows + (first + i) * width + d;
                store<A>(at, add ? load(at) + square[i] : square[i]);
            }
        }
        for (; d < width; ++d) {
            for (int i = 0; i < some; ++i) {
                A& at = rows[(first + i) * width + d];
                at = columns[d * L + first + i] + (add ? at : 0);
            }
        }
    }
}

// Makes Inf and NaN in L rows 0. Whether there were any.
template <class A>
bool keep_finite(A* rows, i64 pitch) {
    if (finite(rows, pitch, lanes<A>, pitch)) return false;
    for (i64 i = 0; i < lanes<A> * pitch; ++i) rows[i] = rows[i] * 0 == 0 ? rows[i] : 0;
    return true;
}

// Panels of weights, and of dS, hold a row for each key and a column for each query of a block. Rows do not begin at
// equal places in their pages: a column of register tiles would not fit into the cache together.
constexpr i64 panel_pitch = query_block + 16;

// Of M keys and N vectors of columns: sums[m][c] += Σ_i left[m][i] · rows[i][c], over `count` queries (or pairs of
// them). The sum is begun anew, for the digit that one long chain of additions would lose.
template <class Maths, int M, int N>
void add_tile(const char* left, i64 between, const typename Maths::Number* rows, i64 pitch, i64 count,
              typename Maths::Sum* sums) {
    using A = typename Maths::Sum;
    constexpr int W = Simd<A>::W;
    Tile<A, M, N> tile = {};
    multiply<Maths, M, N>(left, between, sizeof(typename Maths::Number), rows, pitch, count, tile);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) {
            A* const at = sums + m * pitch + v * W;
            store<A>(at, load(at) + tile[m][v]);
        }
    }
}

template <class Maths, int M, int N = tile_vectors>
void add_vectors(i64 vectors, const char* left, i64 between, const typename Maths::Number* rows, i64 pitch, i64 count,
                 typename Maths::Sum* sums) {
    if constexpr (N > 0) {
        constexpr int step = N * Simd<typename Maths::Sum>::W;
        for (; vectors >= N; vectors -= N, rows += step, sums += step) {
            add_tile<Maths, M, N>(left, between, rows, pitch, count, sums);
        }
        add_vectors<Maths, M, N - 1>(vectors, left, between, rows, pitch, count, sums);
    }
}

// The five products in A, whatever the arrays' type: of one chunk of keys, and of one block of queries at a time.
template <class In>
class WideFive {
  public:
    using A = In;
    using Weight = A;                        // what panels are made of
    static constexpr int W = Simd<A>::W, L = lanes<A>;
    static constexpr i64 item = sizeof(A);

    static i64 bytes(const Problem& p) {
        const i64 D = filled<A>(p.D), E = filled<A>(p.E);
        return 2 * padded(key_block * p.D * item) + padded(key_block * p.E * item) + padded((L + query_block) * D * item) +
               padded((L + query_block) * E * item) + 2 * 64;
    }

    WideFive(const Problem& p, const Gradients& r, Scratch& scratch)
        : p_(p), r_(r), D_(filled<A>(p.D)), E_(filled<A>(p.E)),
          k_copies_(Rows_of<A>::in_place(p, p.k, p.D) ? nullptr : scratch.take<A>(key_block * p.D)),
          k_finite_(scratch.take<A>(key_block * p.D)),
          v_copies_(Rows_of<A>::in_place(p, p.v, p.E) ? nullptr : scratch.take<A>(key_block * p.E)),
          q_(scratch.take<A>(D_ * L)), do_(scratch.take<A>(E_ * L)), q_rows_(scratch.take<A>(query_block * D_)),
          do_rows_(scratch.take<A>(query_block * E_)) {}

    // Keys and values [from, from + count) of one head from now on.
    void begin(i64 b, i64 g, i64 from, i64 count) {
        k_ = Rows_of<A>(p_, p_.k, b, g, p_.D, k_copies_).rows(from, from + count, k_row_);
        v_ = Rows_of<A>(p_, p_.v, b, g, p_.E, v_copies_).rows(from, from + count, v_row_);
        all_finite_ = finite(k_, k_row_, count, p_.D);
        for (i64 j = 0; j < count && !all_finite_; ++j) {
            for (i64 d = 0; d < p_.D; ++d) k_finite_[j * p_.D + d] = k_[j * k_row_ + d] * 0 == 0 ? k_[j * k_row_ + d] : 0;
        }
    }

    // Queries [from, to) of one head from now on. What lanes stand for no query is 0.
    void take(i64 b, i64 h, i64 from, i64 to) {
        copy_rows(p_, p_.q, b, h, from, to, p_.D, q_rows_, D_);
        copy_rows(p_, r_.dout, b, h, from, to, p_.E, do_rows_, E_);
        const i64 count = to - from, end = (count + L - 1) / L * L;
        for (i64 i = count * D_; i < end * D_; ++i) q_rows_[i] = 0;
        for (i64 i = count * E_; i < end * E_; ++i) do_rows_[i] = 0;
    }

    // Group n of them from now on.
    void turn_to(i64 n) {
        columns_of(q_rows_ + n * L * D_, D_, q_);
        columns_of(do_rows_ + n * L * E_, E_, do_);
    }

    // For keys [j, j + n) of the chunk and the group in turn, (n, L): scaled dot products, and dP.
    void score(i64 j, i64 n, A* s) const {
        scores<Plainly<A>>(k_ + j * k_row_, k_row_ * item, n, q_, p_.D, static_cast<A>(p_.scale), s);
    }
    void rise(i64 j, i64 n, A* dp) const {
        scores<Plainly<A>>(v_ + j * v_row_, v_row_ * item, n, do_, p_.E, 1, dp);
    }

    static void put(Vec<A> weights, Weight* to) { store<A>(to, weights); }
    void settle(i64) {}                      // rows are read as they are

    // The group's part of dQ from keys [j, j + n), (D, L). Where something is hidden, only what is finite is taken in.
    void lead(i64 j, i64 n, const A* ds, bool hides, A* o) {
        const bool strays = leaves_out(hides);
        const i64 row = strays ? p_.D : k_row_;
        const A* const k = (strays ? k_finite_ : k_) + j * row;
        const A scale = static_cast<A>(p_.scale);
        tiles(p_.D, [=]<int M>(i64 first) {
            product<Plainly<A>, M>(reinterpret_cast<const char*>(k + first), item, row * item, ds, n, scale, o + first * L);
        });
    }
    bool leaves_out(bool hides) const { return hides && !all_finite_; }

    // Leaves what is not finite in rows of Q, or of dO, of group n out of the products. Whether there is any.
    bool tame_q(i64 n) { return keep_finite(q_rows_ + n * L * D_, D_); }
    bool tame_do(i64 n) { return keep_finite(do_rows_ + n * L * E_, E_); }

    // What M keys gather from `count` queries, from the `first` on: sums (M, filled width) of dV, and of dK.
    template <int M>
    void gather_v(const Weight* weights, i64 first, i64 count, A* sums) const {
        add_vectors<Plainly<A>, M>(E_ / W, reinterpret_cast<const char*>(weights + first), panel_pitch * item,
                                   do_rows_ + first * E_, E_, count, sums);
    }
    template <int M>
    void gather_k(const Weight* ds, i64 first, i64 count, A* sums) const {
        add_vectors<Plainly<A>, M>(D_ / W, reinterpret_cast<const char*>(ds + first), panel_pitch * item,
                                   q_rows_ + first * D_, D_, count, sums);
    }

  private:
    const Problem& p_;
    const Gradients& r_;
    i64 D_, E_;                              // widths of rows, filled up
    A *k_copies_, *k_finite_, *v_copies_, *q_, *do_, *q_rows_, *do_rows_;
    i64 k_row_ = 0, v_row_ = 0;
    const A *k_ = nullptr, *v_ = nullptr;
    bool all_finite_ = true;
};

#if defined(REGARDANT_PAIRS)

// The same in pairs of bfloat16. Scores and dP lose nothing by it, for their factors are bfloat16 as they come; weights
// and dS are rounded.
class PairedFive {
  public:
    using A = float;
    using Weight = Brain;
    static constexpr int W = Simd<A>::W, L = lanes<A>;

    static i64 bytes(const Problem& p) {
        const i64 D = filled<A>(p.D), E = filled<A>(p.E);
        return padded(key_block * even(p.D) * 2) + padded(key_block * even(p.E) * 2) + padded(key_block / 2 * p.D * 4) +
               padded((key_block / 2 + 1) * L * 4) + padded(larger_of(D, E) * L * 4) + padded(D / 2 * L * 4) +
               padded(E / 2 * L * 4) + padded(query_block * D * 4) + padded(query_block * E * 4) +
               padded(query_block / 2 * D * 4) + padded(query_block / 2 * E * 4);
    }

    PairedFive(const Problem& p, const Gradients& r, Scratch& scratch)
        : p_(p), r_(r), D_(filled<A>(p.D)), E_(filled<A>(p.E)), k_copies_(scratch.take<Brain>(key_block * even(p.D))),
          v_copies_(scratch.take<Brain>(key_block * even(p.E))), k_pairs_(scratch.take<Pair>(key_block / 2 * p.D)),
          ds_pairs_(scratch.take<Pair>((key_block / 2 + 1) * L)), wide_(scratch.take<A>(larger_of(D_, E_) * L)),
          q_(scratch.take<Pair>(D_ / 2 * L)), do_(scratch.take<Pair>(E_ / 2 * L)), q_rows_(scratch.take<A>(query_block * D_)),
          do_rows_(scratch.take<A>(query_block * E_)), q_pairs_(scratch.take<Pair>(query_block / 2 * D_)),
          do_pairs_(scratch.take<Pair>(query_block / 2 * E_)) {}

    void begin(i64 b, i64 g, i64 from, i64 count) {
        k_ = rows_of(p_.k, b, g, p_.D, from, count, k_copies_, k_row_);
        v_ = rows_of(p_.v, b, g, p_.E, from, count, v_copies_, v_row_);
        const auto tamed = [&](i64 j, i64 d) {
            const Pair bits = j < count ? k_[j * k_row_ + d].bits : 0u;
            const bool stray = (bits & 0x7f80u) == 0x7f80u;
            all_finite_ &= !stray;
            return stray ? 0u : bits;
        };
        all_finite_ = true;
        for (i64 j = 0; j < count; j += 2) {
            for (i64 d = 0; d < p_.D; ++d) k_pairs_[j / 2 * p_.D + d] = tamed(j, d) | tamed(j + 1, d) << 16;
        }
    }

    void take(i64 b, i64 h, i64 from, i64 to) {
        copy_rows(p_, p_.q, b, h, from, to, p_.D, q_rows_, D_);
        copy_rows(p_, r_.dout, b, h, from, to, p_.E, do_rows_, E_);
        const i64 count = to - from, end = (count + L - 1) / L * L;
        for (i64 i = count * D_; i < end * D_; ++i) q_rows_[i] = 0;
        for (i64 i = count * E_; i < end * E_; ++i) do_rows_[i] = 0;
    }

    void turn_to(i64 n) {
        columns_of(q_rows_ + n * L * D_, D_, wide_);
        pair_rows(wide_, L, D_, q_);
        columns_of(do_rows_ + n * L * E_, E_, wide_);
        pair_rows(wide_, L, E_, do_);
    }

    void score(i64 j, i64 n, A* s) const {
        scores<InPairs>(k_ + j * k_row_, k_row_ * 2, n, q_, even(p_.D) / 2, static_cast<A>(p_.scale), s);
    }
    void rise(i64 j, i64 n, A* dp) const { scores<InPairs>(v_ + j * v_row_, v_row_ * 2, n, do_, even(p_.E) / 2, 1, dp); }

    static void put(Vec<A> weights, Weight* to) { store_narrow(to, weights); }

    // Pairs of keys begin at the chunk's first.
    void lead(i64 j, i64 n, const A* ds, bool, A* o) {
        const i64 before = j % 2, pairs = (before + n + 1) / 2;
        const auto row = [&](i64 i, int at) { return i >= 0 && i < n ? load(ds + i * L + at) : Vec<A>{}; };
        for (i64 i = 0; i < pairs; ++i) {
            for (int at = 0; at < L; at += W) {
                const Pairs both = round_pairs_or_nan(row(2 * i - before, at), row(2 * i + 1 - before, at));
                std::memcpy(ds_pairs_ + i * L + at, &both, sizeof both);
            }
        }
        const Pair* const k = k_pairs_ + j / 2 * p_.D;
        tiles(p_.D, [&]<int M>(i64 first) {
            product<InPairs, M>(reinterpret_cast<const char*>(k + first), sizeof(Pair), p_.D * static_cast<i64>(sizeof(Pair)),
                                ds_pairs_, pairs, static_cast<A>(p_.scale), o + first * L);
        });
    }
    bool leaves_out(bool) const { return !all_finite_; }

    bool tame_q(i64 n) { return keep_finite(q_rows_ + n * L * D_, D_); }
    bool tame_do(i64 n) { return keep_finite(do_rows_ + n * L * E_, E_); }

    // Rows of group n are laid beside each other.
    void settle(i64 n) {
        pair_rows(q_rows_ + n * L * D_, D_, L, q_pairs_ + n * L / 2 * D_);
        pair_rows(do_rows_ + n * L * E_, E_, L, do_pairs_ + n * L / 2 * E_);
    }

    template <int M>
    void gather_v(const Weight* weights, i64 first, i64 count, A* sums) const {
        add_vectors<InPairs, M>(E_ / W, reinterpret_cast<const char*>(weights + first), panel_pitch * 2,
                                do_pairs_ + first / 2 * E_, E_, (count + 1) / 2, sums);
    }
    template <int M>
    void gather_k(const Weight* ds, i64 first, i64 count, A* sums) const {
        add_vectors<InPairs, M>(D_ / W, reinterpret_cast<const char*>(ds + first), panel_pitch * 2,
                                q_pairs_ + first / 2 * D_, D_, (count + 1) / 2, sums);
    }

  private:
    static i64 even(i64 n) { return (n + 1) / 2 * 2; }

    // Rows of one head where they lie, or copied to an even width.
    const Brain* rows_of(const Array4& array, i64 b, i64 g, i64 width, i64 from, i64 count, Brain* copies, i64& pitch) const {
        const i64* strides = array.strides;
        const Brain* const start =
            reinterpret_cast<const Brain*>(array.data) + b * strides[0] + g * strides[1] + from * strides[2];
        pitch = strides[2];
        if (strides[3] == 1 && width % 2 == 0) return start;
        pitch = even(width);
        for (i64 j = 0; j < count; ++j) {
            for (i64 d = 0; d < width; ++d) copies[j * pitch + d] = start[j * strides[2] + d * strides[3]];
            if (width % 2) copies[j * pitch + width] = Brain{0};
        }
        return copies;
    }

    // Of an even number of rows, each two as one row of pairs. The numbers are bfloat16, widened.
    static void pair_rows(const A* rows, i64 width, i64 count, Pair* to) {
        for (i64 i = 0; i < count; i += 2) {
            for (i64 c = 0; c < width; c += W) {
                const Pairs both = ((Pairs)load(rows + i * width + c) >> 16) | (Pairs)load(rows + (i + 1) * width + c);
                std::memcpy(to + i / 2 * width + c, &both, sizeof both);
            }
        }
    }

    const Problem& p_;
    const Gradients& r_;
    i64 D_, E_;
    Brain *k_copies_, *v_copies_;
    Pair *k_pairs_, *ds_pairs_;
    A* wide_;
    Pair *q_, *do_;
    A *q_rows_, *do_rows_;
    Pair *q_pairs_, *do_pairs_;
    i64 k_row_ = 0, v_row_ = 0;
    const Brain *k_ = nullptr, *v_ = nullptr;
    bool all_finite_ = true;
};

#endif

// A group of queries of a block, and what of the chunk it may see.
template <class A>
struct Member {
    Group<A, tile_vectors> group;
    i64 low, high;                           // keys, counted from the chunk's first
    bool hides;                              // something in the chunk is hidden from it
    bool stray_q, stray_do;                  // its rows of Q or dO, not all finite, are left out of the products
};

// W numbers that lie `stride` apart, widened.
template <class A, class In>
Vec<A> load_far(const In* from, i64 stride) {
    constexpr int W = Simd<A>::W;
    if constexpr ((sizeof(A) == 8) == (sizeof(In) == 8)) {
        if (stride == 1) return load_wide(from);
    }
    A numbers[W];
    for (int i = 0; i < W; ++i) numbers[i] = static_cast<A>(widen(from[i * stride]));
    return load(numbers);
}

// delta of queries [from, to) of one head, into `delta`.
template <class A>
void fill_delta(const Problem& p, const Gradients& r, i64 b, i64 h, i64 from, i64 to, A* delta) {
    typed(p.type, r.out.data, [&](auto* out_data) {
        using In = typename Plain<__typeof__(*out_data)>::Is;
        constexpr int W = Simd<A>::W;
        const i64 *so = r.out.strides, *sd = r.dout.strides;
        for (i64 i = from; i < to; ++i) {
            const auto* const out = out_data + b * so[0] + h * so[1] + i * so[2];
            const auto* const dout = reinterpret_cast<const In*>(r.dout.data) + b * sd[0] + h * sd[1] + i * sd[2];
            Vec<A> sums{};
            i64 e = 0;
            for (; e + W <= p.E; e += W) sums += load_far<A>(out + e * so[3], so[3]) * load_far<A>(dout + e * sd[3], sd[3]);
            A dot = sum<A>(sums);
            for (; e < p.E; ++e) dot += static_cast<A>(widen(out[e * so[3]])) * static_cast<A>(widen(dout[e * sd[3]]));
            delta[i - from] = r.dlse ? dot - static_cast<const A*>(r.dlse)[(b * p.H + h) * p.T + i] : dot;
        }
    });
}

// A chunk of keys of one head, and the block of queries that it meets.
template <class Five>
class Chunk {
  public:
    using A = typename Five::A;
    using V = Vec<A>;
    using Weight = typename Five::Weight;
    static constexpr int W = Simd<A>::W, L = lanes<A>, most = most_groups<A>;
    static constexpr i64 item = sizeof(A);

    static i64 bytes(const Problem& p) {
        return Five::bytes(p) + 3 * padded(key_block * L * item) + 2 * padded(key_block * panel_pitch * sizeof(Weight)) +
               padded(query_block * p.D * item) + padded(key_block * filled<A>(p.D) * item) +
               padded(key_block * filled<A>(p.E) * item);
    }

    // `dq`: dQ in A; `delta`: (B, H, T), to be filled here if the chunk is all there is.
    Chunk(const Problem& p, const Gradients& r, const Plan& plan, A* delta, A* dq, Scratch& scratch)
        : p_(p), r_(r), plan_(plan), delta_(delta), dq_(dq), five_(p, r, scratch), s_(scratch.take<A>(key_block * L)),
          ds_(scratch.take<A>(key_block * L)), slope_(scratch.take<A>(key_block * L)),
          weight_panel_(scratch.take<Weight>(key_block * panel_pitch)), ds_panel_(scratch.take<Weight>(key_block * panel_pitch)),
          o_(scratch.take<A>(query_block * p.D)), dk_(scratch.take<A>(key_block * filled<A>(p.D))),
          dv_(scratch.take<A>(key_block * filled<A>(p.E))) {}

    void run(i64 b, i64 g, i64 chunk) {
        begin(b, g, chunk);
        for (i64 i = 0; i < keys_ * filled<A>(p_.D); ++i) dk_[i] = 0;
        for (i64 i = 0; i < keys_ * filled<A>(p_.E); ++i) dv_[i] = 0;
        // The last queries first: under a causal mask all chunks see them, so that none waits for its first turn.
        const i64 repeat = p_.H / p_.G;
        for (i64 h = g * repeat; h < (g + 1) * repeat; ++h) {
            for (i64 block = plan_.blocks - 1; block >= 0; --block) {
                if (plan_.sees(b, block, chunk)) add(h, block);
            }
        }
        write(dk_, p_.D, static_cast<A>(p_.scale), r_.dk);
        write(dv_, p_.E, 1, r_.dv);
    }

    // Adds dS of block `block` of head h to sums (key_block, query_block).
    void add_slopes(i64 b, i64 h, i64 block, i64 chunk, double* sums) {
        const i64 g = h / (p_.H / p_.G);
        if (b != b_ || g != g_ || chunk != chunk_) begin(b, g, chunk);
        meet(h, block, false, [&](int n) {
            const Member<A>& member = members_[n];
            for (i64 j = member.low; j < member.high; ++j) {
                const A* const ds = ds_ + (j - member.low) * L;
                double* const to = sums + j * query_block + n * L;
                for (int lane = 0; lane < L; ++lane) to[lane] += static_cast<double>(ds[lane]);
            }
        });
    }

  private:
    void begin(i64 b, i64 g, i64 chunk) {
        b_ = b;
        g_ = g;
        chunk_ = chunk;
        start_ = chunk * key_block;
        keys_ = smaller_of(key_block, p_.S - start_);
        five_.begin(b, g, start_, keys_);
    }

    // What one block of queries of head h and the chunk add to each other's gradients.
    void add(i64 h, i64 block) {
        const int count = meet(h, block, true, [&](int n) { lead(n); });
        const i64 from = block * query_block, queries = smaller_of(query_block, p_.T - from);
        tiles(keys_, [&]<int M>(i64 j) {
            // The groups that see any of these keys; what others lie between them has zeros there.
            int begin = 0, end = count;
            while (begin < end && !meets(members_[begin], j, M)) ++begin;
            while (begin < end && !meets(members_[end - 1], j, M)) --end;
            const i64 first = begin * L, some = smaller_of(end * L, queries) - first;
            if (some <= 0) return;
            five_.template gather_v<M>(weight_panel_ + j * panel_pitch, first, some, dv_ + j * filled<A>(p_.E));
            five_.template gather_k<M>(ds_panel_ + j * panel_pitch, first, some, dk_ + j * filled<A>(p_.D));
        });
        for (int n = 0; n < count; ++n) {
            if (members_[n].stray_q) add_strays(n, p_.q, p_.D, ds_panel_, dk_);
            if (members_[n].stray_do) add_strays(n, r_.dout, p_.E, weight_panel_, dv_);
        }
        plan_.wait(b_, h, block, chunk_);
        const i64 row = (b_ * p_.H + h) * p_.T + from;
        for (int n = 0; n < count; ++n) {
            A* const to = dq_ + (row + n * L) * p_.D;
            const A* const o = o_ + n * L * p_.D;
            if (plan_.first(b_, block) == chunk_) put_columns<false>(o, members_[n].group.count, p_.D, to);
            else if (members_[n].low < members_[n].high) put_columns<true>(o, members_[n].group.count, p_.D, to);
        }
        if (sizeof(A) != size_of(p_.type) && plan_.last(b_, block, chunk_)) {
            char* const to = static_cast<char*>(r_.dq) + row * p_.D * size_of(p_.type);
            narrow_row<A>(p_.type, dq_ + row * p_.D, queries * p_.D, to);
        }
        plan_.pass(b_, h, block, chunk_);
    }

    static bool meets(const Member<A>& member, i64 j, i64 n) { return member.high > j && member.low < j + n; }

    // Weights and dS of one block of queries of head h, group by group, each of which is then used. Kept in the panels,
    // if so wanted. Returns how many groups there are.
    template <class F>
    int meet(i64 h, i64 block, bool keep, const F& use) {
        const i64 from = block * query_block, to = smaller_of(from + query_block, p_.T);
        if (plan_.chunks == 1) fill_delta(p_, r_, b_, h, from, to, delta_ + (b_ * p_.H + h) * p_.T + from);
        five_.take(b_, h, from, to);
        int n = 0;
        for (i64 i = from; i < to; i += L, ++n) {
            look(members_[n], h, i, smaller_of(i + L, to));
            const i64 low = members_[n].low, high = members_[n].high;
            if (low < high) {
                five_.turn_to(n);
                weigh(members_[n], n, keep);
            }
            use(n);
            // What products over the whole block reach beside that.
            if (keep) clear(n, 0, low);
            if (keep) clear(n, high, keys_);
        }
        return n;
    }

    // Which keys of the chunk queries [from, to) may see.
    void look(Member<A>& member, i64 h, i64 from, i64 to) const {
        auto& g = member.group = {};
        g.b = b_;
        for (i64 i = from; i < to; ++i) g.add(p_, h, i);
        g.close();
        member.low = larger_of(g.first - start_, 0);
        member.high = smaller_of(g.last - start_, keys_);
        if (member.low >= member.high || apart(p_, g, start_ + member.low, member.high - member.low)) {
            member.low = member.high = 0;
        }
        member.hides = member.low > 0 || member.high < keys_ || g.count < L;
    }

    void clear(int n, i64 from, i64 to) const {
        for (i64 j = from; j < to; ++j) {
            for (int v = 0; v < tile_vectors; ++v) {
                Five::put(V{}, weight_panel_ + j * panel_pitch + n * L + v * W);
                Five::put(V{}, ds_panel_ + j * panel_pitch + n * L + v * W);
            }
        }
    }

    // Weights and dS of a group, (keys, L), the latter in ds_; hidden ones are 0.
    void weigh(Member<A>& member, int n, bool keep) {
        auto& g = member.group;
        const i64 count = member.high - member.low;
        five_.score(member.low, count, s_);
        if (p_.softcap != 0) cap_slope(count);
        member.hides |= add_and_hide(p_, g, start_ + member.low, count, s_);
        five_.rise(member.low, count, ds_);
        A base[L], delta[L];
        for (int lane = 0; lane < L; ++lane) {
            const i64 row = (b_ * p_.H + g.head[lane]) * p_.T + g.query[lane];
            base[lane] = static_cast<const A*>(r_.lse)[row];
            if (base[lane] == -infinity) {    // a row of nothing, or of −∞ alone, has no weights to pass anything by
                base[lane] = 0;
                member.hides = true;
            }
            delta[lane] = delta_[row];
            for (i64 i = 0; lane >= g.count && i < count; ++i) s_[i * L + lane] = -infinity;
        }
        const i64 at = member.low * panel_pitch + n * L;
        if (member.hides) weigh_rows<true>(count, base, delta, keep, weight_panel_ + at, ds_panel_ + at);
        else weigh_rows<false>(count, base, delta, keep, weight_panel_ + at, ds_panel_ + at);
    }

    // Whether a row gives a key any weight, be it 0.
    bool takes_part(const Group<A, tile_vectors>& g, int lane, i64 key) const {
        const i64 row = (b_ * p_.H + g.head[lane]) * p_.T + g.query[lane];
        return static_cast<const A*>(r_.lse)[row] != -infinity && visible(p_, b_, g.head[lane], g.query[lane], key);
    }

    template <bool hides>
    void weigh_rows(i64 n, const A* base, const A* delta, bool keep, Weight* weights, Weight* slopes) const {
        V base_v[tile_vectors], delta_v[tile_vectors];
        for (int v = 0; v < tile_vectors; ++v) {
            base_v[v] = load(base + v * W);
            delta_v[v] = load(delta + v * W);
        }
        const bool capped = keep && p_.softcap != 0;
        for (i64 i = 0; i < n; ++i) {
#pragma GCC unroll 4
            for (int v = 0; v < tile_vectors; ++v) {
                const i64 at = i * L + v * W;
                const V score = load(s_ + at);
                V weight = exp_negative(score - base_v[v]), ds = weight * (load(ds_ + at) - delta_v[v]);
                if (capped) ds *= load(slope_ + at);
                if constexpr (hides) {       // e^(−∞ − NaN) would be NaN, and so would 0 · NaN
                    weight = score == -infinity ? V{} : weight;
                    ds = score == -infinity ? V{} : ds;
                }
                store<A>(ds_ + at, ds);
                if (!keep) continue;
                Five::put(weight, weights + i * panel_pitch + v * W);
                Five::put(ds, slopes + i * panel_pitch + v * W);
            }
        }
    }

    // Bounds the scores, and keeps by how much a bounded one rises with what it was.
    void cap_slope(i64 n) const {
        const A softcap = static_cast<A>(p_.softcap);
        for (i64 at = 0; at < n * L; at += W) {
            const V share = tanh_of(load(s_ + at) / softcap);
            store<A>(s_ + at, share * softcap);
            store<A>(slope_ + at, 1 - share * share);
        }
    }

    // The part of dQ of group n, and its rows made ready for the sums over queries.
    void lead(int n) {
        Member<A>& member = members_[n];
        A* const o = o_ + n * L * p_.D;
        member.stray_q = member.stray_do = false;
        if (member.low < member.high) {
            five_.lead(member.low, member.high - member.low, ds_, member.hides, o);
            if (five_.leaves_out(member.hides)) add_stray_keys(member, o);
        } else {
            for (i64 i = 0; i < L * p_.D; ++i) o[i] = 0;
        }
        member.stray_q = member.hides && five_.tame_q(n);
        member.stray_do = member.hides && five_.tame_do(n);
        five_.settle(n);
    }

    // What is not finite in K, for the queries that see it.
    void add_stray_keys(const Member<A>& member, A* o) const {
        const auto& g = member.group;
        const i64* strides = p_.k.strides;
        const A scale = static_cast<A>(p_.scale);
        typed(p_.type, p_.k.data, [&](auto* data) {
            for (i64 j = member.low; j < member.high; ++j) {
                const i64 row = b_ * strides[0] + g_ * strides[1] + (start_ + j) * strides[2];
                for (i64 d = 0; d < p_.D; ++d) {
                    const A value = static_cast<A>(widen(data[row + d * strides[3]]));
                    if (value * 0 == 0) continue;
                    for (int lane = 0; lane < g.count; ++lane) {
                        if (!takes_part(g, lane, start_ + j)) continue;
                        o[d * L + lane] += scale * (ds_[(j - member.low) * L + lane] * value);
                    }
                }
            }
        });
    }

    // What is not finite in rows of Q or dO of group n, for the keys that are seen from there.
    void add_strays(int n, const Array4& array, i64 width, const Weight* panel, A* sums) const {
        const Member<A>& member = members_[n];
        const auto& g = member.group;
        const i64* strides = array.strides;
        typed(p_.type, array.data, [&](auto* data) {
            for (int lane = 0; lane < g.count; ++lane) {
                const i64 row = b_ * strides[0] + g.head[lane] * strides[1] + g.query[lane] * strides[2];
                for (i64 c = 0; c < width; ++c) {
                    const A value = static_cast<A>(widen(data[row + c * strides[3]]));
                    if (value * 0 == 0) continue;
                    for (i64 j = member.low; j < member.high; ++j) {
                        if (!takes_part(g, lane, start_ + j)) continue;
                        sums[j * filled<A>(width) + c] += widen(panel[j * panel_pitch + n * L + lane]) * value;
                    }
                }
            }
        });
    }

    // The chunk's rows of a result, times `scale`.
    void write(A* sums, i64 width, A scale, void* to) const {
        const i64 pitch = filled<A>(width);
        for (i64 at = 0; at < keys_ * pitch; at += W) store<A>(sums + at, load(sums + at) * scale);
        char* const first = static_cast<char*>(to) + ((b_ * p_.G + g_) * p_.S + start_) * width * size_of(p_.type);
        for (i64 j = 0; j < keys_; ++j) narrow_row<A>(p_.type, sums + j * pitch, width, first + j * width * size_of(p_.type));
    }

    const Problem& p_;
    const Gradients& r_;
    const Plan& plan_;
    A *delta_, *dq_;
    Five five_;
    A *s_, *ds_, *slope_;                    // of one group, (keys, L)
    Weight *weight_panel_, *ds_panel_;       // of a block, (keys, panel_pitch)
    A *o_, *dk_, *dv_;
    Member<A> members_[most];
    i64 b_ = -1, g_ = -1, chunk_ = -1, start_ = 0, keys_ = 0;
};

// A task that has no memory takes its turns all the same, for others wait for theirs.
inline void pass_all(const Problem& p, const Plan& plan, i64 b, i64 g, i64 chunk) {
    const i64 repeat = p.H / p.G;
    for (i64 h = g * repeat; h < (g + 1) * repeat; ++h) {
        for (i64 block = plan.blocks - 1; block >= 0; --block) {
            if (!plan.sees(b, block, chunk)) continue;
            plan.wait(b, h, block, chunk);
            plan.pass(b, h, block, chunk);
        }
    }
}

// The gradient at the bias: dS, summed over the axes along which the bias was broadcast. A task has a place of its own on
// every other axis, a block of queries or a chunk of keys at a time, and makes dS once more for all that it sums.
template <class Five>
class Biases {
  public:
    using A = typename Five::A;

    Biases(const Problem& p, const Gradients& r, const Plan& plan, A* delta) : p_(p), r_(r), plan_(plan), delta_(delta) {
        const i64 counts[4] = {p.B, p.H, plan.blocks, plan.chunks};
        for (int axis = 0; axis < 4; ++axis) parts_[axis] = r.dbias_strides[axis] ? counts[axis] : 1;
    }

    bool run(int threads) const {
        return each(parts_[0] * parts_[1] * parts_[2] * parts_[3], threads, [&](i64 task) {
            const i64 numbers = key_block * query_block;
            Scratch scratch(workspace(Chunk<Five>::bytes(p_) + padded(numbers * 8)));
            if (!scratch) return false;
            double* const sums = scratch.take<double>(numbers);
            for (i64 i = 0; i < numbers; ++i) sums[i] = 0;
            Chunk<Five> chunk(p_, r_, plan_, delta_, nullptr, scratch);
            i64 at[4];
            for (int axis = 3; axis >= 0; --axis) {
                at[axis] = task % parts_[axis];
                task /= parts_[axis];
            }
            add(chunk, at, sums);
            write(at, sums);
            return true;
        });
    }

  private:
    struct Range {
        i64 from, to;
    };

    Range range(int axis, i64 at, i64 count) const { return r_.dbias_strides[axis] ? Range{at, at + 1} : Range{0, count}; }

    void add(Chunk<Five>& chunk, const i64* at, double* sums) const {
        const Range bs = range(0, at[0], p_.B), hs = range(1, at[1], p_.H), blocks = range(2, at[2], plan_.blocks),
                    chunks = range(3, at[3], plan_.chunks);
        for (i64 c = chunks.from; c < chunks.to; ++c) {
            for (i64 b = bs.from; b < bs.to; ++b) {
                for (i64 h = hs.from; h < hs.to; ++h) {
                    for (i64 block = blocks.from; block < blocks.to; ++block) {
                        if (plan_.sees(b, block, c)) chunk.add_slopes(b, h, block, c, sums);
                    }
                }
            }
        }
    }

    // `sums` (key_block, query_block) are summed along the axes of one number, which is then the first.
    void write(const i64* at, double* sums) const {
        const i64* strides = r_.dbias_strides;
        i64 queries = strides[2] ? smaller_of(query_block, p_.T - at[2] * query_block) : 1;
        i64 keys = strides[3] ? smaller_of(key_block, p_.S - at[3] * key_block) : 1;
        for (i64 j = 0; j < key_block && !strides[2]; ++j) {
            for (i64 i = 1; i < query_block; ++i) sums[j * query_block] += sums[j * query_block + i];
        }
        for (i64 j = 1; j < key_block && !strides[3]; ++j) {
            for (i64 i = 0; i < query_block; ++i) sums[i] += sums[j * query_block + i];
        }
        typed(p_.bias_type, static_cast<char*>(r_.dbias), [&](auto* data) {
            using To = typename Plain<__typeof__(*data)>::Is;
            To* const to = const_cast<To*>(data) + at[0] * strides[0] + at[1] * strides[1] +
                           at[2] * query_block * strides[2] + at[3] * key_block * strides[3];
            for (i64 i = 0; i < queries; ++i) {
                for (i64 j = 0; j < keys; ++j) {
                    const auto sum = static_cast<decltype(widen(To{}))>(sums[j * query_block + i]);
                    narrow(sum, to[i * strides[2] + j * strides[3]]);
                }
            }
        });
    }

    const Problem& p_;
    const Gradients& r_;
    const Plan& plan_;
    A* delta_;
    i64 parts_[4];                           // of the result on each axis
};

// dsink_h = −Σ e^(sink − lse) · delta over the rows that see anything.
template <class A>
void sum_sinks(const Problem& p, const Gradients& r, const A* delta, i64 h) {
    double sum = 0;
    for (i64 b = 0; b < p.B && p.sinks[h] != -static_cast<double>(infinity); ++b) {
        for (i64 i = 0; i < p.T; ++i) {
            const i64 row = (b * p.H + h) * p.T + i;
            const auto lse = static_cast<double>(static_cast<const A*>(r.lse)[row]);
            if (lse == -static_cast<double>(infinity)) continue;
            sum -= __builtin_exp(p.sinks[h] - lse) * static_cast<double>(delta[row]);
        }
    }
    static_cast<A*>(r.dsinks)[h] = static_cast<A>(sum);
}

template <class Five>
bool differentiate(const Problem& p, const Gradients& r, int threads) {
    using A = typename Five::A;
    const i64 rows = p.B * p.H * p.T, item = size_of(p.type);
    const bool in_place = item == sizeof(A);
    const Memory wide(in_place ? 1 : rows * p.D * static_cast<i64>(sizeof(A)) + 1);
    const Memory deltas(rows * static_cast<i64>(sizeof(A)) + 1);
    const Plan plan(p);
    if (!wide.data || !deltas.data || !plan) return false;
    A* const dq = static_cast<A*>(in_place ? r.dq : wide.data);
    A* const delta = static_cast<A*>(deltas.data);
    // A chunk that is all there is makes delta where it needs it.
    const bool ahead = plan.chunks > 1;
    each(ahead || plan.blind ? p.B * p.H * plan.blocks : 0, threads, [&](i64 task) {
        const i64 block = task % plan.blocks, bh = task / plan.blocks, from = block * query_block;
        const i64 to = smaller_of(from + query_block, p.T), row = bh * p.T + from;
        if (ahead) fill_delta(p, r, bh / p.H, bh % p.H, from, to, delta + row);
        if (plan.first(bh / p.H, block) < plan.chunks) return true;
        char* const zeros = static_cast<char*>(r.dq) + row * p.D * item;
        for (i64 i = 0; i < (to - from) * p.D * item; ++i) zeros[i] = 0;
        return true;
    });
    const i64 heads = p.B * p.G;
    bool good = each(heads * plan.chunks, threads, [&](i64 task) {
        const i64 chunk = task / heads, b = task % heads / p.G, g = task % heads % p.G;
        Scratch scratch(workspace(Chunk<Five>::bytes(p)));
        if (scratch) Chunk<Five>(p, r, plan, delta, dq, scratch).run(b, g, chunk);
        else pass_all(p, plan, b, g, chunk);
        return static_cast<bool>(scratch);
    });
    if (r.dbias) good &= Biases<Five>(p, r, plan, delta).run(threads);
    if (r.dsinks) {
        each(p.H, threads, [&](i64 h) {
            sum_sinks(p, r, delta, h);
            return true;
        });
    }
    return good;
}

}  // namespace

bool backward(const Problem& p, const Gradients& r, int threads) {
#if defined(REGARDANT_PAIRS)
    if (p.type == Type::bfloat16) return differentiate<PairedFive>(p, r, threads);
#endif
    return p.type == Type::float64 ? differentiate<WideFive<double>>(p, r, threads) : differentiate<WideFive<float>>(p, r, threads);
}

}  // namespace regardant::REGARDANT_ISA
