// Checks the kernels of every instruction set that this machine has, without Python: against the definition of
// attention, written here once more in plain loops, and against themselves where bits must not differ.
//
//     check_kernels [all | numbers | callers | fork] [how many situations are drawn] [the first one's seed]
//
// A situation follows from its seed alone, on any machine: `check_kernels numbers 1 SEED` repeats one that failed.
//
// How much the kernels may err is not guessed. The definition is computed in a wider type, which counts as exact, and
// naively in the type that the kernels compute in, its sums in several orders; the kernels may err twice as much as
// the worst of those, plus one rounding of the result.
//
// Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width,
// R by C blocks of pooled weights, M heads and N queries of rows asked for.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "backward.hpp"
#include "dispatch.hpp"
#include "pool.hpp"
#include "problem.hpp"
#include "situations.hpp"

namespace {

using namespace checks;

// The definition, computed in A. `out` of a row is a mean of values: `size` is the same mean of their sizes, of which
// `loudest` is the largest.
template <class A>
struct Answer {
    std::vector<A> out, size, lse, most, entropy, sink, weights, received, pooled, scores;
    A loudest = 0;
};

// Order 0 is as one would write it down. Others add up widths and keys in other orders, and put the brackets elsewhere:
// around scale · q, around bias and ALiBi, around the sum that is divided; and they subtract a little more than the
// maximum, for powers that are rounded otherwise. `paired`: weights are rounded to bfloat16
// before they meet the values, as the kernels do where the machine multiplies pairs of such numbers.
template <class A>
Answer<A> define(const Situation& x, std::uint64_t order, bool paired = false) {
    const Problem& p = x.p;
    const i64 T = p.T, S = p.S, D = p.D, E = p.E, rows = x.rows();
    constexpr A none = -std::numeric_limits<A>::infinity();
    Answer<A> a;
    a.out.assign(rows * E, 0);
    a.size.assign(rows, 0);
    a.lse.assign(rows, none);
    a.most.assign(rows, none);
    a.entropy.assign(rows, 0);
    a.sink.assign(rows, 0);
    a.scores.assign(rows * S, none);
    const bool scaled_queries = order & 1, biases_first = order & 2, fused = order & 4;
    const bool divided_last = order & 8 && !x.huge;
    const A scale = static_cast<A>(p.scale), beyond = static_cast<A>(0.07 * static_cast<double>(order % 10));
    Random random(order);
    std::vector<i64> ds = random.order(D), js = random.order(S);
    if (order == 0) std::sort(ds.begin(), ds.end()), std::sort(js.begin(), js.end());
    std::vector<A> k(D * S), v(S * E), s(S), sizes(E);
    for (i64 b = 0; b < p.B; ++b) {
        for (i64 h = 0; h < p.H; ++h) {
            const i64 g = h / (p.H / p.G);
            for (i64 d = 0; d < D; ++d) {
                for (i64 j = 0; j < S; ++j) k[d * S + j] = static_cast<A>(x.k.at(b, g, js[j], ds[d]));
            }
            for (i64 j = 0; j < S; ++j) {
                for (i64 e = 0; e < E; ++e) v[j * E + e] = static_cast<A>(x.v.at(b, g, js[j], e));
            }
            for (i64 i = 0; i < T; ++i) {
                const i64 row = (b * p.H + h) * T + i;
                std::fill(s.begin(), s.end(), A{0});
                for (i64 d = 0; d < D; ++d) {
                    const A qd = static_cast<A>(x.q.at(b, h, i, ds[d])) * (scaled_queries ? scale : 1);
                    for (i64 j = 0; j < S; ++j) s[j] += qd * k[d * S + j];
                }
                bool live = false;
                A most = none;
                for (i64 n = 0; n < S; ++n) {
                    const i64 j = js[n];
                    if (!x.sees(b, h, i, j)) continue;
                    if (!scaled_queries) s[n] *= scale;
                    if (p.softcap != 0) s[n] = static_cast<A>(p.softcap) * std::tanh(s[n] / static_cast<A>(p.softcap));
                    const A bias = x.bias ? static_cast<A>(x.bias.at(b, h, i, j)) : 0;
                    const A slope = p.alibi ? static_cast<A>(p.alibi[h]) : 0;
                    const A distance = static_cast<A>(p.offset + i - j);
                    if (fused) s[n] = std::fma(-slope, distance, s[n] + bias);
                    else if (biases_first) s[n] += bias - slope * distance;
                    else s[n] = s[n] + bias - slope * distance;
                    live = true;
                    if (most == most && !(s[n] <= most)) most = s[n];  // NaN, once met, stays
                }
                if (!live) continue;
                const A sink = p.sinks ? static_cast<A>(p.sinks[h]) : none, peak = std::max(sink, most);
                const A base = most == most ? peak + beyond : most;
                A total = 0;
                for (i64 n = 0; n < S; ++n) {
                    if (x.sees(b, h, i, js[n])) total += std::exp(s[n] - base);
                }
                total += std::exp(sink - base);
                const A lse = base + std::log(total);
                a.lse[row] = lse;
                a.most[row] = most;
                std::fill(sizes.begin(), sizes.end(), A{0});
                for (i64 n = 0; n < S; ++n) {
                    const i64 j = js[n];
                    if (!x.sees(b, h, i, j)) continue;
                    const A power = std::exp(s[n] - base);
                    const A weight = (paired ? to_eight_bits(power) : power) / (divided_last ? 1 : total);
                    for (i64 e = 0; e < E; ++e) {
                        a.out[row * E + e] += weight * v[n * E + e];
                        sizes[e] += weight * std::abs(v[n * E + e]);
                    }
                    if (weight > 0) a.entropy[row] -= weight * (s[n] - base - std::log(total));
                    a.scores[row * S + j] = s[n];
                }
                if (divided_last) {
                    for (i64 e = 0; e < E; ++e) a.out[row * E + e] /= total;
                    a.entropy[row] /= total;
                }
                for (A value : v) a.loudest = std::isfinite(value) ? std::max(a.loudest, std::abs(value)) : a.loudest;
                for (A one : sizes) a.size[row] = one == one ? std::max(a.size[row], one) : a.size[row];
                a.sink[row] = std::exp(std::min<A>(sink - lse, 0));
                if (a.sink[row] > 0) a.entropy[row] -= a.sink[row] * (sink - lse);
            }
        }
    }
    return a;
}

// Finished weights and their sums, from scores and an lse that was computed before.
template <class A>
void weigh(const Situation& x, Answer<A>& a, const std::vector<A>& lse) {
    const Problem& p = x.p;
    const i64 T = p.T, S = p.S;
    a.weights.assign(x.rows() * S, 0);
    a.received.assign(p.B * p.H * S, 0);
    a.pooled.assign(p.B * p.H * x.R * x.C, 0);
    for (i64 bh = 0; bh < p.B * p.H; ++bh) {
        for (i64 i = 0; i < T; ++i) {
            const i64 row = bh * T + i;
            for (i64 j = 0; j < S; ++j) {
                if (!x.visible[row * S + j]) continue;
                a.weights[row * S + j] = std::exp(a.scores[row * S + j] - lse[row]);
                a.received[bh * S + j] += a.weights[row * S + j];
            }
        }
        for (i64 r = 0; r < x.R; ++r) {
            for (i64 c = 0; c < x.C; ++c) {
                A& mass = a.pooled[(bh * x.R + r) * x.C + c];
                for (i64 i = T * r / x.R; i < T * (r + 1) / x.R; ++i) {
                    for (i64 j = S * c / x.C; j < S * (c + 1) / x.C; ++j) mass += a.weights[(bh * T + i) * S + j];
                }
            }
        }
    }
}

// What the kernels gave, byte by byte.
struct Given {
    std::vector<char> out, lse, most, entropy, sink, top_keys, top_weights, received, pooled, rows;
};

constexpr std::vector<char> Given::* all_given[] = {
    &Given::out, &Given::lse, &Given::most, &Given::entropy, &Given::sink, &Given::top_keys, &Given::top_weights,
    &Given::received, &Given::pooled, &Given::rows};
constexpr const char* names_given[] = {
    "out", "lse", "max_logit", "entropy", "sink_weight", "top_keys", "top_weights", "received", "pooled", "rows"};

// Every call, on so many threads, into memory full of `poison`; looking or not.
Given take(const Kernels& kernels, const Situation& x, int threads, bool watching, char poison) {
    const Problem& p = x.p;
    const i64 item = p.type == Type::float64 ? 8 : 4, rows = x.rows();
    Given g;
    const auto room = [&](std::vector<char>& bytes, i64 count) {
        bytes.assign(count, poison);
        return bytes.data();
    };
    Results r{};
    r.out = room(g.out, rows * p.E * format(p.type).size);
    r.lse = room(g.lse, rows * item);
    r.watching = watching;
    if (watching) {
        r.max_logit = room(g.most, rows * item);
        r.entropy = room(g.entropy, rows * item);
        r.sink_weight = room(g.sink, rows * item);
        r.top = x.top;
        r.top_keys = reinterpret_cast<i64*>(room(g.top_keys, rows * x.top * 8));
        r.top_weights = room(g.top_weights, rows * x.top * item);
    }
    require(kernels.attend(p, r, threads), "attend had no memory");
    if (!watching) return g;
    // Each by itself or both at once: they are summed differently.
    Sums both{g.lse.data(), room(g.received, p.B * p.H * p.S * item), nullptr, 1, 1};
    if (x.seed % 3 != 0) require(kernels.sums(p, both, threads), "sums had no memory");
    if (x.seed % 3 == 1) both.received = nullptr;
    if (x.seed % 3 != 2) {
        both.pooled = room(g.pooled, p.B * p.H * x.R * x.C * item);
        both.R = x.R;
        both.C = x.C;
        require(kernels.sums(p, both, threads), "sums had no memory");
    }
    const auto M = static_cast<i64>(x.heads.size()), N = static_cast<i64>(x.queries.size());
    g.rows.assign(p.B * M * N * p.S * item, 0);
    const Rows some{g.lse.data(), x.heads.data(), x.queries.data(), M, N, g.rows.data()};
    require(kernels.rows(p, some, threads), "rows had no memory");
    return g;
}

void require_same(const Given& one, const Given& other, int fields, const std::string& when) {
    for (int f = 0; f < fields; ++f) {
        const std::vector<char>&a = one.*all_given[f], &b = other.*all_given[f];
        if (a == b) continue;
        i64 at = 0;
        while (a[at] == b[at]) ++at;
        throw Failure(text(names_given[f], " has other bits ", when, ", from byte ", at, " on"));
    }
}

// What an error is measured in: |error| / (absolute + relative · |exact|). Numbers under `least` may come out as any
// other such number. `powers`: what e^x adds in units, 3 + |x|, for powers that naive computation has from a library:
// its own error (simd.hpp), and x is rounded once more where it is multiplied by log₂e.
struct Measure {
    double absolute, relative, least, powers;
};

// How far the kernels may be from the exact numbers, and where they are farther.
template <class Exact, class A>
class Judge {
  public:
    Judge(const Situation& x, Exact, A) : x_(x), exact_(define<Exact>(x, 0)) {
        // The fewer numbers there are, the more orders it takes to know how large an error is to be expected.
        const i64 orders = std::min<i64>(60, std::max<i64>(10, 240 / std::max<i64>(1, x.scores())));
        for (i64 order = 0; order < orders; ++order) naive_.push_back(define<A>(x, order));
        // Whoever computes weights when they are asked for sums up their scores in another order than their lse's.
        for (i64 order = 0; order < orders; ++order) weigh(x, naive_[order], naive_[(order + 1) % orders].lse);
        weigh(x, exact_, exact_.lse);
        for (i64 order = 0; order < orders && pairs(x.p); ++order) paired_.push_back(define<A>(x, order, true));
        const Type wide = x.p.type == Type::float64 ? Type::float64 : Type::float32;
        unit_ = std::ldexp(1.0, -format(wide).digits);
        tiny_ = std::ldexp(1.0, format(wide).lowest + format(wide).digits + 1);
        powers_ = 3;
        // tanh errs by two units in the last place (simd.hpp), a library's by one: four units of 2^−digits beyond it.
        capped_ = x.p.softcap != 0 ? 4 : 0;
        for (std::size_t i = 0; i < exact_.weights.size(); ++i) {
            const Exact at = std::abs(exact_.scores[i]) + std::abs(exact_.lse[i / x.p.S]);
            if (exact_.weights[i] > tiny_) powers_ = std::max(powers_, 3 + (1 + capped_) * static_cast<double>(at));
        }
    }

    const Answer<Exact>& exact() const { return exact_; }
    const std::vector<Answer<A>>& naive() const { return naive_; }
    double powers() const { return powers_ + capped_; }

    // Whether a problem's products are taken in pairs, where an instruction set has them.
    static bool pairs(const Problem& p) { return p.type == Type::bfloat16 && p.T > 16; }

    // Twice what naive computations err at most.
    double allowed(std::vector<Exact> Answer<Exact>::* field, std::vector<A> Answer<A>::* field_naive,
                   const Measure& m) const {
        const std::vector<Exact>& exact = exact_.*field;
        Exact worst = 0;
        for (const Answer<A>& one : naive_) {
            const std::vector<A>& got = one.*field_naive;
            for (std::size_t i = 0; i < exact.size(); ++i) {
                const Exact error = std::abs(static_cast<Exact>(got[i]) - exact[i]);
                if (std::isfinite(exact[i]) && std::isfinite(error)) worst = std::max(worst, error / in(m, exact[i]));
            }
        }
        return static_cast<double>(2 * worst);
    }

    void check(const Given& g, bool in_pairs) const {
        const Problem& p = x_.p;
        const Type wide = p.type == Type::float64 ? Type::float64 : Type::float32;
        const Measure share{0, 1, tiny_, powers_}, sums{0, 1, tiny_ * static_cast<double>(p.T * p.S), powers_};
        check_out(numbers(p.type, g.out), in_pairs && pairs(p) ? paired_ : naive_);
        // An lse is m + log l: what rounds l is added to what rounds the sum, and a sink rounds it once more.
        const Measure lse{1, 1, unit_, (p.sinks ? 1 : 0) + capped_};
        check_all("lse", numbers(wide, g.lse), &Answer<Exact>::lse, &Answer<A>::lse, lse);
        if (x_.stray.empty()) {  // what looking says of a row that is NaN is not defined
            // Any score errs as the largest does, and there are more of them to learn it from.
            const std::vector<double> most = numbers(wide, g.most);
            const Measure m{1, 1, 0, capped_};
            const double scores = allowed(&Answer<Exact>::scores, &Answer<A>::scores, m);
            for (std::size_t i = 0; i < most.size(); ++i) near("max_logit", i, most[i], exact_.most[i], scores, m);
            // Terms a·log a of weights that are taken for 0 are missing: a few hundred times a at most.
            const Measure entropy{1, 0, tiny_ * static_cast<double>(p.S) * 1000, powers_};
            check_all("entropy", numbers(wide, g.entropy), &Answer<Exact>::entropy, &Answer<A>::entropy, entropy);
            check_all("sink_weight", numbers(wide, g.sink), &Answer<Exact>::sink, &Answer<A>::sink, share);
            check_top(numbers(wide, g.top_weights), g);
        }
        if (x_.seed % 3 != 0) {
            check_all("received", numbers(wide, g.received), &Answer<Exact>::received, &Answer<A>::received, sums);
        }
        if (x_.seed % 3 != 2) {
            check_all("pooled", numbers(wide, g.pooled), &Answer<Exact>::pooled, &Answer<A>::pooled, sums);
        }
        check_rows(numbers(wide, g.rows));
    }

  private:
    static Exact in(const Measure& m, Exact exact) { return m.absolute + m.relative * std::abs(exact); }

    // One rounding of the result comes on top.
    void near(const char* what, std::size_t at, double got, Exact exact, double allowed, const Measure& m) const {
        const double wanted = static_cast<double>(exact);
        if (!std::isfinite(wanted)) {
            const bool same = wanted == got || (wanted != wanted && got != got);
            return require(same, what, "[", at, "] is ", got, ", should be ", wanted);
        }
        const Exact error = std::abs(static_cast<Exact>(got) - exact), unit = unit_ * in(m, exact);
        const Exact roundings = unit_ * (1 + m.powers) * std::abs(exact);
        require(error <= allowed * in(m, exact) + roundings + m.least, what, "[", at, "] is ", got, ", should be ",
                wanted, ": errs by ", error / unit, " units, allowed are ", allowed / unit_, " and ", roundings / unit);
    }

    void check_all(const char* what, const std::vector<double>& got, std::vector<Exact> Answer<Exact>::* field,
                   std::vector<A> Answer<A>::* field_naive, const Measure& m) const {
        const std::vector<Exact>& exact = exact_.*field;
        require(got.size() == exact.size(), what, " has the wrong size");
        const double most = allowed(field, field_naive, m);
        for (std::size_t i = 0; i < got.size(); ++i) near(what, i, got[i], exact[i], most, m);
    }

    void check_out(const std::vector<double>& got, const std::vector<Answer<A>>& naive) const {
        const Problem& p = x_.p;
        const i64 E = p.E;
        Exact worst = 0;
        for (const Answer<A>& one : naive) {
            for (std::size_t i = 0; i < got.size(); ++i) {
                const Exact error = std::abs(static_cast<Exact>(one.out[i]) - exact_.out[i]);
                if (error == error && error > 0) worst = std::max(worst, error / exact_.size[i / E]);
            }
        }
        const Format& f = format(p.type);
        const Exact rounding = std::ldexp(1.0, -f.digits);
        for (std::size_t i = 0; i < got.size(); ++i) {
            const Exact exact = exact_.out[i];
            const std::size_t row = i / E;
            if (exact != exact || exact_.size[row] == 0) {
                const bool same = exact != exact ? got[i] != got[i] : got[i] == 0;
                require(same, "out[", i, "] is ", got[i], ", should be ", exact);
                continue;
            }
            // A sink may leave all keys together next to nothing: e^−(lse − m), where it is not taken for 0.
            const Exact error = std::abs(static_cast<Exact>(got[i]) - exact);
            const Exact size = exact_.size[row], unit = unit_ * size;
            const Exact share = p.sinks ? unit_ * (exact_.lse[row] - exact_.most[row]) : 0;
            const Exact least = std::ldexp(1.0, f.lowest) + (p.sinks ? tiny_ * exact_.loudest * p.S : 0);
            require(error <= (2 * worst + share) * size + rounding * std::abs(exact) + least, "out[", i, "] is ",
                    got[i], ", should be ", exact, ": errs by ", error / unit, " units of the values, allowed are ",
                    2 * worst / unit_, " and ", share / unit_, " and a rounding");
        }
    }

    void check_top(const std::vector<double>& weights, const Given& g) const {
        const i64 S = x_.p.S, top = x_.top;
        const Measure m{0, 1, tiny_, powers_};
        const double most = allowed(&Answer<Exact>::weights, &Answer<A>::weights, m);
        std::vector<i64> order;
        for (i64 row = 0; row < x_.rows() && top; ++row) {
            const Exact *a = exact_.weights.data() + row * S, *s = exact_.scores.data() + row * S;
            const char* sees = x_.visible.data() + row * S;
            order.clear();
            for (i64 j = 0; j < S; ++j) {
                if (sees[j]) order.push_back(j);
            }
            std::stable_sort(order.begin(), order.end(), [&](i64 i, i64 j) { return s[i] > s[j]; });
            std::vector<char> listed(S, 0);
            i64 before = -1;
            for (i64 n = 0; n < top; ++n) {
                i64 key;
                std::memcpy(&key, g.top_keys.data() + (row * top + n) * 8, 8);
                const double weight = weights[row * top + n];
                const auto says = [&] { return text("row ", row, " lists key ", key, " in place ", n); };
                if (n >= static_cast<i64>(order.size())) {
                    require(key == -1 && weight == 0, says, " of weight ", weight, ", but sees ", order.size());
                    continue;
                }
                require(key >= 0 && key < S && sees[key] && !listed[key], says);
                listed[key] = 1;
                near("top_weights", row * top + n, weight, a[key], most, m);
                require(n == 0 || weight <= weights[row * top + n - 1], says, " after a lighter one");
                // A key that is as heavy as can be told: both weights may err.
                const Exact least = a[order[n]] * (1 - 2 * (most + unit_ * powers_)) - tiny_;
                require(a[key] >= least, says, " of weight ", a[key], ", but key ", order[n], " has ", a[order[n]]);
                if (x_.repeats && n) {
                    require(s[before] != s[key] || before < key, says, " after its equal ", before);
                }
                before = key;
            }
            for (i64 j = 0; x_.repeats && j < before; ++j) {
                const bool left_out = sees[j] && !listed[j] && s[j] == s[before];
                require(!left_out, "row ", row, " lists key ", before, ", not its equal ", j);
            }
        }
    }

    void check_rows(const std::vector<double>& got) const {
        const Problem& p = x_.p;
        const Measure m{0, 1, tiny_, powers_};
        const double most = allowed(&Answer<Exact>::weights, &Answer<A>::weights, m);
        const auto M = static_cast<i64>(x_.heads.size()), N = static_cast<i64>(x_.queries.size());
        for (i64 at = 0; at < static_cast<i64>(got.size()); ++at) {
            const i64 j = at % p.S, n = at / p.S % N, head = at / p.S / N % M, b = at / p.S / N / M;
            const i64 i = x_.queries[n], h = x_.heads[head];
            if (!x_.sees(b, h, i, j)) require(got[at] == 0, "rows[", at, "] is ", got[at], " of a hidden key");
            else near("rows", at, got[at], exact_.weights[((b * p.H + h) * p.T + i) * p.S + j], most, m);
        }
    }

    const Situation& x_;
    Answer<Exact> exact_;
    std::vector<Answer<A>> naive_, paired_;
    double unit_, tiny_, powers_, capped_;
};

// One batch row from query `from` on, computed by itself: neither other rows nor earlier queries must be seen in it.
void check_part(const Kernels& kernels, const Situation& x, const Given& whole, i64 b, i64 from) {
    Problem p = x.p;
    const i64 item = p.type == Type::float64 ? 8 : 4, size = format(p.type).size;
    p.B = 1;
    p.T -= from;
    p.offset += from;
    p.q.data += (b * p.q.strides[0] + from * p.q.strides[2]) * size;
    p.k.data += b * p.k.strides[0] * size;
    p.v.data += b * p.v.strides[0] * size;
    p.starts += b;
    p.lengths += b;
    if (p.q_segments) p.q_segments += b * x.p.T + from, p.k_segments += b * p.S;
    if (p.mask.data) p.mask.data += b * p.mask.strides[0] + from * p.mask.strides[2];
    if (p.bias.data) p.bias.data += (b * p.bias.strides[0] + from * p.bias.strides[2]) * format(p.bias_type).size;
    std::vector<char> out(p.H * p.T * p.E * size), lse(p.H * p.T * item);
    Results r{};
    r.out = out.data();
    r.lse = lse.data();
    require(kernels.attend(p, r, 1), "attend had no memory");
    for (i64 h = 0; h < p.H; ++h) {
        const i64 row = (b * p.H + h) * x.p.T + from;
        const bool same = !std::memcmp(&out[h * p.T * p.E * size], &whole.out[row * p.E * size], p.T * p.E * size) &&
                          !std::memcmp(&lse[h * p.T * item], &whole.lse[row * item], p.T * item);
        require(same, "head ", h, " of batch row ", b, " from query ", from, " on has other bits by itself");
    }
}

void check_bits(const Kernels& kernels, const Situation& x, const Given& watched) {
    for (int threads : {1, 2, 3, 8}) {
        const std::string when = text("on ", threads, " threads");
        require_same(watched, take(kernels, x, threads, false, 0x5a), 2, "without looking, " + when);
        if (threads > 1) require_same(watched, take(kernels, x, threads, true, 0x5a), 10, when);
    }
    // Few queries are computed in another way, with other roundings: how few depends on the vectors, and is 4 to 16.
    Random random(x.seed + 99);
    const i64 T = x.p.T, from = T <= 4 ? random.below(T) : T > 17 ? random.below(T - 16) : 0;
    for (i64 b = 0; b < x.p.B && x.p.B * (from + 1) > 1; ++b) check_part(kernels, x, watched, b, from);
}

template <class Exact, class A>
bool check_numbers(Situation& x, const std::vector<std::string>& sets) {
    std::vector<Given> clean;
    for (const std::string& set : sets) {
        regardant::choose(set);
        clean.push_back(take(regardant::kernels(), x, 1, true, static_cast<char>(0xff)));
    }
    // The way back begins with what one instruction set gave, so that all have the same to be compared with. Of numbers
    // near the largest there is, sums of products have no size to speak of.
    const bool back = !x.huge;
    Arriving arriving = draw_arriving(x, clean.front().out, clean.front().lse);
    std::vector<Back> clean_back;
    for (std::size_t n = 0; n < sets.size() && back; ++n) {
        regardant::choose(sets[n]);
        clean_back.push_back(go_back(regardant::kernels(), x, arriving, 1, static_cast<char>(0xff)));
    }
    const bool spoilt = spoil(x), spoilt_back = spoil(x, arriving) || spoilt;
    const Judge<Exact, A> judge(x, Exact{}, A{});
    std::unique_ptr<BackJudge<Exact, A>> back_judge;
    if (back) back_judge = std::make_unique<BackJudge<Exact, A>>(x, arriving, judge.exact(), judge.naive(), judge.powers());
    bool good = true;
    for (std::size_t n = 0; n < sets.size(); ++n) {
        regardant::choose(sets[n]);
        try {
            const Given watched = take(regardant::kernels(), x, 1, true, static_cast<char>(0xff));
            judge.check(watched, sets[n].find("bf16") != std::string::npos);
            if (spoilt) require_same(watched, clean[n], 10, "where nobody sees that keys and values are not finite");
            check_bits(regardant::kernels(), x, watched);
            if (!back) continue;
            const Back gone = go_back(regardant::kernels(), x, arriving, 1, static_cast<char>(0xff));
            back_judge->check(gone, sets[n].find("bf16") != std::string::npos);
            if (spoilt_back) require_same(gone, clean_back[n], "where nobody sees what is not finite");
            for (int threads : {2, 3, 8}) {
                require_same(gone, go_back(regardant::kernels(), x, arriving, threads, 0x5a), text("on ", threads, " threads"));
            }
        } catch (const Failure& failure) {
            std::printf("%s: %s\n  %s\n", sets[n].c_str(), failure.what(), x.says().c_str());
            good = false;
        }
    }
    return good;
}

bool check_situation(std::uint64_t seed, const std::vector<std::string>& sets) {
    Situation x = draw(seed);
    if (x.p.type == Type::float64) return check_numbers<long double, double>(x, sets);
    return check_numbers<double, float>(x, sets);
}

// Every task is done once, whatever the number of threads, and one that fails is reported.
void check_pool() {
    struct Work {
        std::vector<std::atomic<int>> done;
        i64 failing;
    };
    for (int threads : {0, 1, 2, 3, 8}) {
        for (i64 tasks : {0, 1, 2, 7, 1000}) {
            for (i64 failing : {i64{-1}, tasks / 2}) {
                Work work{std::vector<std::atomic<int>>(tasks), failing};
                const bool good = regardant::parallel(
                    tasks, threads,
                    [](void* context, i64 task) {
                        auto* const w = static_cast<Work*>(context);
                        w->done[task].fetch_add(1);
                        return task != w->failing;
                    },
                    &work);
                for (const auto& times : work.done) require(times.load() == 1, "a task was not done once");
                require(good == (failing < 0 || tasks == 0), "parallel says ", good, " of ", tasks, " tasks");
            }
        }
    }
}

// Situations for several at once, and what each of them gives.
struct Expected {
    std::vector<Situation> situations;
    std::vector<Given> given;
    std::vector<Arriving> arriving;
    std::vector<Back> back;

    explicit Expected(const Kernels& kernels, std::uint64_t seed, int count) {
        while (static_cast<int>(situations.size()) < count) {
            Situation x = draw(seed++);
            if (x.p.H * x.p.T < 4) continue;
            given.push_back(take(kernels, x, 1, true, 0));
            arriving.push_back(draw_arriving(x, given.back().out, given.back().lse));
            back.push_back(go_back(kernels, x, arriving.back(), 1, 0));
            situations.push_back(std::move(x));
        }
    }

    // The situations in turn from the n-th on, on a number of threads that changes.
    void again(const Kernels& kernels, int n) const {
        for (std::size_t i = 0; i < situations.size(); ++i) {
            const std::size_t at = (i + n) % situations.size();
            const int threads = 1 + (n + static_cast<int>(i)) % 4;
            const std::string when = "among several callers: " + situations[at].says();
            require_same(given[at], take(kernels, situations[at], threads, true, 0), 10, when);
            require_same(back[at], go_back(kernels, situations[at], arriving[at], threads, 0), when);
        }
    }
};

// Eight callers at once.
void check_callers(const Kernels& kernels, const Expected& expected) {
    std::vector<std::string> failures(8);
    std::vector<std::thread> callers;
    for (int n = 0; n < 8; ++n) {
        callers.emplace_back([&, n] {
            try {
                for (int round = 0; round < 3; ++round) expected.again(kernels, n + round);
            } catch (const Failure& failure) {
                failures[n] = failure.what();
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    for (const std::string& failure : failures) require(failure.empty(), failure);
}

#if defined(__unix__) || defined(__APPLE__)
// A child of a process that has used its threads, and whose other threads are calling at that very moment.
void check_fork(const Kernels& kernels, const Expected& expected) {
    std::atomic<bool> stop{false};
    std::string failure;
    std::thread busy([&] {
        try {
            for (int n = 0; !stop.load(); ++n) expected.again(kernels, n);
        } catch (const Failure& why) {
            failure = why.what();
        }
    });
    std::string wrong;
    for (int child = 0; child < 4 && wrong.empty(); ++child) {
        std::fflush(stdout);
        const pid_t id = fork();
        if (id == 0) {
            alarm(60);  // a child that waits for threads it does not have would wait for ever
            int result = 0;
            try {
                expected.again(kernels, child);
            } catch (const Failure&) {
                result = 1;
            }
            _exit(result);
        }
        int status = -1;
        const bool ended = id > 0 && waitpid(id, &status, 0) == id && WIFEXITED(status);
        if (!ended) wrong = text("a forked child ended with status ", status);
        else if (WEXITSTATUS(status) != 0) wrong = "a forked child computed other bits";
    }
    stop.store(true);
    busy.join();
    require(wrong.empty(), wrong);
    require(failure.empty(), failure);
}
#else
void check_fork(const Kernels&, const Expected&) {}
#endif

// The kernels ask the processor themselves what it has; the compiler's library is asked here.
void check_present(const std::vector<std::string>& sets) {
#if defined(__x86_64__) && !defined(_WIN32)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
               avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    for (const std::string& set : regardant::built()) {
        const bool here = std::find(sets.begin(), sets.end(), set) != sets.end();
        if (set == "avx2") require(here == avx2, "avx2 is there: ", avx2, ", was found: ", here);
        if (set == "avx512") require(here == avx512, "avx512 is there: ", avx512, ", was found: ", here);
    }
#endif
    bool refused = false;
    try {
        regardant::choose("altivec");
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    require(refused, "an instruction set that is not there was chosen");
}

bool check_threads(const std::vector<std::string>& sets, bool callers, bool fork, std::uint64_t seed) {
    std::string set = "pool";
    try {
        check_present(sets);
        check_pool();
        for (const std::string& name : sets) {
            set = name;
            regardant::choose(name);
            const Kernels& kernels = regardant::kernels();
            require(kernels.multiply_adds(10, 3) > 0, "multiply_adds did nothing");
            kernels.read_all(std::vector<char>(100'000, 1).data(), 100'000, 3);
            const Expected expected(kernels, seed, 12);
            if (callers) check_callers(kernels, expected);
            if (fork) check_fork(kernels, expected);
            std::printf("%s: %s%s%s compute the same\n", name.c_str(), callers ? "8 callers at once" : "",
                        callers && fork ? " and " : "", fork ? "forked children" : "");
            std::fflush(stdout);
        }
    } catch (const Failure& failure) {
        std::printf("%s: %s\n", set.c_str(), failure.what());
        return false;
    }
    return true;
}

}  // namespace

int main(int count, char** arguments) {
    const std::string part = count > 1 ? arguments[1] : "all";
    const bool all = part == "all", numbers = all || part == "numbers", callers = all || part == "callers",
               fork = all || part == "fork";
    const long situations = count > 2 ? std::strtol(arguments[2], nullptr, 10) : 400;
    const auto first = static_cast<std::uint64_t>(count > 3 ? std::strtoll(arguments[3], nullptr, 10) : 1);
    if (count > 4 || !(numbers || callers || fork) || situations < 1) {
        std::fprintf(stderr, "usage: check_kernels [all | numbers | callers | fork] [situations] [first seed]\n");
        return 2;
    }
    const std::vector<std::string> sets = regardant::present();
    bool good = !(callers || fork) || check_threads(sets, callers, fork, first);
    for (long n = 0; numbers && n < situations; ++n) {
        good &= check_situation(first + static_cast<std::uint64_t>(n), sets);
    }
    for (const std::string& set : sets) {
        if (numbers && good) std::printf("%s: %ld situations agree with the definition\n", set.c_str(), situations);
    }
    return good ? 0 : 1;
}
