// The two products in pairs of bfloat16, where the machine multiplies two pairs and adds both to a float at once
// (VDPBF16PS): twice the numbers for each instruction.
//
// Queries become (D/2, L) pairs of neighbouring coordinates; keys are read as they lie. Weights are rounded to
// bfloat16 in pairs of neighbouring keys, and values are laid beside each other likewise, one block at a time; the
// denominators are sums of the weights before rounding.
//
// Compiled where REGARDANT_PAIRS is set; without AVX512_BF16 itself the instruction is written out, for tests.
#pragma once

#include "products.hpp"

#if defined(REGARDANT_PAIRS)

namespace regardant::REGARDANT_ISA {

using Pair = std::uint32_t;                  // the earlier number in the low half
typedef Pair Pairs __attribute__((vector_size(REGARDANT_BYTES)));

inline Pairs load_pairs(const Pair* from) {
    Pairs v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline Pairs all_pairs(Pair pair) { return pair - Pairs{}; }

// sum + low(a) · low(b) + high(a) · high(b).
inline Vec<float> add_products(Vec<float> sum, Pairs a, Pairs b) {
#if defined(__AVX512BF16__)
    return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += (Vec<float>)(a << 16) * (Vec<float>)(b << 16);
    return sum + (Vec<float>)(a & 0xffff0000u) * (Vec<float>)(b & 0xffff0000u);
#endif
}

// Two vectors of floats, not NaN, rounded to nearest and laid beside each other.
inline Pairs round_pairs(Vec<float> low, Vec<float> high) {
    const Pairs l = (Pairs)low, h = (Pairs)high;
    return ((l + 0x7fffu + ((l >> 16) & 1u)) >> 16) | ((h + 0x7fffu + ((h >> 16) & 1u)) & 0xffff0000u);
}

// The same where there may be NaN, which must stay one: rounding could carry it into the sign.
inline Pairs round_pairs_or_nan(Vec<float> low, Vec<float> high) {
    return ((low != low) | (high != high)) ? all_pairs(0x7fc07fc0u) : round_pairs(low, high);
}

// Pairs as `multiply` takes them.
struct InPairs {
    using Number = Pair;
    using Sum = float;

    static Pairs spread(const char* at) {
        Pair pair;
        std::memcpy(&pair, at, sizeof pair);
        return all_pairs(pair);
    }
    static Pairs vector(const Pair* from) { return load_pairs(from); }
    static Vec<float> add(Vec<float> sum, Pairs left, Pairs right) { return add_products(sum, left, right); }
};

// As `Wide`, for bfloat16.
class Paired {
  public:
    using A = float;
    using Query = Pair;
    static constexpr bool in_pairs = true;
    static constexpr int L = tile_vectors * Simd<float>::W;

    static i64 bytes(const Problem& p, i64 block) {
        const i64 pairs = (block + 1) / 2;
        return padded(block * even(p.D) * 2) + padded(pairs * p.E * 4) + padded(pairs * L * 4) + padded(p.D * L * 4);
    }
    static i64 query_numbers(const Problem& p) { return even(p.D) / 2 * L; }

    Paired(const Problem& p, i64 block, Scratch& scratch)
        : p_(p), in_place_(p.k.strides[3] == 1 && p.D % 2 == 0),
          k_copies_(scratch.take<Brain>(in_place_ ? 0 : block * even(p.D))),
          v_pairs_(scratch.take<Pair>((block + 1) / 2 * p.E)), s_pairs_(scratch.take<Pair>((block + 1) / 2 * L)),
          wide_(scratch.take<float>(p.D * L)) {}

    void begin(i64 b, i64 g) {
        k_start_ = reinterpret_cast<const Brain*>(p_.k.data) + b * p_.k.strides[0] + g * p_.k.strides[1];
        v_start_ = reinterpret_cast<const Brain*>(p_.v.data) + b * p_.v.strides[0] + g * p_.v.strides[1];
    }

    void pack(const Group<float, tile_vectors>& group, Pair* q) const {
        pack_queries(p_, group, wide_);
        const Vec<float> zeros{};
        for (i64 d = 0; d < p_.D; d += 2) {
            for (int at = 0; at < L; at += Simd<float>::W) {
                const Vec<float> low = load(wide_ + d * L + at), high = d + 1 < p_.D ? load(wide_ + (d + 1) * L + at) : zeros;
                // The numbers were bfloat16 before: their low halves are 0.
                const Pairs pairs = ((Pairs)low >> 16) | (Pairs)high;
                std::memcpy(q + d / 2 * L + at, &pairs, sizeof pairs);
            }
        }
    }

    void take(i64 start, i64 end) {
        start_ = start;
        const i64 row = p_.k.strides[2], column = p_.k.strides[3];
        k_ = k_start_ + start * row;
        k_row_ = row;
        if (!in_place_) {
            k_row_ = even(p_.D);
            for (i64 j = start; j < end; ++j) {
                Brain* const to = k_copies_ + (j - start) * k_row_;
                for (i64 d = 0; d < p_.D; ++d) to[d] = k_start_[j * row + d * column];
                if (p_.D % 2) to[p_.D] = Brain{0};
            }
            k_ = k_copies_;
        }
        const i64 v_row = p_.v.strides[2], v_column = p_.v.strides[3];
        Pair bad = 0;
        for (i64 j = start; j < end; j += 2) {
            const Brain* const low = v_start_ + j * v_row;
            const Brain* const high = low + v_row;
            const Pair second = j + 1 < end;
            Pair* const to = v_pairs_ + (j - start) / 2 * p_.E;
            if (v_column == 1 && second) {
                for (i64 e = 0; e < p_.E; ++e) to[e] = low[e].bits | static_cast<Pair>(high[e].bits) << 16;
            } else {
                for (i64 e = 0; e < p_.E; ++e) {
                    to[e] = low[e * v_column].bits | (second ? static_cast<Pair>(high[e * v_column].bits) << 16 : 0);
                }
            }
            for (i64 e = 0; e < p_.E; ++e) {
                bad |= static_cast<Pair>((to[e] & 0x7f80u) == 0x7f80u) | static_cast<Pair>((to[e] >> 16 & 0x7f80u) == 0x7f80u);
            }
        }
        finite_ = !bad;
        // A value that is not finite leaves its place empty, for a row may not see it; `add_visible` fills it for those
        // that do. The products are the same instructions, and so give the same bits, whatever is hidden.
        for (i64 at = 0; !finite_ && at < (end - start + 1) / 2 * p_.E; ++at) {
            if ((v_pairs_[at] & 0x7f80u) == 0x7f80u) v_pairs_[at] &= 0xffff0000u;
            if ((v_pairs_[at] >> 16 & 0x7f80u) == 0x7f80u) v_pairs_[at] &= 0xffffu;
        }
    }

    void score(i64 j, i64 n, const Pair* q, float* s) const {
        const i64 row = k_row_ * static_cast<i64>(sizeof(Brain));
        scores<InPairs>(k_ + (j - start_) * k_row_, row, n, q, even(p_.D) / 2, static_cast<float>(p_.scale), s);
    }

    void add(i64 j, i64 n, const float* s, const Vec<float> (&fade)[tile_vectors], float* o) const {
        const Vec<float> zeros{};
        for (i64 i = 0; i < n; i += 2) {
            for (int at = 0; at < L; at += Simd<float>::W) {
                const Vec<float> low = load(s + i * L + at), high = i + 1 < n ? load(s + (i + 1) * L + at) : zeros;
                const Pairs pairs = round_pairs_or_nan(low, high);
                std::memcpy(s_pairs_ + i / 2 * L + at, &pairs, sizeof pairs);
            }
        }
        const Pair* const v = v_pairs_ + (j - start_) / 2 * p_.E;
        mix<InPairs>(s_pairs_, (n + 1) / 2, v, p_.E * static_cast<i64>(sizeof(Pair)), p_.E, fade, o);
    }

    // The values that are not finite, for the rows that see them.
    void add_visible(const Group<float, tile_vectors>& g, i64 j, i64 n, const float* s, float* o) const {
        if (finite_) return;
        const i64 row = p_.v.strides[2], column = p_.v.strides[3];
        for (i64 i = 0; i < n; ++i) {
            for (i64 e = 0; e < p_.E; ++e) {
                const float value = widen(v_start_[(j + i) * row + e * column]);
                if (value * 0 == 0) continue;
                for (int lane = 0; lane < g.count; ++lane) {
                    if (visible(p_, g.b, g.head[lane], g.query[lane], j + i)) o[e * L + lane] += s[i * L + lane] * value;
                }
            }
        }
    }

  private:
    static i64 even(i64 n) { return (n + 1) / 2 * 2; }

    const Problem& p_;
    bool in_place_, finite_ = true;
    Brain* k_copies_;
    Pair *v_pairs_, *s_pairs_;
    float* wide_;
    const Brain *k_start_ = nullptr, *v_start_ = nullptr, *k_ = nullptr;
    i64 start_ = 0, k_row_ = 0;
};

}  // namespace regardant::REGARDANT_ISA

#endif
