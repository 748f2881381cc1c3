// The backward pass against its definition, written here once more in plain loops; a part of check_kernels.
//
// The kernels and the definition are given the same out and lse, as the forward pass rounded them. An error is that of
// a number relative to the size of the terms that it is a sum of: what the worst naive sum errs, relative to that, the
// kernels may err twice, with a rounding of the result.
#pragma once

#include "situations.hpp"

namespace checks {

using regardant::Gradients;

constexpr int gradients = 5;
constexpr const char* gradient_names[gradients] = {"dq", "dk", "dv", "dsinks", "dbias"};

// What the backward pass is given besides a situation, and which axes of the bias's gradient are summed.
struct Arriving {
    Array out, dout;
    std::vector<char> lse, dlse;             // dlse is empty if nothing arrives there
    i64 bias_strides[4] = {}, biases = 0;

    double lse_at(Type wide, i64 row) const { return get(wide, lse.data() + row * format(wide).size); }
    double dlse_at(Type wide, i64 row) const { return dlse.empty() ? 0 : get(wide, dlse.data() + row * format(wide).size); }
    i64 bias_at(i64 b, i64 h, i64 i, i64 j) const {
        return b * bias_strides[0] + h * bias_strides[1] + i * bias_strides[2] + j * bias_strides[3];
    }
};

inline Type wide_type(const Problem& p) { return p.type == Type::float64 ? Type::float64 : Type::float32; }

inline Arriving draw_arriving(const Situation& x, const std::vector<char>& out, const std::vector<char>& lse) {
    const Problem& p = x.p;
    const Type wide = wide_type(p);
    Random random(x.seed + 55);
    const auto layout = [&] { return random.chance(0.5) ? Array::plain : Array::strange; };
    Arriving a;
    a.out = Array(random, p.type, p.B, p.H, p.T, p.E, layout());
    a.out.each([&](i64 b, i64 h, i64 i, i64 e) {
        a.out.set(b, h, i, e, get(p.type, out.data() + (((b * p.H + h) * p.T + i) * p.E + e) * format(p.type).size));
    });
    a.dout = Array(random, p.type, p.B, p.H, p.T, p.E, layout());
    a.dout.each([&](i64 b, i64 h, i64 i, i64 e) { a.dout.set(b, h, i, e, random.normal()); });
    if (random.chance(0.15)) {  // as a visible NaN in the situation, but here
        a.dout.set(random.below(p.B), random.below(p.H), random.below(p.T), random.below(p.E), not_a_number);
    }
    a.lse = lse;
    if (random.chance(0.6)) {
        a.dlse.resize(lse.size());
        for (i64 row = 0; row < x.rows(); ++row) put(wide, a.dlse.data() + row * format(wide).size, random.normal());
    }
    const i64 counts[4] = {p.B, p.H, p.T, p.S};
    a.biases = 1;
    for (int axis = 3; axis >= 0; --axis) {
        if (random.chance(0.4)) continue;
        a.bias_strides[axis] = a.biases;
        a.biases *= counts[axis];
    }
    return a;
}

// What arrives at rows that see nothing is made NaN or Inf. Whether any was.
inline bool spoil(const Situation& x, Arriving& a) {
    const Problem& p = x.p;
    const Type wide = wide_type(p);
    Random random(x.seed + 78);
    bool any = false;
    for (i64 row = 0; row < x.rows(); ++row) {
        if (a.lse_at(wide, row) != -infinity) continue;
        const i64 b = row / p.T / p.H, h = row / p.T % p.H, i = row % p.T;
        const double bad = random.pick({not_a_number, infinity, -infinity});
        for (i64 e = 0; e < p.E && !a.out.shares(); ++e) a.out.set(b, h, i, e, bad), any = true;
        for (i64 e = 0; e < p.E && !a.dout.shares(); ++e) a.dout.set(b, h, i, e, bad), any = true;
        if (!a.dlse.empty()) put(wide, a.dlse.data() + row * format(wide).size, bad), any = true;
    }
    return any;
}

// The gradients, each a list in the order of its axes, computed in A. Of each row of dq, dk and dv, and of each number
// of the others: `size`, the sum of its terms' sizes, and `lost`, the same for weights of the least size there is.
template <class A>
struct Slopes {
    std::vector<A> all[gradients], size[gradients], lost[gradients];
};

// Order 0 is as one would write it down; others put sums and brackets otherwise. `paired`: weights and their gradients
// are rounded to bfloat16 before they are multiplied, as the kernels do in pairs.
template <class A>
class Definition {
  public:
    Definition(const Situation& x, const Arriving& a, const std::vector<A>& scores, std::uint64_t order, bool paired)
        : x_(x), a_(a), p_(x.p), scores_(scores), order_(order), paired_(paired) {
        const i64 counts[gradients] = {x.rows() * p_.D, p_.B * p_.G * p_.S * p_.D, p_.B * p_.G * p_.S * p_.E, p_.H, a.biases};
        for (int n = 0; n < gradients; ++n) {
            result_.all[n].assign(counts[n], 0);
            const i64 sizes = n == 0 ? p_.D : n == 1 ? p_.D : n == 2 ? p_.E : 1;
            result_.size[n].assign(counts[n] / sizes, 0);
            result_.lost[n].assign(counts[n] / sizes, 0);
        }
        Random random(order + 1000);
        d_ = random.order(p_.D);
        e_ = random.order(p_.E);
        j_ = random.order(p_.S);
        std::vector<i64> is = random.order(p_.T);
        if (order == 0) {
            for (auto* all : {&d_, &e_, &j_, &is}) std::sort(all->begin(), all->end());
        }
        k_.resize(p_.S * p_.D);
        v_.resize(p_.S * p_.E);
        q_.resize(p_.D);
        out_.resize(p_.E);
        dout_.resize(p_.E);
        for (i64 b = 0; b < p_.B; ++b) {
            for (i64 h = 0; h < p_.H; ++h) {
                const i64 g = h / (p_.H / p_.G);
                for (i64 j = 0; j < p_.S; ++j) {
                    for (i64 d = 0; d < p_.D; ++d) k_[j * p_.D + d] = static_cast<A>(x.k.at(b, g, j, d));
                    for (i64 e = 0; e < p_.E; ++e) v_[j * p_.E + e] = static_cast<A>(x.v.at(b, g, j, e));
                }
                for (i64 i : is) row(b, h, i);
            }
        }
        if (order & 1) return;
        for (int n : {0, 1}) {
            for (A& number : result_.all[n]) number *= static_cast<A>(p_.scale);
        }
    }

    Slopes<A> take() { return std::move(result_); }

  private:
    // What one query adds to all gradients.
    void row(i64 b, i64 h, i64 i) {
        const i64 at = (b * p_.H + h) * p_.T + i;
        const auto lse = static_cast<A>(a_.lse_at(wide_type(p_), at));
        if (lse == -std::numeric_limits<A>::infinity()) return;
        for (i64 d = 0; d < p_.D; ++d) q_[d] = static_cast<A>(x_.q.at(b, h, i, d));
        A delta = 0, delta_size = 0;
        for (i64 e : e_) {
            out_[e] = static_cast<A>(a_.out.at(b, h, i, e));
            dout_[e] = static_cast<A>(a_.dout.at(b, h, i, e));
            delta += out_[e] * dout_[e];
            delta_size += std::abs(out_[e] * dout_[e]);
        }
        const auto dlse = static_cast<A>(a_.dlse_at(wide_type(p_), at));
        delta -= dlse;
        delta_size += std::abs(dlse);
        if (p_.sinks && p_.sinks[h] != -infinity) {
            const A weight = std::exp(static_cast<A>(p_.sinks[h]) - lse);
            result_.all[3][h] -= weight * delta;
            result_.size[3][h] += weight * delta_size;
        }
        for (i64 j : j_) {
            if (x_.sees(b, h, i, j)) pair(b, h, i, j, scores_[at * p_.S + j] - lse, delta, delta_size);
        }
    }

    void pair(i64 b, i64 h, i64 i, i64 j, A log_weight, A delta, A delta_size) {
        const A* const k = k_.data() + j * p_.D;
        const A* const v = v_.data() + j * p_.E;
        const i64 query = (b * p_.H + h) * p_.T + i, key = (b * p_.G + h / (p_.H / p_.G)) * p_.S + j;
        A weight = std::exp(log_weight), dp = 0, dp_size = 0;
        for (i64 e : e_) {
            dp += dout_[e] * v[e];
            dp_size += std::abs(dout_[e] * v[e]);
        }
        A ds = order_ & 2 ? weight * dp - weight * delta : weight * (dp - delta);
        const i64 bias = a_.bias_at(b, h, i, j);
        result_.all[4][bias] += ds;
        if (p_.softcap != 0) ds *= slope(k);
        if (paired_) weight = to_eight_bits(weight), ds = to_eight_bits(ds);
        if (order_ & 1) ds *= static_cast<A>(p_.scale);
        A k_most = 0, q_most = 0, dout_most = 0;
        for (i64 d = 0; d < p_.D; ++d) {
            result_.all[0][query * p_.D + d] += ds * k[d];
            result_.all[1][key * p_.D + d] += ds * q_[d];
            k_most = std::max(k_most, std::abs(k[d]));
            q_most = std::max(q_most, std::abs(q_[d]));
        }
        for (i64 e = 0; e < p_.E; ++e) {
            result_.all[2][key * p_.E + e] += weight * dout_[e];
            dout_most = std::max(dout_most, std::abs(dout_[e]));
        }
        const A rise = dp_size + delta_size, scale = std::abs(static_cast<A>(p_.scale));
        const auto count = [&](int n, i64 at, A factor) {
            result_.size[n][at] += std::exp(log_weight) * factor;
            result_.lost[n][at] += factor;
        };
        count(0, query, scale * rise * k_most);
        count(1, key, scale * rise * q_most);
        count(2, key, dout_most);
        count(4, bias, rise);
    }

    // How a bounded score rises with the scaled dot product that it is made of.
    A slope(const A* k) const {
        A dot = 0;
        for (i64 d : d_) dot += q_[d] * k[d];
        const A share = std::tanh(dot * static_cast<A>(p_.scale) / static_cast<A>(p_.softcap));
        return 1 - share * share;
    }

    const Situation& x_;
    const Arriving& a_;
    const Problem& p_;
    const std::vector<A>& scores_;
    const std::uint64_t order_;
    const bool paired_;
    std::vector<i64> d_, e_, j_;
    std::vector<A> k_, v_, q_, out_, dout_;
    Slopes<A> result_;
};

// What the kernels gave, byte by byte.
struct Back {
    std::vector<char> all[gradients];
};

inline Back go_back(const Kernels& kernels, const Situation& x, const Arriving& a, int threads, char poison) {
    const Problem& p = x.p;
    const i64 item = format(wide_type(p)).size, size = format(p.type).size;
    Back back;
    const auto room = [&](int n, i64 bytes) {
        back.all[n].assign(bytes, poison);
        return back.all[n].data();
    };
    Gradients r{};
    r.out = a.out.view();
    r.dout = a.dout.view();
    r.lse = a.lse.data();
    r.dlse = a.dlse.empty() ? nullptr : a.dlse.data();
    r.dq = room(0, x.rows() * p.D * size);
    r.dk = room(1, p.B * p.G * p.S * p.D * size);
    r.dv = room(2, p.B * p.G * p.S * p.E * size);
    if (p.sinks) r.dsinks = room(3, p.H * item);
    if (p.bias.data) {
        r.dbias = room(4, a.biases * format(p.bias_type).size);
        std::copy_n(a.bias_strides, 4, r.dbias_strides);
    }
    require(kernels.backward(p, r, threads), "backward had no memory");
    return back;
}

inline void require_same(const Back& one, const Back& other, const std::string& when) {
    for (int n = 0; n < gradients; ++n) {
        const std::vector<char>&a = one.all[n], &b = other.all[n];
        if (a == b) continue;
        i64 at = 0;
        while (a[at] == b[at]) ++at;
        throw Failure(text(gradient_names[n], " has other bits ", when, ", from byte ", at, " on"));
    }
}

// How far the kernels' gradients may be from the exact ones, and where they are farther. `exact` and `naive` hold
// scores, in several orders, as the forward pass defines them; `powers` is what e^x may err, in units.
template <class Exact, class A>
class BackJudge {
  public:
    template <class ExactAnswer, class NaiveAnswers>
    BackJudge(const Situation& x, const Arriving& a, const ExactAnswer& exact, const NaiveAnswers& naive, double powers)
        : x_(x), exact_(Definition<Exact>(x, a, exact.scores, 0, false).take()), powers_(powers) {
        for (std::size_t order = 0; order < naive.size(); ++order) {
            measure(Definition<A>(x, a, naive[order].scores, order, false).take(), worst_);
            if (pairs(x.p)) measure(Definition<A>(x, a, naive[order].scores, order, true).take(), worst_paired_);
        }
    }

    static bool pairs(const Problem& p) { return p.type == Type::bfloat16; }

    void check(const Back& back, bool in_pairs) const {
        const Problem& p = x_.p;
        const Type types[gradients] = {p.type, p.type, p.type, wide_type(p), p.bias_type};
        const i64 widths[gradients] = {p.D, p.D, p.E, 1, 1};
        const Exact unit = std::ldexp(Exact{1}, -format(wide_type(p)).digits);
        const Exact tiny = std::ldexp(Exact{1}, format(wide_type(p)).lowest + format(wide_type(p)).digits + 1);
        for (int n = 0; n < gradients; ++n) {
            const std::vector<double> got = numbers(types[n], back.all[n]);
            const Format& f = format(types[n]);
            const Exact allowed = 2 * (in_pairs && pairs(p) ? worst_paired_ : worst_)[n] + unit * powers_;
            for (std::size_t i = 0; i < got.size(); ++i) {
                const Exact exact = exact_.all[n][i], size = exact_.size[n][i / widths[n]];
                if (!(std::abs(exact) <= f.largest / 2)) {  // too large to say where it becomes infinite
                    require(exact == exact || got[i] != got[i], gradient_names[n], "[", i, "] is ", got[i], ", should be NaN");
                    continue;
                }
                const Exact error = std::abs(static_cast<Exact>(got[i]) - exact);
                const Exact least = std::ldexp(Exact{1}, f.lowest) + tiny * exact_.lost[n][i / widths[n]];
                require(error <= allowed * size + std::ldexp(std::abs(exact), -f.digits) + least, gradient_names[n], "[", i,
                        "] is ", got[i], ", should be ", exact, ": errs by ", error / size / unit,
                        " units of its terms, allowed are ", allowed / unit, " and a rounding");
            }
        }
    }

  private:
    void measure(const Slopes<A>& naive, Exact (&worst)[gradients]) const {
        for (int n = 0; n < gradients; ++n) {
            const std::size_t width = naive.all[n].size() / std::max<std::size_t>(1, naive.size[n].size());
            for (std::size_t i = 0; i < naive.all[n].size(); ++i) {
                const Exact error = std::abs(static_cast<Exact>(naive.all[n][i]) - exact_.all[n][i]) / exact_.size[n][i / width];
                if (std::isfinite(error)) worst[n] = std::max(worst[n], error);
            }
        }
    }

    const Situation& x_;
    Slopes<Exact> exact_;
    double powers_;
    Exact worst_[gradients] = {}, worst_paired_[gradients] = {};
};

}  // namespace checks
