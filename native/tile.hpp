// A tile of scores: a few keys by a group of query rows, the rows in the lanes of vectors.
//
// s[j · L + lane] is the score of key j for the row of a lane. Keys run downwards, so that a row's maximum and sum
// are plain vector operations and K and V are read as they lie: neither is transposed, packed or repeated.
//
// In here: which keys a row may see, what the options make of a score, the recurrence of online softmax, and what
// looking keeps. The two ways to multiply stand in forward.cpp (many queries) and decode.cpp (few).
//
// Sources: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022.
#pragma once

#include "numbers.hpp"
#include "pool.hpp"
#include "problem.hpp"
#include "simd.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace regardant::REGARDANT_ISA {

inline i64 smaller_of(i64 a, i64 b) { return a < b ? a : b; }
inline i64 larger_of(i64 a, i64 b) { return a > b ? a : b; }

constexpr float infinity = __builtin_inff();

// Hands out parts of a piece of memory, each on a cache line. Parts of equal size do not begin at equal places in
// their pages: loads would wait for stores that only look like the same address.
class Scratch {
  public:
    explicit Scratch(void* data) : data_(static_cast<char*>(data)) {}

    explicit operator bool() const { return data_ != nullptr; }

    template <class T>
    T* take(i64 count) {
        T* const here = reinterpret_cast<T*>(data_);
        const i64 bytes = count * static_cast<i64>(sizeof(T));
#if defined(__SANITIZE_ADDRESS__)
        // Between the parts nothing is to be read or written.
        ASAN_POISON_MEMORY_REGION(data_ + bytes, static_cast<std::size_t>(padded(bytes) - bytes));
#endif
        data_ += padded(bytes);
        return here;
    }

    static constexpr i64 padded(i64 bytes) { return (bytes + 63) / 64 * 64 + 64; }

  private:
    char* data_;
};

// Memory of one call, freed at its end; null if there is not so much.
struct Memory {
    explicit Memory(i64 bytes) : data(allocate(bytes)) {}
    ~Memory() { release(data); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    void* const data;
};

inline i64 padded(i64 bytes) { return Scratch::padded(bytes); }

template <class F>
bool each(i64 tasks, int threads, const F& work) {
    return parallel(
        tasks, threads, [](void* context, i64 task) { return (*static_cast<const F*>(context))(task); },
        const_cast<F*>(&work));
}

// The keys that position, window and padding leave to query i: from `low` to before `high`.
struct Interval {
    i64 low, high;
};

inline Interval interval(const Problem& p, i64 b, i64 i) {
    const i64 position = p.offset + i;
    Interval keys{p.starts[b], p.lengths[b]};
    if (p.causal) keys.high = smaller_of(keys.high, position + 1);
    if (p.window) keys.low = larger_of(keys.low, position - p.window + 1);
    return keys.low < keys.high ? keys : Interval{0, 0};
}

// The bias of one score, in the type of scores: −1e39 is −∞ in float32.
inline double bias_at(const Problem& p, i64 b, i64 h, i64 i, i64 j) {
    const i64* a = p.bias.strides;
    const double bias = read(p.bias_type, p.bias.data, b * a[0] + h * a[1] + i * a[2] + j * a[3]);
    return p.type == Type::float64 ? bias : static_cast<double>(static_cast<float>(bias));
}

// Whether one key is visible to one query, by every condition.
inline bool visible(const Problem& p, i64 b, i64 h, i64 i, i64 j) {
    const Interval keys = interval(p, b, i);
    if (j < keys.low || j >= keys.high) return false;
    if (p.q_segments && p.q_segments[b * p.T + i] != p.k_segments[b * p.S + j]) return false;
    const i64* m = p.mask.strides;
    if (p.mask.data && !p.mask.data[b * m[0] + h * m[1] + i * m[2] + j * m[3]]) return false;
    return !p.bias.data || bias_at(p, b, h, i, j) != -static_cast<double>(infinity);
}

// Up to L query rows of one batch row and one key/value head, one to a lane, and what they carry along the keys.
template <class A, int N>
struct Group {
    static constexpr int W = Simd<A>::W, L = N * W;
    using V = Vec<A>;

    i64 b;
    int count = 0;                           // lanes in use; the others repeat the first, and are not written
    i64 head[L], query[L];
    typename Simd<A>::Int low[L], high[L];   // scratch of `hide_outside`: intervals relative to a tile
    Interval keys[L];
    i64 first = 0, last = 0;                 // the keys that any lane sees
    i64 full_from = 0, full_to = 0;          // the keys that every lane sees
    V m[N], l[N], u[N];                      // largest score; Σ e^(s−m); Σ e^(s−m)·(s−m)

    void add(const Problem& p, i64 h, i64 i) {
        head[count] = h;
        query[count] = i;
        keys[count] = interval(p, b, i);
        ++count;
    }

    void close() {
        bool any = false;
        for (int n = 0; n < count; ++n) {
            const auto [from, to] = keys[n];
            full_from = n ? larger_of(full_from, from) : from;
            full_to = n ? smaller_of(full_to, to) : to;
            if (from == to) continue;
            first = any ? smaller_of(first, from) : from;
            last = any ? larger_of(last, to) : to;
            any = true;
        }
        for (int n = count; n < L; ++n) {
            head[n] = head[0];
            query[n] = query[0];
            keys[n] = keys[0];
        }
        for (int v = 0; v < N; ++v) {
            m[v] = all<A>(-infinity);
            l[v] = u[v] = V{};
        }
    }
};

// Whether documents alone hide all of keys [j, j + n) from the group: their ids and the rows' lie apart.
template <class A, int N>
inline bool apart(const Problem& p, const Group<A, N>& g, i64 j, i64 n) {
    if (!p.q_segments) return false;
    const i64* q = p.q_segments + g.b * p.T;
    const i64* k = p.k_segments + g.b * p.S + j;
    i64 q_low = q[g.query[0]], q_high = q_low, k_low = k[0], k_high = k[0];
    for (int lane = 1; lane < g.count; ++lane) {
        q_low = smaller_of(q_low, q[g.query[lane]]);
        q_high = larger_of(q_high, q[g.query[lane]]);
    }
    for (i64 i = 1; i < n; ++i) {
        k_low = smaller_of(k_low, k[i]);
        k_high = larger_of(k_high, k[i]);
    }
    return q_high < k_low || k_high < q_low;
}

template <class A, int N>
inline void cap(const Problem& p, i64 n, A* s) {
    const A softcap = static_cast<A>(p.softcap);
    for (i64 at = 0; at < n * N * Simd<A>::W; at += Simd<A>::W) {
        store<A>(s + at, tanh_of(load(s + at) / softcap) * softcap);
    }
}

// Adds the bias; where it is −∞ the key is hidden. Whether any was.
template <class A, int N>
inline bool add_bias(const Problem& p, const Group<A, N>& g, i64 j, i64 n, A* s) {
    const i64* strides = p.bias.strides;
    return typed(p.bias_type, p.bias.data, [&](auto* bias) {
        bool hides = false;
        for (int lane = 0; lane < g.count; ++lane) {
            auto* row = bias + g.b * strides[0] + g.head[lane] * strides[1] + g.query[lane] * strides[2] + j * strides[3];
            for (i64 i = 0; i < n; ++i) {
                const A b = static_cast<A>(widen(row[i * strides[3]]));
                A& score = s[i * g.L + lane];
                const bool hidden = b == -infinity;
                hides |= hidden;
                score = hidden ? -infinity : score + b;
            }
        }
        return hides;
    });
}

template <class A, int N>
inline void add_alibi(const Problem& p, const Group<A, N>& g, i64 j, i64 n, A* s) {
    A slope[g.L], distance[g.L];
    for (int lane = 0; lane < g.L; ++lane) {
        slope[lane] = static_cast<A>(p.alibi[g.head[lane]]);
        distance[lane] = static_cast<A>(p.offset + g.query[lane] - j);
    }
    for (i64 i = 0; i < n; ++i) {
        for (int v = 0; v < N; ++v) {
            A* const at = s + i * g.L + v * g.W;
            store<A>(at, load(at) - load(slope + v * g.W) * (load(distance + v * g.W) - static_cast<A>(i)));
        }
    }
}

// −∞ wherever position, window or padding hides a key of [j, j + n).
template <class A, int N>
inline void hide_outside(Group<A, N>& g, i64 j, i64 n, A* s) {
    using Int = typename Simd<A>::Int;
    for (int lane = 0; lane < g.L; ++lane) {
        g.low[lane] = static_cast<Int>(larger_of(0, smaller_of(n, g.keys[lane].low - j)));
        g.high[lane] = static_cast<Int>(larger_of(0, smaller_of(n, g.keys[lane].high - j)));
    }
    for (int v = 0; v < N; ++v) {
        Ints<A> low, high;
        std::memcpy(&low, g.low + v * g.W, sizeof low);
        std::memcpy(&high, g.high + v * g.W, sizeof high);
        for (i64 i = 0; i < n; ++i) {
            A* const at = s + i * g.L + v * g.W;
            const Ints<A> key = static_cast<Int>(i) - Ints<A>{};
            const auto seen = (key >= low) & (key < high);
            store<A>(at, seen ? load(at) : all<A>(-infinity));
        }
    }
}

template <class A, int N>
inline bool hide_documents(const Problem& p, const Group<A, N>& g, i64 j, i64 n, A* s) {
    bool hides = false;
    const i64* k = p.k_segments + g.b * p.S + j;
    for (int lane = 0; lane < g.count; ++lane) {
        const i64 id = p.q_segments[g.b * p.T + g.query[lane]];
        for (i64 i = 0; i < n; ++i) {
            const bool hidden = k[i] != id;
            hides |= hidden;
            A& score = s[i * g.L + lane];
            score = hidden ? -infinity : score;
        }
    }
    return hides;
}

template <class A, int N>
inline bool hide_masked(const Problem& p, const Group<A, N>& g, i64 j, i64 n, A* s) {
    bool hides = false;
    const i64* strides = p.mask.strides;
    for (int lane = 0; lane < g.count; ++lane) {
        const char* row =
            p.mask.data + g.b * strides[0] + g.head[lane] * strides[1] + g.query[lane] * strides[2] + j * strides[3];
        for (i64 i = 0; i < n; ++i) {
            const bool hidden = !row[i * strides[3]];
            hides |= hidden;
            A& score = s[i * g.L + lane];
            score = hidden ? -infinity : score;
        }
    }
    return hides;
}

// What the options but the softcap make of scores of keys [j, j + n), in place; hidden ones become −∞.
// Returns whether any is hidden.
template <class A, int N>
inline bool add_and_hide(const Problem& p, Group<A, N>& g, i64 j, i64 n, A* s) {
    bool hides = false;
    if (p.bias.data) hides |= add_bias(p, g, j, n, s);
    if (p.alibi) add_alibi(p, g, j, n, s);
    if (j < g.full_from || j + n > g.full_to) {
        hide_outside(g, j, n, s);
        hides = true;
    }
    if (p.q_segments) hides |= hide_documents(p, g, j, n, s);
    if (p.mask.data) hides |= hide_masked(p, g, j, n, s);
    return hides;
}

// The same for scaled dot products, with the softcap, which comes first.
template <class A, int N>
inline bool apply_options(const Problem& p, Group<A, N>& g, i64 j, i64 n, A* s) {
    if (p.softcap != 0) cap<A, N>(p, n, s);
    return add_and_hide(p, g, j, n, s);
}

// The largest score of each lane.
template <class A, int N>
inline void largest(const A* s, i64 n, Vec<A> (&most)[N]) {
    constexpr int W = Simd<A>::W, L = N * W;
    Vec<A> other[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) most[v] = other[v] = all<A>(-infinity);
    i64 i = 0;
    for (; i + 2 <= n; i += 2) {
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) {
            most[v] = larger(load(s + i * L + v * W), most[v]);
            other[v] = larger(load(s + (i + 1) * L + v * W), other[v]);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
        if (i < n) most[v] = larger(load(s + i * L + v * W), most[v]);
        most[v] = larger(other[v], most[v]);
    }
}

// The recurrence of online softmax: takes in a tile of scores whose largest are `most`, and leaves e^(s−m) in
// their place. A row's numerators so far are to be multiplied by `fade`, because its m may have risen.
template <bool watching, class A, int N>
inline void absorb(Group<A, N>& g, A* s, i64 n, const Vec<A> (&most)[N], Vec<A> (&fade)[N]) {
    using V = Vec<A>;
    constexpr int W = Simd<A>::W, L = N * W;
    V base[N], sums[2][N] = {}, weighted[2][N] = {};
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
        const V m = larger(most[v], g.m[v]);
        base[v] = m == -infinity ? V{} : m;              // nothing seen yet: e^(−∞−0) = 0
        fade[v] = exp_negative(g.m[v] - base[v]);
        if constexpr (watching) {
            const V rise = g.m[v] == -infinity ? V{} : g.m[v] - base[v];
            g.u[v] = fade[v] * (g.u[v] + rise * g.l[v]);
        }
        g.l[v] *= fade[v];
        g.m[v] = m;
    }
    const auto take = [&](i64 i, int half) {
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) {
            A* const at = s + i * L + v * W;
            const V d = load(at) - base[v];
            const V e = exp_negative(d);
            store<A>(at, e);
            sums[half][v] += e;
            if constexpr (watching) {
                weighted[half][v] += e * larger(all<A>(-1e30f), d);  // 0 · −∞ would be NaN; 0 · a number is 0
            }
        }
    };
    i64 i = 0;
    for (; i + 2 <= n; i += 2) {
        take(i, 0);
        take(i + 1, 1);
    }
    if (i < n) take(i, 0);
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
        g.l[v] += sums[0][v] + sums[1][v];
        if constexpr (watching) g.u[v] += weighted[0][v] + weighted[1][v];
    }
}

// The `top` heaviest keys of each lane so far, heaviest first; among equals the earlier key.
template <class A>
struct Tops {
    static constexpr i64 few = 8;

    i64 top = 0;
    A* scores = nullptr;                     // (lanes, pitch(top)); what lies behind the first `top` means nothing
    i64* keys = nullptr;

    static i64 pitch(i64 top) { return larger_of(top, few) + few + 1; }

    A* of(int lane) const { return scores + lane * pitch(top); }
    A least(int lane) const { return of(lane)[top - 1]; }

    void clear(int lanes) {
        for (i64 i = 0; i < lanes * pitch(top); ++i) {
            scores[i] = -infinity;
            keys[i] = -1;
        }
    }

    // Keys come in rising order. One that is too light lands behind the first `top`, so nothing need be asked.
    void insert(int lane, A score, i64 key) {
        A* const s = of(lane);
        i64* const k = keys + lane * pitch(top);
        i64 at = 0;
        if (top <= few) {
            constexpr int W = Simd<A>::W;
            unsigned heavier = 0;            // one bit for each of the first few
            for (int i = 0; i < few; i += W) heavier |= bits<A>(load(s + i) >= score) << i;
            at = __builtin_popcount(heavier & ((1u << few) - 1));
            A moved[few];
            i64 moved_keys[few];
            std::memcpy(moved, s + at, sizeof moved);
            std::memcpy(moved_keys, k + at, sizeof moved_keys);
            std::memcpy(s + at + 1, moved, sizeof moved);
            std::memcpy(k + at + 1, moved_keys, sizeof moved_keys);
        } else {
            i64 end = top;
            while (at < end) {
                const i64 middle = (at + end) / 2;
                if (s[middle] >= score) at = middle + 1;
                else end = middle;
            }
            std::memmove(s + at + 1, s + at, static_cast<std::size_t>(top - at) * sizeof(A));
            std::memmove(k + at + 1, k + at, static_cast<std::size_t>(top - at) * sizeof(i64));
        }
        s[at] = score;
        k[at] = key;
    }
};

inline float just_below(float x) { return __builtin_nextafterf(x, -infinity); }
inline double just_below(double x) { return __builtin_nextafter(x, -static_cast<double>(infinity)); }

// What a score of this tile must exceed to be among the heaviest of vector v's rows. A row that has seen few keys
// could be entered by any; but if the tile is cut into `top` parts, the least of their maxima is already too light.
template <class A, int N>
inline Vec<A> bar(const Group<A, N>& g, const Tops<A>& tops, const A* s, i64 n, int v) {
    constexpr int W = Simd<A>::W, L = N * W;
    A least[W];
    bool fresh = false;
    for (int i = 0; i < W; ++i) {
        const int lane = v * W + i;
        least[i] = lane < g.count ? tops.least(lane) : infinity;
        fresh |= least[i] == -infinity;
    }
    if (!fresh || n < 4 * tops.top) return load(least);
    Vec<A> bound = all<A>(infinity);
    for (i64 part = 0; part < tops.top; ++part) {
        Vec<A> most = all<A>(-infinity);
        for (i64 i = n * part / tops.top; i < n * (part + 1) / tops.top; ++i) most = larger(load(s + i * L + v * W), most);
        bound = most < bound ? most : bound;
    }
    for (int i = 0; i < W; ++i) {
        const A under = just_below(bound[i]);
        least[i] = least[i] > under ? least[i] : under;
    }
    return load(least);
}

// Tiles are at most this many keys deep.
constexpr i64 deepest = 512;

template <class A, int N>
inline void keep_top(const Group<A, N>& g, Tops<A>& tops, const A* s, i64 j, i64 n, const Vec<A> (&most)[N]) {
    constexpr int W = Simd<A>::W, L = N * W;
    Vec<A> least[N];
    unsigned any = 0;
    for (int v = 0; v < N; ++v) {
        least[v] = bar(g, tops, s, n, v);
        any |= bits<A>(most[v] > least[v]);
    }
    if (!any) return;
    // First where, then what: a branch for every score would be guessed wrong too often.
    std::uint32_t sets[deepest];
    std::uint16_t rows[deepest];
    int hits = 0;
    for (i64 i = 0; i < n; ++i) {
        std::uint32_t set = 0;
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) set |= bits<A>(load(s + i * L + v * W) > least[v]) << (v * W);
        rows[hits] = static_cast<std::uint16_t>(i);
        sets[hits] = set;
        hits += set != 0;
    }
    for (int hit = 0; hit < hits; ++hit) {
        const i64 i = rows[hit];
        for (std::uint32_t set = sets[hit]; set; set &= set - 1) {
            const int lane = __builtin_ctz(set);
            tops.insert(lane, s[i * L + lane], j + i);
        }
    }
}

inline float log_of(float x) { return __builtin_logf(x); }
inline double log_of(double x) { return __builtin_log(x); }
inline float exp_of(float x) { return __builtin_expf(x); }
inline double exp_of(double x) { return __builtin_exp(x); }

// A finished row's statistics, and what its numerators are to be divided by (0 if it saw nothing).
template <class A>
struct Row {
    A m, l, u;

    A write(const Problem& p, const Results& r, i64 b, i64 h, i64 i) const {
        const i64 at = (b * p.H + h) * p.T + i;
        const bool nan = l != l, live = m != -infinity || nan;
        const A sink = p.sinks ? static_cast<A>(p.sinks[h]) : -infinity;
        A lse = live ? m + log_of(l) : -infinity, total = l;
        if (live && sink != -infinity) {     // a sink joins the denominator, and no value comes with it
            const A most = lse > sink ? lse : sink, least = lse > sink ? sink : lse;
            lse = most + log_of(1 + exp_of(least - most)) + (nan ? l : 0);
            total += exp_of(sink - m);
        }
        static_cast<A*>(r.lse)[at] = lse;
        if (r.watching) watch(r, at, live, sink, lse, total);
        return live ? total : 0;
    }

  private:
    // H = −Σ a log a = Σ a·(lse − m) − Σ a·(s − m), with the sink, if there is one, as one more outcome.
    void watch(const Results& r, i64 at, bool live, A sink, A lse, A total) const {
        // lse − m = log(total); lse itself is rounded to what scores are, and an entropy may be far smaller.
        const A above = total * 0 == 0 ? log_of(total) : lse - m;
        A entropy = live ? (above * l - u) / total : 0, weight = 0;
        if (live && sink != -infinity) {
            const A log_weight = sink < lse ? sink - lse : (lse != lse ? lse : 0);
            weight = exp_of(log_weight);
            if (weight != 0) entropy -= weight * log_weight;
        }
        static_cast<A*>(r.max_logit)[at] = l != l && m != infinity ? l : m;
        static_cast<A*>(r.entropy)[at] = entropy;
        static_cast<A*>(r.sink_weight)[at] = weight;
    }
};

// Writes the heaviest keys of a row whose lse is already written; `scores` and `keys` are its heaviest.
template <class A>
inline void write_top(const Problem& p, const Results& r, i64 b, i64 h, i64 i, const A* scores, const i64* keys) {
    const i64 at = (b * p.H + h) * p.T + i;
    const A lse = static_cast<const A*>(r.lse)[at];
    A* const weights = static_cast<A*>(r.top_weights) + at * r.top;
    for (i64 n = 0; n < r.top; ++n) {
        r.top_keys[at * r.top + n] = keys[n];
        weights[n] = keys[n] < 0 ? 0 : exp_of(scores[n] - lse);
    }
}

// One row once more, in plain loops of double: for the rare row whose sum passed the largest number although its mean
// does not. `m` is its largest score. The denominator is summed again too: weights whose scores are rounded in another
// way than its own would not add up to one.
inline void write_row_exactly(const Problem& p, const Results& r, i64 b, i64 h, i64 i, double m) {
    const i64 g = h / (p.H / p.G);
    const Interval keys = interval(p, b, i);
    const i64 *sq = p.q.strides, *sk = p.k.strides, *sv = p.v.strides;
    typed(p.type, p.q.data, [&](auto* q_data) {
        using In = typename Plain<__typeof__(*q_data)>::Is;
        const auto* q = q_data + b * sq[0] + h * sq[1] + i * sq[2];
        const auto* k = reinterpret_cast<const In*>(p.k.data) + b * sk[0] + g * sk[1];
        const auto* v = reinterpret_cast<const In*>(p.v.data) + b * sv[0] + g * sv[1];
        In* const out = reinterpret_cast<In*>(r.out) + ((b * p.H + h) * p.T + i) * p.E;
        const auto numerator = [&](i64 j) {
            double score = 0;
            for (i64 d = 0; d < p.D; ++d) {
                score += static_cast<double>(widen(q[d * sq[3]])) * static_cast<double>(widen(k[j * sk[2] + d * sk[3]]));
            }
            score *= p.scale;
            if (p.softcap != 0) score = p.softcap * __builtin_tanh(score / p.softcap);
            if (p.bias.data) score += bias_at(p, b, h, i, j);
            if (p.alibi) score -= p.alibi[h] * static_cast<double>(p.offset + i - j);
            return __builtin_exp(score - m);
        };
        double total = p.sinks ? __builtin_exp(p.sinks[h] - m) : 0;
        for (i64 j = keys.low; j < keys.high; ++j) {
            if (visible(p, b, h, i, j)) total += numerator(j);
        }
        constexpr i64 at_once = 64;
        for (i64 first = 0; first < p.E; first += at_once) {
            const i64 width = smaller_of(at_once, p.E - first);
            double mean[at_once] = {};
            for (i64 j = keys.low; j < keys.high; ++j) {
                if (!visible(p, b, h, i, j)) continue;
                const double weight = numerator(j) / total;
                for (i64 e = 0; e < width; ++e) {
                    mean[e] += weight * static_cast<double>(widen(v[j * sv[2] + (first + e) * sv[3]]));
                }
            }
            for (i64 e = 0; e < width; ++e) narrow(static_cast<decltype(widen(In{}))>(mean[e]), out[first + e]);
        }
    });
}

}  // namespace regardant::REGARDANT_ISA
