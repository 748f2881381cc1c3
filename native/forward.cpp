// Attention for many queries: a task is a block of queries of one head, which walks along the keys it may see.
//
// Bits do not depend on how many threads there are or on which other rows are computed: blocks of keys begin at
// multiples of `key_block` whatever the queries see, and a row stays in its own lane.
#include "decode.hpp"
#include "pairs.hpp"
#include "products.hpp"

namespace regardant::REGARDANT_ISA {
namespace {

constexpr i64 query_block = 128;

static_assert(tile_rows * 32 <= deepest);

// Keys whose scores for a group stay in the first cache, in whole register tiles.
constexpr i64 key_block = tile_rows * (tile_rows > 6 ? 14 : 32);

template <class A>
constexpr int lanes = tile_vectors * Simd<A>::W;

// The mixing for a tile in which something is hidden and some value is not finite: a hidden value must not be
// read into the sum, not even as 0 · NaN. In the order of `mix_columns`, for the same bits.
template <class A>
void mix_visible(const Problem& p, const Group<A, tile_vectors>& g, const A* s, i64 j, i64 n,
                 const Vec<A> (&fade)[tile_vectors], A* o) {
    constexpr int L = lanes<A>;
    const i64* strides = p.v.strides;
    const i64 head = g.b * strides[0] + g.head[0] / (p.H / p.G) * strides[1];
    typed(p.type, p.v.data, [&](auto* values) {
        for (int lane = 0; lane < g.count; ++lane) {
            for (i64 e = 0; e < p.E; ++e) {
                A sum = 0;
                for (i64 i = 0; i < n; ++i) {
                    const A value = static_cast<A>(widen(values[head + (j + i) * strides[2] + e * strides[3]]));
                    if (value * 0 == 0 || visible(p, g.b, g.head[lane], g.query[lane], j + i)) {
                        sum += s[i * L + lane] * value;
                    }
                }
                o[e * L + lane] = o[e * L + lane] * fade[lane / g.W][lane % g.W] + sum;
            }
        }
    });
}

// Writes the rows of a group, each numerator times the inverse of its denominator; `bad` becomes NaN where a row's
// are not all finite, else 0.
template <class A>
void write_rows(const Problem& p, const Results& r, const Group<A, tile_vectors>& g, const A* o, const A* inverse,
                A* bad) {
    constexpr int W = Simd<A>::W, L = lanes<A>;
    constexpr i64 at_once = 64;
    const i64 item = size_of(p.type);
    const bool as_it_lies = item == sizeof(A);
    for (int first = 0; first < g.count; first += W) {
        const Vec<A> by = load(inverse + first);
        Vec<A> zeros{};
        const int count = static_cast<int>(smaller_of(W, g.count - first));
        for (i64 from = 0; from < p.E; from += at_once) {
            const i64 width = smaller_of(at_once, p.E - from);
            A copies[W][at_once];
            const bool whole = as_it_lies && width % W == 0;
            A* rows[W];
            char* to[W];
            for (int i = 0; i < count; ++i) {
                const i64 row = (g.b * p.H + g.head[first + i]) * p.T + g.query[first + i];
                to[i] = static_cast<char*>(r.out) + (row * p.E + from) * item;
                rows[i] = whole ? reinterpret_cast<A*>(to[i]) : copies[i];
            }
            for (i64 e = 0; e < width; e += W) {
                Vec<A> square[W];
#pragma GCC unroll 16
                for (int i = 0; i < W; ++i) {
                    square[i] = load(o + (from + (whole ? e + i : smaller_of(e + i, width - 1))) * L + first) * by;
                    zeros += square[i] * 0;
                }
                transpose<A>(square);
                for (int i = 0; i < count; ++i) store<A>(rows[i] + e, square[i]);
            }
            for (int i = 0; i < count && !whole; ++i) narrow_row<A>(p.type, copies[i], width, to[i]);
        }
        store<A>(bad + first, zeros);
    }
}

// Rows with an output that is no number although the values it is made of, and their weights, are. `o` is lost.
template <class A>
void mend_overflow(const Problem& p, const Results& r, const Group<A, tile_vectors>& g, A* o, const A* bad) {
    constexpr int W = Simd<A>::W, L = lanes<A>;
    const i64* strides = p.v.strides;
    const i64 head = g.b * strides[0] + g.head[0] / (p.H / p.G) * strides[1];
    typed(p.type, p.v.data, [&](auto* values) {
        for (i64 j = g.first; j < g.last; ++j) {
            const auto zero = [&](i64 e) {   // or NaN
                return static_cast<A>(widen(values[head + j * strides[2] + e * strides[3]])) * 0;
            };
            A sum = 0;
            for (i64 e = 0; e < p.E; ++e) sum += zero(e);
            if (sum == 0) continue;
            // What a visible value explains is taken out.
            for (int lane = 0; lane < g.count; ++lane) {
                if (!visible(p, g.b, g.head[lane], g.query[lane], j)) continue;
                for (i64 e = 0; e < p.E; ++e) o[e * L + lane] = zero(e) == 0 ? o[e * L + lane] : 0;
            }
        }
    });
    for (int lane = 0; lane < g.count; ++lane) {
        const A m = g.m[lane / W][lane % W], l = g.l[lane / W][lane % W];
        if (bad[lane] == 0 || l != l || m * 0 != 0) continue;
        bool numbers = true;
        for (i64 e = 0; e < p.E; ++e) numbers &= o[e * L + lane] * 0 == 0;
        if (!numbers) write_row_exactly(p, r, g.b, g.head[lane], g.query[lane], m);
    }
}

// Divides by the denominators and writes the rows of a group; where looking, their statistics.
template <class A>
void finish(const Problem& p, const Results& r, Group<A, tile_vectors>& g, Tops<A>& tops, A* o) {
    constexpr int W = Simd<A>::W, L = lanes<A>;
    A inverse[L] = {};
    for (int lane = 0; lane < g.count; ++lane) {
        const int v = lane / W, i = lane % W;
        const A total = Row<A>{g.m[v][i], g.l[v][i], g.u[v][i]}.write(p, r, g.b, g.head[lane], g.query[lane]);
        inverse[lane] = total == 0 ? 0 : 1 / total;
        if (r.watching && r.top) {
            const i64 at = lane * tops.pitch(r.top);
            write_top(p, r, g.b, g.head[lane], g.query[lane], tops.scores + at, tops.keys + at);
        }
    }
    A bad[L];
    write_rows(p, r, g, o, inverse, bad);
    for (int lane = 0; lane < g.count; ++lane) {
        if (bad[lane] != 0) return mend_overflow(p, r, g, o, bad);
    }
}

// A block of queries of one head, in groups, and one tile of scores that they share.
template <class Products, bool watching>
class Block {
  public:
    using A = typename Products::A;
    using Query = typename Products::Query;
    static constexpr int L = lanes<A>;
    static constexpr int most_groups = query_block / L;

    static i64 bytes(const Problem& p, const Results& r) {
        const i64 kept = watching ? L * Tops<A>::pitch(r.top) : 0;
        const i64 per_group = padded(Products::query_numbers(p) * sizeof(Query)) + padded(p.E * L * sizeof(A)) +
                              padded(kept * sizeof(A)) + padded(kept * 8);
        return most_groups * per_group + padded(key_block * L * sizeof(A)) + Products::bytes(p, key_block);
    }

    Block(const Problem& p, const Results& r, Scratch& scratch)
        : p_(p), r_(r), products_(p, key_block, scratch), s_(scratch.take<A>(key_block * L)) {
        for (int i = 0; i < most_groups; ++i) {
            q_[i] = scratch.take<Query>(Products::query_numbers(p));
            o_[i] = scratch.take<A>(p.E * L);
            if constexpr (watching) {
                const i64 count = L * Tops<A>::pitch(r.top);
                tops_[i] = Tops<A>{r.top, scratch.take<A>(count), scratch.take<i64>(count)};
            }
        }
    }

    // Queries [from, to) of head h of batch row b.
    void run(i64 b, i64 h, i64 from, i64 to) {
        products_.begin(b, h / (p_.H / p_.G));
        begin(b, h, from, to);
        for (i64 j = first_ / key_block * key_block; j < last_; j += key_block) {
            // An even number of keys in front, so that sums over even and odd keys do not depend on the window.
            const i64 start = larger_of(j, first_ - (first_ - j) % 2), end = smaller_of(j + key_block, last_);
            products_.take(start, end);
            all_finite_ = -1;
            for (int i = 0; i < groups_; ++i) {
                const i64 low = larger_of(start, group_[i].first - (group_[i].first - j) % 2);
                const i64 high = smaller_of(end, group_[i].last);
                if (low < high && !apart(p_, group_[i], low, high - low)) take(i, low, high - low);
            }
        }
        for (int i = 0; i < groups_; ++i) finish(p_, r_, group_[i], tops_[i], o_[i]);
    }

  private:
    void begin(i64 b, i64 h, i64 from, i64 to) {
        groups_ = 0;
        first_ = last_ = 0;
        for (i64 t = from; t < to; t += L, ++groups_) {
            auto& g = group_[groups_] = {};
            g.b = b;
            for (i64 i = t; i < smaller_of(t + L, to); ++i) g.add(p_, h, i);
            g.close();
            if (g.first < g.last) {
                first_ = first_ < last_ ? smaller_of(first_, g.first) : g.first;
                last_ = larger_of(last_, g.last);
            }
            products_.pack(g, q_[groups_]);
            for (i64 e = 0; e < p_.E * L; ++e) o_[groups_][e] = 0;
            if constexpr (watching) tops_[groups_].clear(L);
        }
    }

    // One tile: keys [j, j + n) for group i.
    void take(int i, i64 j, i64 n) {
        auto& g = group_[i];
        products_.score(j, n, q_[i], s_);
        [[maybe_unused]] const bool hides = apply_options(p_, g, j, n, s_);
        Vec<A> most[tile_vectors], fade[tile_vectors];
        largest<A, tile_vectors>(s_, n, most);
        if constexpr (watching) {
            if (r_.top) keep_top(g, tops_[i], s_, j, n, most);
        }
        absorb<watching>(g, s_, n, most, fade);
        if constexpr (Products::in_pairs) {
            products_.add(j, n, s_, fade, o_[i]);
            products_.add_visible(g, j, n, s_, o_[i]);
        } else {
            if (hides && all_finite_ < 0) all_finite_ = products_.values_finite();
            if (hides && !all_finite_) {
                mix_visible(p_, g, s_, j, n, fade, o_[i]);
            } else {
                products_.add(j, n, s_, fade, o_[i]);
            }
        }
    }

    const Problem& p_;
    const Results& r_;
    Products products_;
    A* s_;
    Query* q_[most_groups];
    A* o_[most_groups];
    Tops<A> tops_[most_groups];
    Group<A, tile_vectors> group_[most_groups];
    int groups_ = 0;
    int all_finite_ = -1;                    // of the block's values: not known yet, no, yes
    i64 first_ = 0, last_ = 0;
};

template <class Products, bool watching>
bool forward(const Problem& p, const Results& r, int threads) {
    const i64 blocks = (p.T + query_block - 1) / query_block;
    // The last queries see the most keys: begun first, they do not leave one thread working alone at the end.
    return each(p.B * p.H * blocks, threads, [&](i64 task) {
        Scratch scratch(workspace(Block<Products, watching>::bytes(p, r)));
        if (!scratch) return false;
        Block<Products, watching> block(p, r, scratch);
        const i64 from = (blocks - 1 - task / (p.B * p.H)) * query_block, bh = task % (p.B * p.H);
        block.run(bh / p.H, bh % p.H, from, smaller_of(from + query_block, p.T));
        return true;
    });
}

template <class Products>
bool forward(const Problem& p, const Results& r, int threads) {
    return r.watching ? forward<Products, true>(p, r, threads) : forward<Products, false>(p, r, threads);
}

}  // namespace

bool attend(const Problem& p, const Results& r, int threads) {
    if (p.B * p.H * p.T == 0) return true;
    if (p.T <= decode_queries) return decode(p, r, threads);
#if defined(REGARDANT_PAIRS)
    if (p.type == Type::bfloat16) return forward<Paired>(p, r, threads);
#endif
    return p.type == Type::float64 ? forward<Wide<double>>(p, r, threads) : forward<Wide<float>>(p, r, threads);
}

}  // namespace regardant::REGARDANT_ISA
