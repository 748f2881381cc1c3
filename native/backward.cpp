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
#include "products.hpp"

namespace regardant::REGARDANT_ISA {
namespace {

constexpr i64 query_block = 64;

// Keys whose K, V, dK and dV, and P and dS for a block of queries, stay in the second cache.
constexpr i64 key_block = tile_rows * (tile_rows > 6 ? 16 : 32);

template <class A>
constexpr int lanes = tile_vectors * Simd<A>::W;
template <class A>
constexpr int most_groups = query_block / lanes<A>;

// Widths are filled up to whole vectors.
template <class A>
constexpr i64 filled(i64 width) {
    return (width + Simd<A>::W - 1) / Simd<A>::W * Simd<A>::W;
}

// What a block of queries, or of keys, may have to do with others: the keys that any of its rows sees by position
// (of queries alone), and the least and greatest of its documents' ids.
struct Span {
    Interval keys;
    i64 least, greatest;
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
            for (i64 h = 0; h < p.H; ++h) {
                for (i64 block = 0; block < blocks; ++block) turns_[turn(b, h, block)] = next(b, block, 0);
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

// Adds the first `count` columns of (width, L) to rows of `width` numbers.
template <class A>
void add_columns(const A* columns, int count, i64 width, A* rows) {
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
                store<A>(at, load(at) + square[i]);
            }
        }
        for (; d < width; ++d) {
            for (int i = 0; i < some; ++i) rows[(first + i) * width + d] += columns[d * L + first + i];
        }
    }
}

// Makes Inf and NaN 0.
template <class A>
void keep_finite(A* numbers, i64 count) {
    for (i64 i = 0; i < count; ++i) numbers[i] = numbers[i] * 0 == 0 ? numbers[i] : 0;
}

// A group of queries against the chunk.
template <class A>
struct Member {
    Group<A, tile_vectors> group;
    i64 low, high;                           // keys of the chunk that it may see, counted from the chunk's first
    bool hides;                              // something among them is hidden
};

// Of M keys and N vectors of columns: sums[m][c] += Σ_i left[m][i] · rows[i][c] over the queries of all groups. The sum
// over a block of queries is begun anew, for the digit that one long chain of additions would lose.
template <class A, int M, int N>
void add_tile(const Member<A>* members, int groups, i64 first, const A* left, const A* rows, i64 pitch, A* sums) {
    constexpr int W = Simd<A>::W, L = lanes<A>;
    Tile<A, M, N> tile = {};
    for (int i = 0; i < groups; ++i) {
        if (members[i].high <= first || members[i].low >= first + M) continue;
        const A* const from = left + (i * key_block + first) * L;
        multiply<Plainly<A>, M, N>(reinterpret_cast<const char*>(from), L * sizeof(A), sizeof(A), rows + i * L * pitch,
                                   pitch, members[i].group.count, tile);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) {
            A* const at = sums + m * pitch + v * W;
            store<A>(at, load(at) + tile[m][v]);
        }
    }
}

template <class A, int M, int N>
void add_vectors(i64 vectors, const Member<A>* members, int groups, i64 first, const A* left, const A* rows, i64 pitch,
                 A* sums) {
    if constexpr (N > 0) {
        if (vectors < N) return add_vectors<A, M, N - 1>(vectors, members, groups, first, left, rows, pitch, sums);
        for (; vectors >= N; vectors -= N, rows += N * Simd<A>::W, sums += N * Simd<A>::W) {
            add_tile<A, M, N>(members, groups, first, left, rows, pitch, sums);
        }
        add_vectors<A, M, N - 1>(vectors, members, groups, first, left, rows, pitch, sums);
    }
}

// sums (keys, pitch) += left · rows, for all keys of a chunk.
template <class A>
void add_to_keys(const Member<A>* members, int groups, const A* left, const A* rows, i64 pitch, i64 keys, A* sums) {
    tiles(keys, [=]<int M>(i64 first) {
        add_vectors<A, M, tile_vectors>(pitch / Simd<A>::W, members, groups, first, left, rows, pitch, sums + first * pitch);
    });
}

// A chunk of keys of one head, and the block of queries that it meets.
template <class A>
class Chunk {
  public:
    using V = Vec<A>;
    static constexpr int W = Simd<A>::W, L = lanes<A>, groups = most_groups<A>;
    static constexpr i64 item = sizeof(A);

    static i64 bytes(const Problem& p) {
        const i64 D = filled<A>(p.D), E = filled<A>(p.E), panels = groups * key_block * L;
        return padded(key_block * p.D * item) * 2 + padded(key_block * p.E * item) + padded(D * L * item) +
               padded(E * L * item) + padded(query_block * D * item) + padded(query_block * E * item) +
               2 * padded(panels * item) + (p.softcap != 0 ? padded(panels * item) : 0) + padded(groups * p.D * L * item) +
               padded(key_block * D * item) + padded(key_block * E * item);
    }

    Chunk(const Problem& p, const Gradients& r, const Plan& plan, const A* delta, A* dq, Scratch& scratch)
        : p_(p), r_(r), plan_(plan), delta_(delta), dq_(dq), D_(filled<A>(p.D)), E_(filled<A>(p.E)),
          k_copies_(Rows_of<A>::in_place(p, p.k, p.D) ? nullptr : scratch.take<A>(key_block * p.D)),
          k_finite_(scratch.take<A>(key_block * p.D)),
          v_copies_(Rows_of<A>::in_place(p, p.v, p.E) ? nullptr : scratch.take<A>(key_block * p.E)),
          q_(scratch.take<A>(D_ * L)), do_(scratch.take<A>(E_ * L)), q_rows_(scratch.take<A>(query_block * D_)),
          do_rows_(scratch.take<A>(query_block * E_)), weights_(scratch.take<A>(groups * key_block * L)),
          ds_(scratch.take<A>(groups * key_block * L)), slope_(p.softcap != 0 ? scratch.take<A>(groups * key_block * L) : nullptr),
          o_(scratch.take<A>(groups * p.D * L)), dk_(scratch.take<A>(key_block * D_)),
          dv_(scratch.take<A>(key_block * E_)) {}

    void run(i64 b, i64 g, i64 chunk) {
        begin(b, g, chunk);
        for (i64 i = 0; i < keys_ * D_; ++i) dk_[i] = 0;
        for (i64 i = 0; i < keys_ * E_; ++i) dv_[i] = 0;
        // The last queries first: under a causal mask all chunks see them, so that none waits for its first turn.
        const i64 repeat = p_.H / p_.G;
        for (i64 h = g * repeat; h < (g + 1) * repeat; ++h) {
            for (i64 block = plan_.blocks - 1; block >= 0; --block) {
                if (plan_.sees(b, block, chunk)) add(h, block);
            }
        }
        write(dk_, D_, p_.D, static_cast<A>(p_.scale), r_.dk);
        write(dv_, E_, p_.E, 1, r_.dv);
    }

    // Adds dS of block `block` of head h to sums (key_block, query_block).
    void add_slopes(i64 b, i64 h, i64 block, i64 chunk, double* sums) {
        const i64 g = h / (p_.H / p_.G);
        if (b != b_ || g != g_ || chunk != chunk_) begin(b, g, chunk);
        const int count = meet(h, block);
        for (int n = 0; n < count; ++n) {
            for (i64 j = members_[n].low; j < members_[n].high; ++j) {
                const A* const ds = ds_ + (n * key_block + j) * L;
                double* const to = sums + j * query_block + n * L;
                for (int lane = 0; lane < L; ++lane) to[lane] += static_cast<double>(ds[lane]);
            }
        }
    }

  private:
    void begin(i64 b, i64 g, i64 chunk) {
        b_ = b;
        g_ = g;
        chunk_ = chunk;
        start_ = chunk * key_block;
        keys_ = smaller_of(key_block, p_.S - start_);
        k_ = Rows_of<A>(p_, p_.k, b, g, p_.D, k_copies_).rows(start_, start_ + keys_, k_row_);
        v_ = Rows_of<A>(p_, p_.v, b, g, p_.E, v_copies_).rows(start_, start_ + keys_, v_row_);
        all_finite_ = finite(k_, k_row_, keys_, p_.D);
        if (all_finite_) return;
        for (i64 j = 0; j < keys_; ++j) {
            for (i64 d = 0; d < p_.D; ++d) k_finite_[j * p_.D + d] = k_[j * k_row_ + d];
        }
        keep_finite(k_finite_, keys_ * p_.D);
    }

    // P and dS of one block of queries of head h, in groups; returns how many.
    int meet(i64 h, i64 block) {
        const i64 from = block * query_block, to = smaller_of(from + query_block, p_.T);
        copy_rows(p_, p_.q, b_, h, from, to, p_.D, q_rows_, D_);
        copy_rows(p_, r_.dout, b_, h, from, to, p_.E, do_rows_, E_);
        const i64 end = from + (to - from + L - 1) / L * L;
        for (i64 i = (to - from) * D_; i < (end - from) * D_; ++i) q_rows_[i] = 0;
        for (i64 i = (to - from) * E_; i < (end - from) * E_; ++i) do_rows_[i] = 0;
        int count = 0;
        for (i64 i = from; i < to; i += L, ++count) meet(h, i, smaller_of(i + L, to), count);
        return count;
    }

    // What one block of queries of head h and the chunk add to each other's gradients.
    void add(i64 h, i64 block) {
        const int count = meet(h, block);
        for (int n = 0; n < count; ++n) finish(n);
        add_to_keys(members_, count, weights_, do_rows_, E_, keys_, dv_);
        add_to_keys(members_, count, ds_, q_rows_, D_, keys_, dk_);
        for (int i = 0; i < count; ++i) {
            add_strays(i, p_.q, p_.D, ds_, dk_, D_);
            add_strays(i, r_.dout, p_.E, weights_, dv_, E_);
        }
        plan_.wait(b_, h, block, chunk_);
        for (int i = 0; i < count; ++i) {
            if (members_[i].low == members_[i].high) continue;
            const auto& g = members_[i].group;
            add_columns(o_ + i * p_.D * L, g.count, p_.D, dq_ + ((b_ * p_.H + h) * p_.T + g.query[0]) * p_.D);
        }
        plan_.pass(b_, h, block, chunk_);
    }

    // P and dS of group n, which is queries [from, to).
    void meet(i64 h, i64 from, i64 to, int n) {
        Member<A>& member = members_[n];
        auto& g = member.group = {};
        g.b = b_;
        for (i64 i = from; i < to; ++i) g.add(p_, h, i);
        g.close();
        member.low = larger_of(g.first - start_, 0);
        member.high = smaller_of(g.last - start_, keys_);
        member.hides = false;
        const i64 count = member.high - member.low;
        if (count <= 0 || apart(p_, g, start_ + member.low, count)) {
            member.low = member.high = 0;
            return;
        }
        columns_of(q_rows_ + n * L * D_, D_, q_);
        columns_of(do_rows_ + n * L * E_, E_, do_);
        const i64 at = (n * key_block + member.low) * L;
        member.hides = weigh(g, member.low, count, weights_ + at, ds_ + at, slope_ + at);
    }

    // The part of dQ of group n, and all made ready for the sums over queries.
    void finish(int n) {
        const Member<A>& member = members_[n];
        if (member.low == member.high) return;
        const i64 start = (n * key_block + member.low) * L, numbers = (member.high - member.low) * L;
        A* const ds = ds_ + start;
        // From the gradient at the bounded scores to that at what they were.
        for (i64 at = 0; p_.softcap != 0 && at < numbers; at += W) {
            const V slope = load(ds + at);
            store<A>(ds + at, slope == 0 ? V{} : slope * load(slope_ + start + at));  // what is hidden may have none
        }
        multiply_keys(member, ds, o_ + n * p_.D * L);
        // What register tiles reach of the keys beside these.
        clear(n, larger_of(0, member.low - tile_rows), member.low);
        clear(n, member.high, smaller_of(keys_, member.high + tile_rows));
        if (!member.hides) return;
        const i64 rows = member.group.count;
        keep_finite(q_rows_ + n * L * D_, rows * D_);
        keep_finite(do_rows_ + n * L * E_, rows * E_);
    }

    void clear(int n, i64 from, i64 to) const {
        for (i64 at = (n * key_block + from) * L; at < (n * key_block + to) * L; ++at) weights_[at] = ds_[at] = 0;
    }

    // The weights of keys [low, low + n) of the chunk and the gradient at their scores, each (n, L). Hidden ones are 0.
    // Returns whether any is hidden.
    bool weigh(Group<A, tile_vectors>& g, i64 low, i64 n, A* s, A* dp, A* slope) {
        scores<Plainly<A>>(k_ + low * k_row_, k_row_ * item, n, q_, p_.D, static_cast<A>(p_.scale), s);
        if (p_.softcap != 0) cap_slope(n, s, slope);
        bool hides = add_and_hide(p_, g, start_ + low, n, s);
        scores<Plainly<A>>(v_ + low * v_row_, v_row_ * item, n, do_, p_.E, 1, dp);
        A base[L], delta[L];
        for (int lane = 0; lane < L; ++lane) {
            const i64 row = (b_ * p_.H + g.head[lane]) * p_.T + g.query[lane];
            base[lane] = static_cast<const A*>(r_.lse)[row];
            if (base[lane] == -infinity) base[lane] = 0;
            delta[lane] = delta_[row];
            for (i64 i = 0; lane >= g.count && i < n; ++i) s[i * L + lane] = -infinity;
        }
        hides |= g.count < L;
        if (hides) weigh_rows<true>(n, base, delta, s, dp);
        else weigh_rows<false>(n, base, delta, s, dp);
        return hides;
    }

    template <bool hides>
    void weigh_rows(i64 n, const A* base, const A* delta, A* s, A* dp) const {
        V base_v[tile_vectors], delta_v[tile_vectors];
        for (int v = 0; v < tile_vectors; ++v) {
            base_v[v] = load(base + v * W);
            delta_v[v] = load(delta + v * W);
        }
        for (i64 i = 0; i < n; ++i) {
#pragma GCC unroll 4
            for (int v = 0; v < tile_vectors; ++v) {
                const i64 at = i * L + v * W;
                const V score = load(s + at);
                V weight = exp_negative(score - base_v[v]), slope = weight * (load(dp + at) - delta_v[v]);
                if constexpr (hides) {       // e^(−∞ − NaN) would be NaN, and so would 0 · NaN
                    weight = score == -infinity ? V{} : weight;
                    slope = score == -infinity ? V{} : slope;
                }
                store<A>(s + at, weight);
                store<A>(dp + at, slope);
            }
        }
    }

    // Bounds scores, and keeps by how much a bounded one rises with what it was.
    void cap_slope(i64 n, A* s, A* slope) const {
        cap<A, tile_vectors>(p_, n, s);
        const A inverse = static_cast<A>(1 / p_.softcap);
        for (i64 at = 0; at < n * L; at += W) {
            const Vec<A> share = load(s + at) * inverse;
            store<A>(slope + at, 1 - share * share);
        }
    }

    // o (D, L) = scale · Σ_j k[j][d] · ds[j][lane].
    void multiply_keys(const Member<A>& member, const A* ds, A* o) const {
        const bool strays = member.hides && !all_finite_;
        const i64 row = strays ? p_.D : k_row_, count = member.high - member.low;
        const A* const k = (strays ? k_finite_ : k_) + member.low * row;
        const A scale = static_cast<A>(p_.scale);
        tiles(p_.D, [=]<int M>(i64 first) {
            product<Plainly<A>, M>(reinterpret_cast<const char*>(k + first), item, row * item, ds, count, scale,
                                   o + first * L);
        });
        if (!strays) return;
        const auto& g = member.group;
        for (i64 j = member.low; j < member.high; ++j) {
            for (i64 d = 0; d < p_.D; ++d) {
                const A value = k_[j * k_row_ + d];
                if (value * 0 == 0) continue;
                for (int lane = 0; lane < g.count; ++lane) {
                    if (!visible(p_, b_, g.head[lane], g.query[lane], start_ + j)) continue;
                    o[d * L + lane] += scale * (ds[(j - member.low) * L + lane] * value);
                }
            }
        }
    }

    // What is not finite in rows of Q or dO of group n, for the keys that are seen from there.
    void add_strays(int n, const Array4& array, i64 width, const A* left, A* sums, i64 pitch) const {
        const Member<A>& member = members_[n];
        if (!member.hides) return;
        const auto& g = member.group;
        const i64* strides = array.strides;
        typed(p_.type, array.data, [&](auto* data) {
            for (int lane = 0; lane < g.count; ++lane) {
                const i64 row = b_ * strides[0] + g.head[lane] * strides[1] + g.query[lane] * strides[2];
                for (i64 c = 0; c < width; ++c) {
                    const A value = static_cast<A>(widen(data[row + c * strides[3]]));
                    if (value * 0 == 0) continue;
                    for (i64 j = member.low; j < member.high; ++j) {
                        if (!visible(p_, b_, g.head[lane], g.query[lane], start_ + j)) continue;
                        sums[j * pitch + c] += left[(n * key_block + j) * L + lane] * value;
                    }
                }
            }
        });
    }

    // The chunk's rows of a result, times `scale`.
    void write(A* sums, i64 pitch, i64 width, A scale, void* to) const {
        for (i64 j = 0; j < keys_; ++j) {
            A* const row = sums + j * pitch;
            for (i64 c = 0; c < width; ++c) row[c] *= scale;
            const i64 at = ((b_ * p_.G + g_) * p_.S + start_ + j) * width;
            narrow_row<A>(p_.type, row, width, static_cast<char*>(to) + at * size_of(p_.type));
        }
    }

    const Problem& p_;
    const Gradients& r_;
    const Plan& plan_;
    const A* delta_;
    A* dq_;
    i64 D_, E_;                              // widths of rows, filled up
    A *k_copies_, *k_finite_, *v_copies_, *q_, *do_, *q_rows_, *do_rows_, *weights_, *ds_, *slope_, *o_, *dk_, *dv_;
    Member<A> members_[groups];
    i64 b_ = -1, g_ = -1, chunk_ = -1, start_ = 0, keys_ = 0, k_row_ = 0, v_row_ = 0;
    const A *k_ = nullptr, *v_ = nullptr;
    bool all_finite_ = true;
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
template <class A>
class Biases {
  public:
    Biases(const Problem& p, const Gradients& r, const Plan& plan, const A* delta) : p_(p), r_(r), plan_(plan), delta_(delta) {
        const i64 counts[4] = {p.B, p.H, plan.blocks, plan.chunks};
        for (int axis = 0; axis < 4; ++axis) parts_[axis] = r.dbias_strides[axis] ? counts[axis] : 1;
    }

    bool run(int threads) const {
        return each(parts_[0] * parts_[1] * parts_[2] * parts_[3], threads, [&](i64 task) {
            const i64 numbers = key_block * query_block;
            Scratch scratch(workspace(Chunk<A>::bytes(p_) + padded(numbers * 8)));
            if (!scratch) return false;
            double* const sums = scratch.take<double>(numbers);
            for (i64 i = 0; i < numbers; ++i) sums[i] = 0;
            Chunk<A> chunk(p_, r_, plan_, delta_, nullptr, scratch);
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

    void add(Chunk<A>& chunk, const i64* at, double* sums) const {
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
    const A* delta_;
    i64 parts_[4];                           // of the result on each axis
};

// delta of a row.
template <class A>
A delta_of(const Problem& p, const Gradients& r, i64 b, i64 h, i64 i) {
    return typed(p.type, r.out.data, [&](auto* out_data) {
        using In = typename Plain<__typeof__(*out_data)>::Is;
        constexpr int W = Simd<A>::W;
        const i64 *so = r.out.strides, *sd = r.dout.strides;
        const auto* const out = out_data + b * so[0] + h * so[1] + i * so[2];
        const auto* const dout = reinterpret_cast<const In*>(r.dout.data) + b * sd[0] + h * sd[1] + i * sd[2];
        A delta = 0;
        i64 e = 0;
        if constexpr ((sizeof(A) == 8) == (sizeof(In) == 8)) {
            if (so[3] == 1 && sd[3] == 1) {
                Vec<A> sums{};
                for (; e + W <= p.E; e += W) sums += load_wide(out + e) * load_wide(dout + e);
                delta = sum<A>(sums);
            }
        }
        for (; e < p.E; ++e) delta += static_cast<A>(widen(out[e * so[3]])) * static_cast<A>(widen(dout[e * sd[3]]));
        return r.dlse ? delta - static_cast<const A*>(r.dlse)[(b * p.H + h) * p.T + i] : delta;
    });
}

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

template <class A>
bool differentiate(const Problem& p, const Gradients& r, int threads) {
    const i64 rows = p.B * p.H * p.T, item = size_of(p.type);
    const bool in_place = item == sizeof(A);
    const Memory wide(in_place ? 1 : rows * p.D * static_cast<i64>(sizeof(A)) + 1), deltas(rows * static_cast<i64>(sizeof(A)) + 1);
    const Plan plan(p);
    if (!wide.data || !deltas.data || !plan) return false;
    A* const dq = static_cast<A*>(in_place ? r.dq : wide.data);
    A* const delta = static_cast<A*>(deltas.data);
    // Of every block of queries, delta, and zeros to begin with in dQ.
    each(p.B * p.H * plan.blocks, threads, [&](i64 task) {
        const i64 block = task % plan.blocks, bh = task / plan.blocks, from = block * query_block;
        const i64 to = smaller_of(from + query_block, p.T);
        for (i64 i = from; i < to; ++i) delta[bh * p.T + i] = delta_of<A>(p, r, bh / p.H, bh % p.H, i);
        for (i64 at = (bh * p.T + from) * p.D; at < (bh * p.T + to) * p.D; ++at) dq[at] = 0;
        return true;
    });
    const i64 heads = p.B * p.G;
    bool good = each(heads * plan.chunks, threads, [&](i64 task) {
        const i64 chunk = task / heads, b = task % heads / p.G, g = task % heads % p.G;
        Scratch scratch(workspace(Chunk<A>::bytes(p)));
        if (scratch) Chunk<A>(p, r, plan, delta, dq, scratch).run(b, g, chunk);
        else pass_all(p, plan, b, g, chunk);
        return static_cast<bool>(scratch);
    });
    if (!in_place) {
        each(rows, threads, [&](i64 row) {
            narrow_row<A>(p.type, dq + row * p.D, p.D, static_cast<char*>(r.dq) + row * p.D * item);
            return true;
        });
    }
    if (r.dbias) good &= Biases<A>(p, r, plan, delta).run(threads);
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
    return p.type == Type::float64 ? differentiate<double>(p, r, threads) : differentiate<float>(p, r, threads);
}

}  // namespace regardant::REGARDANT_ISA
