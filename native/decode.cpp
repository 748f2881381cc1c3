// Attention for few queries over long keys: limited by how fast K and V can be read, so each is read once.
//
// The keys are cut by their position into chunks, never by the number of threads; a task is one chunk for all the
// query heads that share a key/value head. Dot products run along the width, several keys by several rows at a
// time. Each chunk leaves its maximum, sum and numerators, which are merged in the order of the keys.
#include "decode.hpp"

#include "tile.hpp"

namespace regardant::REGARDANT_ISA {
namespace {

constexpr i64 chunk_keys = 512;  // of one task
constexpr i64 tile_keys = 32;    // whose rows of K and V stay in the second cache

template <class A>
constexpr int lanes = Simd<A>::W;

// The sums of W vectors, one to a lane: at each level two vectors give up half their lanes and become one. The
// halves are chosen so that most shuffles stay within 128 bits, and so that the lanes end in order.
template <class A>
inline Vec<A> sums_of(Vec<A>* x) {
    constexpr int W = Simd<A>::W;
    if constexpr (sizeof(A) == 8) {
        Vec<A> sums;
        for (int i = 0; i < W; ++i) sums[i] = sum<A>(x[i]);
        return sums;
    } else if constexpr (W == 16) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            x[i] = __builtin_shufflevector(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                   __builtin_shufflevector(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            x[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                   __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            x[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                   __builtin_shufflevector(x[i], x[i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
        return __builtin_shufflevector(x[0], x[2], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
               __builtin_shufflevector(x[0], x[2], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    } else if constexpr (W == 8) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            x[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
                   __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            x[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                   __builtin_shufflevector(x[i], x[i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
        }
        return __builtin_shufflevector(x[0], x[2], 0, 2, 8, 10, 4, 6, 12, 14) +
               __builtin_shufflevector(x[0], x[2], 1, 3, 9, 11, 5, 7, 13, 15);
    } else {
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            x[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 1, 4, 5) + __builtin_shufflevector(x[i], x[i + 1], 2, 3, 6, 7);
        }
        return __builtin_shufflevector(x[0], x[2], 0, 2, 4, 6) + __builtin_shufflevector(x[0], x[2], 1, 3, 5, 7);
    }
}

// s[key · W + row] = scale · k[key] · q[row] for J keys and R rows; width is a multiple of W.
template <class A, class In, int R, int J>
inline void dot(const In* k, i64 k_row, const A* q, i64 width, A scale, A* s) {
    constexpr int W = Simd<A>::W, pitch = W / J;  // R, or one more where R does not divide W
    static_assert(R <= pitch);
    Vec<A> x[W] = {};
#pragma GCC unroll 4
    for (i64 d = 0; d < width; d += W) {
        Vec<A> key[J];
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j) key[j] = load_wide(k + j * k_row + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const Vec<A> row = load(q + r * width + d);
#pragma GCC unroll 8
            for (int j = 0; j < J; ++j) x[j * pitch + r] += row * key[j];
        }
    }
    A lanes[W];
    store<A>(lanes, sums_of<A>(x) * scale);
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) std::memcpy(s + j * W, lanes + j * pitch, (J == 1 ? R : pitch) * sizeof(A));
}

// Memory to call for while something else is computed: one cache line of each of several rows.
struct Ahead {
    const char* line;
    i64 row;
};

// o[row] += Σ_j p[j · W + row] · v[j] for R rows and C vectors of columns.
template <class A, class In, int R, int C>
inline void mix_rows(const A* p, i64 keys, const In* v, i64 v_row, A* o, i64 width, Ahead ahead) {
    constexpr int W = Simd<A>::W;
    Vec<A> sum[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sum[r][c] = load(o + r * width + c * W);
    }
#pragma GCC unroll 4
    for (i64 j = 0; j < keys; ++j) {
        __builtin_prefetch(ahead.line + j * ahead.row, 0, 2);
        Vec<A> value[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) value[c] = load_wide(v + j * v_row + c * W);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const Vec<A> weight = all(p[j * W + r]);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sum[r][c] += weight * value[c];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) store<A>(o + r * width + c * W, sum[r][c]);
    }
}

// The same for one row at a time, without the values that it does not see: not even as 0 · NaN. In the same order, and
// so the same bits as if they were numbers.
template <class A, class In>
void mix_visible(const Problem& p, const Group<A, 1>& g, const A* s, i64 j, i64 keys, const In* v, i64 v_row, A* o,
                 i64 width) {
    for (int lane = 0; lane < g.count; ++lane) {
        for (i64 e = 0; e < p.E; ++e) {
            A sum = o[lane * width + e];
            for (i64 i = 0; i < keys; ++i) {
                const A value = widen(v[i * v_row + e]);
                if (value * 0 == 0 || visible(p, g.b, g.head[lane], g.query[lane], j + i)) {
                    sum += s[i * g.W + lane] * value;
                }
            }
            o[lane * width + e] = sum;
        }
    }
}

template <class A>
bool all_finite(const A* o, i64 count) {
    constexpr int W = Simd<A>::W;
    Vec<A> zeros{};
    for (i64 i = 0; i < count; i += W) zeros += load(o + i) * 0;
    return sum<A>(zeros) == 0;
}

template <class In>
inline void fetch(const In* row, i64 width) {
    for (i64 d = 0; d < width; d += 64 / static_cast<i64>(sizeof(In))) __builtin_prefetch(row + d, 0, 2);
}

template <class A, class In, int R>
inline void score_rows(const In* k, i64 k_row, i64 keys, const A* q, i64 width, A scale, A* s, const In* v, i64 v_row,
                       i64 v_width) {
    constexpr int W = Simd<A>::W, J = R == 3 ? W / 4 : W / R;
    i64 j = 0;
    for (; j + J <= keys; j += J) {
        // The values come next, by columns: their rows are called for now, one after another.
        for (int i = 0; i < J; ++i) fetch(v + (j + i) * v_row, v_width);
        dot<A, In, R, J>(k + j * k_row, k_row, q, width, scale, s + j * W);
    }
    for (; j < keys; ++j) dot<A, In, R, 1>(k + j * k_row, k_row, q, width, scale, s + j * W);
}

// The keys come next again: while values are mixed by columns, `lines` cache lines of each of their rows are called.
template <class A, class In, int R>
inline void mix_all(const A* p, i64 keys, const In* v, i64 v_row, A* o, i64 width, Ahead next, i64 lines) {
    constexpr int W = Simd<A>::W, C = R <= 2 ? 4 : 2;
    const Ahead nothing{reinterpret_cast<const char*>(p), 0};
    i64 e = 0;
    for (; e + C * W <= width; e += C * W, --lines, next.line += 64) {
        mix_rows<A, In, R, C>(p, keys, v + e, v_row, o + e, width, lines > 0 ? next : nothing);
    }
    for (; e < width; e += W) mix_rows<A, In, R, 1>(p, keys, v + e, v_row, o + e, width, nothing);
}

// Call f<R>(first row) for the rows of a group, up to four at a time.
template <class A, class F>
inline void by_rows(int rows, const F& f) {
    constexpr int most = Simd<A>::W < 4 ? Simd<A>::W : 4;
    for (int first = 0; first < rows; first += most) {
        const int left = rows - first;
        if (left == 1) f.template operator()<1>(first);
        else if (left == 2 || most == 2) f.template operator()<2>(first);
        else if constexpr (most == 4) {
            if (left == 3) f.template operator()<3>(first);
            else f.template operator()<4>(first);
        }
    }
}

// What a chunk leaves of a row: m, l, u; then the numerators and, where looking, the heaviest keys.
template <class A>
struct Partial {
    A m, l, u;
};

// Where the parts of all rows and chunks lie: index (row · chunks + chunk).
template <class A>
struct Parts {
    i64 chunks;
    i64 first_chunk;
    Partial<A>* partial;
    A* numerators;               // pitch E
    A* top_scores;
    i64* top_keys;
};

// Keys or values of one head: as they lie where whole vectors of In can be loaded, else widened and filled up.
template <class In>
class Source {
  public:
    using A = decltype(widen(In{}));
    static constexpr int W = Simd<A>::W;

    static bool in_place(const Array4& array, i64 width) { return array.strides[3] == 1 && width % W == 0; }

    Source(const Array4& array, i64 b, i64 g)
        : row(array.strides[2]),
          data(reinterpret_cast<const In*>(array.data) + b * array.strides[0] + g * array.strides[1]) {}

    const i64 row;
    const In* const data;
};

template <class A, class In, bool watching>
bool chunk(const Problem& p, const Results& r, const Parts<A>& parts, i64 task) {
    constexpr int W = lanes<A>;
    const i64 repeat = p.H / p.G, rows = repeat * p.T;
    const i64 c = task % parts.chunks, g = task / parts.chunks % p.G, b = task / parts.chunks / p.G;
    const i64 begin = (parts.first_chunk + c) * chunk_keys;
    const i64 D = (p.D + W - 1) / W * W, E = (p.E + W - 1) / W * W, item = sizeof(A);
    const bool copy_k = !Source<In>::in_place(p.k, p.D), copy_v = !Source<In>::in_place(p.v, p.E);
    Scratch scratch(workspace(padded(W * D * item) + 2 * padded(W * E * item) + padded(tile_keys * W * item) +
                              padded(copy_k * tile_keys * D * item) + padded(copy_v * tile_keys * E * item) +
                              padded(W * Tops<A>::pitch(r.top) * item) + padded(W * Tops<A>::pitch(r.top) * 8)));
    if (!scratch) return false;
    A* const q = scratch.take<A>(W * D);
    A* const o = scratch.take<A>(W * E);
    A* const o_before = scratch.take<A>(W * E);
    A* const s = scratch.take<A>(tile_keys * W);
    A* const k_copy = scratch.take<A>(copy_k * tile_keys * D);
    A* const v_copy = scratch.take<A>(copy_v * tile_keys * E);
    const i64 kept = W * Tops<A>::pitch(r.top);
    Tops<A> tops{watching ? r.top : 0, scratch.take<A>(kept), scratch.take<i64>(kept)};
    const Source<In> keys(p.k, b, g), values(p.v, b, g);
    for (i64 i = 0; i < tile_keys * W; ++i) s[i] = 0;

    for (i64 from = 0; from < rows; from += W) {
        Group<A, 1> group{};
        group.b = b;
        for (i64 row = from; row < smaller_of(from + W, rows); ++row) group.add(p, g * repeat + row / p.T, row % p.T);
        group.close();
        for (int lane = 0; lane < group.count; ++lane) {
            const i64* x = p.q.strides;
            const i64 at = b * x[0] + group.head[lane] * x[1] + group.query[lane] * x[2];
            widen_rows<A>(p.type, p.q.data + at * static_cast<i64>(sizeof(In)), 0, x[3], 1, p.D, q + lane * D, D);
        }
        for (i64 i = 0; i < W * E; ++i) o[i] = 0;
        tops.clear(tops.top ? W : 0);

        const i64 low = larger_of(begin, group.first), high = smaller_of(begin + chunk_keys, group.last);
        for (i64 j = low / tile_keys * tile_keys; j < high; j += tile_keys) {
            const i64 start = larger_of(j, low - low % 2), n = smaller_of(j + tile_keys, high) - start;
            if (apart(p, group, start, n)) continue;
            const auto with = [&](auto* k, i64 k_row, auto* v, i64 v_row) {
                using K = typename Plain<__typeof__(*k)>::Is;
                using V = typename Plain<__typeof__(*v)>::Is;
                by_rows<A>(group.count, [&]<int R>(int first) {
                    if constexpr (sizeof(K) == sizeof(V)) {
                        score_rows<A, K, R>(k, k_row, n, q + first * D, D, static_cast<A>(p.scale), s + first, v, v_row, E);
                    } else {
                        score_rows<A, K, R>(k, k_row, n, q + first * D, D, static_cast<A>(p.scale), s + first, k, 0, 0);
                    }
                });
                const bool hides = apply_options(p, group, start, n, s);
                Vec<A> most[1], fade[1];
                largest<A, 1>(s, n, most);
                if (tops.top) keep_top(group, tops, s, start, n, most);
                absorb<watching>(group, s, n, most, fade);
                for (int lane = 0; lane < group.count; ++lane) {
                    const A by = fade[0][lane];
                    if (by == 1) continue;
                    for (i64 e = 0; e < E; e += W) store<A>(o + lane * E + e, load(o + lane * E + e) * by);
                }
                const i64 used = group.count * E;
                if (hides) std::memcpy(o_before, o, used * sizeof(A));
                const Ahead next{reinterpret_cast<const char*>(k + n * k_row), k_row * static_cast<i64>(sizeof(K))};
                const i64 lines = (D * static_cast<i64>(sizeof(K)) + 63) / 64;
                by_rows<A>(group.count, [&]<int R>(int first) {
                    mix_all<A, V, R>(s + first, n, v, v_row, o + first * E, E, next, first ? 0 : lines);
                });
                if (hides && !all_finite(o, used)) {
                    std::memcpy(o, o_before, used * sizeof(A));
                    mix_visible(p, group, s, start, n, v, v_row, o, E);
                }
            };
            const In* const k = keys.data + start * keys.row;
            const In* const v = values.data + start * values.row;
            if (copy_k) {
                widen_rows<A>(p.type, reinterpret_cast<const char*>(k), keys.row, p.k.strides[3], n, p.D, k_copy, D);
            }
            if (copy_v) {
                widen_rows<A>(p.type, reinterpret_cast<const char*>(v), values.row, p.v.strides[3], n, p.E, v_copy, E);
            }
            if (copy_k && copy_v) with(k_copy, D, v_copy, E);
            else if (copy_k) with(k_copy, D, v, values.row);
            else if (copy_v) with(k, keys.row, v_copy, E);
            else with(k, keys.row, v, values.row);
        }
        for (int lane = 0; lane < group.count; ++lane) {
            const i64 at = ((b * p.G + g) * rows + from + lane) * parts.chunks + c;
            parts.partial[at] = {group.m[0][lane], group.l[0][lane], group.u[0][lane]};
            std::memcpy(parts.numerators + at * p.E, o + lane * E, p.E * sizeof(A));
            if (tops.top) {
                const i64 first = lane * tops.pitch(r.top);
                std::memcpy(parts.top_scores + at * r.top, tops.scores + first, r.top * sizeof(A));
                std::memcpy(parts.top_keys + at * r.top, tops.keys + first, r.top * sizeof(i64));
            }
        }
    }
    return true;
}

// The chunks of one row, merged in order: raising a maximum multiplies what was summed under the lower one.
template <class A>
void merge(const Problem& p, const Results& r, const Parts<A>& parts, i64 row, A* o, Tops<A>& tops) {
    const i64 repeat = p.H / p.G;
    const i64 i = row % p.T, h = row / p.T % repeat + row / (p.T * repeat) % p.G * repeat, b = row / p.T / p.H;
    const Partial<A>* const part = parts.partial + row * parts.chunks;
    Row<A> all{-infinity, 0, 0};
    for (i64 c = 0; c < parts.chunks; ++c) all.m = part[c].m > all.m ? part[c].m : all.m;
    for (i64 e = 0; e < p.E; ++e) o[e] = 0;
    if (tops.top) tops.clear(1);
    for (i64 c = 0; c < parts.chunks; ++c) {
        const A drop = part[c].m == -infinity ? 0 : part[c].m - all.m, fade = exp_of(drop);
        const A* const n = parts.numerators + (row * parts.chunks + c) * p.E;
        all.l += fade * part[c].l;
        all.u += fade * (part[c].u + drop * part[c].l);
        for (i64 e = 0; e < p.E; ++e) o[e] += fade * n[e];
        for (i64 t = 0; t < tops.top; ++t) {
            const i64 at = (row * parts.chunks + c) * r.top + t;
            if (parts.top_keys[at] >= 0 && parts.top_scores[at] > tops.least(0)) {
                tops.insert(0, parts.top_scores[at], parts.top_keys[at]);
            }
        }
    }
    const A total = all.write(p, r, b, h, i);
    A bad = 0;
    for (i64 e = 0; e < p.E; ++e) {
        o[e] = total == 0 ? o[e] * 0 : o[e] / total;  // nothing but 0 was added, or a visible NaN
        bad += o[e] * 0;
    }
    const i64 at = (b * p.H + h) * p.T + i;
    narrow_row<A>(p.type, o, p.E, static_cast<char*>(r.out) + at * p.E * size_of(p.type));
    if (tops.top) {
        write_top(p, r, b, h, i, tops.scores, tops.keys);
    }
    // A sum that passed the largest number, or a value that is no number itself.
    if (bad != 0 && all.l == all.l && all.m * 0 == 0) write_row_exactly(p, r, b, h, i, all.m);
}

template <class A, class In, bool watching>
bool decode_as(const Problem& p, const Results& r, int threads) {
    i64 first = p.S, last = 0;   // the keys that any row sees
    for (i64 b = 0; b < p.B; ++b) {
        for (i64 i = 0; i < p.T; ++i) {
            const Interval keys = interval(p, b, i);
            if (keys.low == keys.high) continue;
            first = smaller_of(first, keys.low);
            last = larger_of(last, keys.high);
        }
    }
    Parts<A> parts{1, 0, nullptr, nullptr, nullptr, nullptr};
    if (first < last) {
        parts.first_chunk = first / chunk_keys;
        parts.chunks = (last - 1) / chunk_keys - parts.first_chunk + 1;
    }
    const i64 rows = p.B * p.H * p.T, count = rows * parts.chunks, item = sizeof(A), top = watching ? r.top : 0;
    const Memory memory(padded(count * sizeof(Partial<A>)) + padded(count * p.E * item) + padded(count * top * item) +
                        padded(count * top * 8) + padded(p.E * item) + padded(Tops<A>::pitch(top) * item) +
                        padded(Tops<A>::pitch(top) * 8));
    if (!memory.data) return false;
    Scratch scratch(memory.data);
    parts.partial = scratch.take<Partial<A>>(count);
    parts.numerators = scratch.take<A>(count * p.E);
    parts.top_scores = scratch.take<A>(count * top);
    parts.top_keys = scratch.take<i64>(count * top);
    A* const o = scratch.take<A>(p.E);
    Tops<A> tops{top, scratch.take<A>(Tops<A>::pitch(top)), scratch.take<i64>(Tops<A>::pitch(top))};
    if (!each(p.B * p.G * parts.chunks, threads,
              [&](i64 task) { return chunk<A, In, watching>(p, r, parts, task); })) {
        return false;
    }
    for (i64 row = 0; row < rows; ++row) merge(p, r, parts, row, o, tops);
    return true;
}

template <bool watching>
bool decode_any(const Problem& p, const Results& r, int threads) {
    switch (p.type) {
        case Type::float64: return decode_as<double, double, watching>(p, r, threads);
        case Type::float32: return decode_as<float, float, watching>(p, r, threads);
        case Type::float16: return decode_as<float, Half, watching>(p, r, threads);
        default: return decode_as<float, Brain, watching>(p, r, threads);
    }
}

}  // namespace

bool decode(const Problem& p, const Results& r, int threads) {
    return r.watching ? decode_any<true>(p, r, threads) : decode_any<false>(p, r, threads);
}

}  // namespace regardant::REGARDANT_ISA
