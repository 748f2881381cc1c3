// What the checks of the kernels share: a random generator that is the same on every machine, arrays laid out in any way,
// and situations, each of which follows from its seed alone.
//
// Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width,
// R by C blocks of pooled weights, M heads and N queries of rows asked for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "problem.hpp"

namespace checks {

using regardant::Array4;
using regardant::i64;
using regardant::Kernels;
using regardant::Problem;
using regardant::Results;
using regardant::Rows;
using regardant::Sums;
using regardant::Type;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Parts that are functions are called only then.
template <class... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream all;
    all.precision(17);
    const auto add = [&](const auto& part) {
        if constexpr (requires { part(); }) all << part();
        else all << part;
    };
    (add(parts), ...);
    return all.str();
}

template <class... Parts>
void require(bool good, const Parts&... parts) {
    if (!good) throw Failure(text(parts...));
}

// SplitMix64, and draws made of integer arithmetic and exact steps alone: the same on every machine.
class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567) {}

    std::uint64_t bits() {
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    i64 below(i64 n) { return static_cast<i64>(bits() % static_cast<std::uint64_t>(n)); }
    i64 between(i64 low, i64 high) { return low + below(high - low + 1); }
    double uniform() { return std::ldexp(static_cast<double>(bits() >> 11), -53); }
    bool chance(double share) { return uniform() < share; }
    double normal() {  // near enough: the mean of twelve has the right spread
        double sum = -6;
        for (int i = 0; i < 12; ++i) sum += uniform();
        return sum;
    }
    template <class X>
    X pick(std::initializer_list<X> from) {
        return from.begin()[below(static_cast<i64>(from.size()))];
    }
    std::vector<i64> order(i64 n) {
        std::vector<i64> all(n);
        for (i64 i = 0; i < n; ++i) all[i] = i;
        for (i64 i = n; i > 1; --i) std::swap(all[i - 1], all[below(i)]);
        return all;
    }

  private:
    std::uint64_t state_;
};

// The four element types: how many bits their fractions have, the unit of their smallest numbers, the largest one.
struct Format {
    const char* name;
    i64 size;
    int digits, lowest;
    double largest;
};

inline const Format& format(Type type) {
    static const Format formats[] = {
        {"float64", 8, 53, -1074, std::numeric_limits<double>::max()},
        {"float32", 4, 24, -149, std::numeric_limits<float>::max()},
        {"float16", 2, 11, -24, 65504},
        {"bfloat16", 2, 8, -133, 0x1.fep127},
    };
    return formats[static_cast<int>(type)];
}

inline void put(Type type, char* at, double x) {
    const Format& f = format(type);
    if (std::isfinite(x) && x != 0) {
        int exponent;
        std::frexp(x, &exponent);
        const int unit = std::max(exponent - f.digits, f.lowest);
        x = std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit);
        if (std::abs(x) > f.largest) x = std::copysign(infinity, x);
    }
    const auto narrow = static_cast<float>(x);  // exact from here on, for all but float64
    std::uint32_t word;
    std::memcpy(&word, &narrow, 4);
    std::uint16_t half = static_cast<std::uint16_t>(word >> 16);
    if (type == Type::float16) {
        const double size = std::abs(x);
        const int exponent = x == 0 ? 0 : std::ilogb(size);
        half = std::signbit(x) ? 0x8000 : 0;
        if (x != x) half |= 0x7e00;
        else if (size == infinity) half |= 0x7c00;
        else if (size < 0x1p-14) half |= static_cast<std::uint16_t>(size * 0x1p24);
        else half |= static_cast<std::uint16_t>(std::ldexp(size, 10 - exponent) + (exponent + 14) * 1024);
    }
    if (type == Type::float64) std::memcpy(at, &x, 8);
    else if (type == Type::float32) std::memcpy(at, &narrow, 4);
    else std::memcpy(at, &half, 2);
}

inline double get(Type type, const char* at) {
    if (type == Type::float64) {
        double x;
        std::memcpy(&x, at, 8);
        return x;
    }
    if (type == Type::float32) {
        float x;
        std::memcpy(&x, at, 4);
        return x;
    }
    std::uint16_t half;
    std::memcpy(&half, at, 2);
    if (type == Type::bfloat16) {
        const std::uint32_t word = static_cast<std::uint32_t>(half) << 16;
        float x;
        std::memcpy(&x, &word, 4);
        return x;
    }
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const double size = exponent == 31  ? (fraction ? not_a_number : infinity)
                        : exponent == 0 ? std::ldexp(fraction, -24)
                                        : std::ldexp(1024 + fraction, exponent - 25);
    return half & 0x8000 ? -size : size;
}

// Four axes laid out in some way, in memory of exactly the extent that they reach: a sanitizer sees a step beyond.
class Array {
  public:
    enum Layout { plain, strange };

    Array() = default;
    Array(Random& random, Type type, i64 a, i64 b, i64 c, i64 d, Layout layout, bool booleans = false)
        : type_(type), size_(booleans ? 1 : format(type).size), counts_{a, b, c, d} {
        i64 axes[4] = {0, 1, 2, 3}, step = 1;
        bool turned[4] = {}, shared[4] = {};
        if (layout == strange) {
            if (random.chance(0.5)) std::swap(axes[1], axes[2]);
            if (random.chance(0.2)) std::swap(axes[2], axes[3]);
            for (int axis = 0; axis < 4; ++axis) {
                turned[axis] = random.chance(axis == 3 ? 0.15 : 0.25);
                shared[axis] = random.chance(axis == 3 ? 0.1 : 0.15);
            }
        }
        i64 first = 0, extent = 1;
        for (int at = 3; at >= 0; --at) {
            const i64 axis = axes[at];
            if (layout == strange && random.chance(at == 3 ? 0.15 : 0.25)) step *= 2;
            if (layout == strange && at < 3 && random.chance(0.3)) step += random.between(1, 5);
            const i64 reach = std::max<i64>(counts_[axis] - 1, 0) * step;
            strides[axis] = shared[axis] ? 0 : turned[axis] ? -step : step;
            if (shared[axis]) continue;
            if (turned[axis]) first += reach;
            extent += reach;
            step *= std::max<i64>(counts_[axis], 1);
        }
        memory_ = std::unique_ptr<char[]>(new char[extent * size_]);
        // What lies between the elements is never to be read.
        for (i64 i = 0; i < extent; ++i) {
            if (booleans) memory_[i] = 1;
            else put(type_, memory_.get() + i * size_, not_a_number);
        }
        start_ = memory_.get() + first * size_;
    }

    explicit operator bool() const { return memory_ != nullptr; }
    Array4 view() const { return {start_, {strides[0], strides[1], strides[2], strides[3]}}; }
    bool is_shared(int axis) const { return strides[axis] == 0 && counts_[axis] > 1; }
    bool shares() const { return is_shared(0) || is_shared(1) || is_shared(2) || is_shared(3); }

    double at(i64 a, i64 b, i64 c, i64 d) const { return get(type_, place(a, b, c, d)); }
    void set(i64 a, i64 b, i64 c, i64 d, double x) { put(type_, place(a, b, c, d), x); }
    bool flag(i64 a, i64 b, i64 c, i64 d) const { return *place(a, b, c, d) != 0; }
    void set_flag(i64 a, i64 b, i64 c, i64 d, bool x) { *place(a, b, c, d) = x; }

    template <class F>
    void each(const F& f) {
        for (i64 a = 0; a < counts_[0]; ++a) {
            for (i64 b = 0; b < counts_[1]; ++b) {
                for (i64 c = 0; c < counts_[2]; ++c) {
                    for (i64 d = 0; d < counts_[3]; ++d) f(a, b, c, d);
                }
            }
        }
    }

    i64 strides[4] = {};

  private:
    char* place(i64 a, i64 b, i64 c, i64 d) const {
        return start_ + (a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3]) * size_;
    }

    Type type_ = Type::float32;
    i64 size_ = 0, counts_[4] = {};
    std::unique_ptr<char[]> memory_;
    char* start_ = nullptr;
};

// One drawn problem, everything that it points into, and what is asked of it.
struct Situation {
    std::uint64_t seed;
    Problem p{};
    Array q, k, v, mask, bias;
    std::vector<i64> starts, lengths, q_segments, k_segments;
    std::vector<double> alibi, sinks;
    i64 top = 0, R = 0, C = 0;
    std::vector<i64> heads, queries;
    std::vector<char> visible;                // (B, H, T, S)
    bool repeats = false;                     // keys come again, so that weights are equal
    std::string stray;                        // where a visible NaN stands
    bool huge = false, loud = false;

    bool sees(i64 b, i64 h, i64 i, i64 j) const { return visible[((b * p.H + h) * p.T + i) * p.S + j]; }
    i64 rows() const { return p.B * p.H * p.T; }
    // How many scores there are at most that do not have to be equal.
    i64 scores() const {
        i64 count = repeats ? 1 : p.S;
        for (int axis = 0; axis < 3; ++axis) count *= q.is_shared(axis) ? 1 : axis == 0 ? p.B : axis == 1 ? p.H : p.T;
        return count;
    }

    std::string says() const {
        std::ostringstream s;
        s << "seed " << seed << ": " << format(p.type).name << " B " << p.B << " H " << p.H << " G " << p.G << " T "
          << p.T << " S " << p.S << " D " << p.D << " E " << p.E << " offset " << p.offset;
        const auto strides = [&](const char* name, const Array& a) {
            s << " " << name << " strides";
            for (i64 stride : a.strides) s << " " << stride;
        };
        if (p.causal) s << " causal";
        if (p.window) s << " window " << p.window;
        s << " starts";
        for (i64 x : starts) s << " " << x;
        s << " lengths";
        for (i64 x : lengths) s << " " << x;
        if (p.q_segments) s << " segments";
        strides("q", q);
        strides("k", k);
        strides("v", v);
        if (mask) strides("mask", mask);
        if (bias) s << " " << format(p.bias_type).name, strides("bias", bias);
        if (p.alibi) s << " alibi";
        if (p.sinks) s << " sinks";
        if (p.softcap != 0) s << " softcap " << p.softcap;
        s << " scale " << p.scale << " top " << top << " pooled " << R << " " << C;
        if (huge) s << " huge";
        if (loud) s << " loud";
        if (repeats) s << " repeats";
        if (!stray.empty()) s << " NaN in " << stray;
        return s.str();
    }
};

// Which options a situation has: each alone in turn, then several together.
struct Options {
    bool full = false, offset = false, window = false, starts = false, lengths = false, segments = false, mask = false,
         bias = false, alibi = false, sinks = false, softcap = false, scale = false;
};

inline Options draw_options(Random& random, std::uint64_t seed) {
    Options o;
    bool* const all[] = {&o.full, &o.offset, &o.window, &o.starts, &o.lengths, &o.segments,
                         &o.mask, &o.bias, &o.alibi, &o.sinks, &o.softcap, &o.scale};
    constexpr int count = sizeof all / sizeof *all;
    if (seed % 2 == 0) {
        const auto alone = static_cast<int>(seed / 2 % (count + 1));
        if (alone < count) *all[alone] = true;
        return o;
    }
    for (bool* option : all) *option = random.chance(0.3);
    return o;
}

inline void draw_sizes(Random& random, Problem& p) {
    p.type = static_cast<Type>(random.below(4));
    p.B = random.pick<i64>({1, 1, 1, 2, 3});
    p.G = random.pick<i64>({1, 1, 2, 3});
    p.H = p.G * random.pick<i64>({1, 1, 2, 3, 5, 8});
    const bool few = random.chance(0.45);
    const auto edge = [&] { return random.pick<i64>({31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257}); };
    p.T = few ? random.between(1, 10) : random.chance(0.2) ? random.between(15, 17) : edge();
    p.S = random.chance(0.5) ? edge()
          : few ? random.pick<i64>({1, 2, 7, 100, 500, 511, 512, 513, 1025, 1100})
                : random.pick<i64>({1, 2, 7, 13, 84, 167, 168, 169, 191, 192, 193, 337});
    if (random.chance(0.02)) p.S = 0;
    p.D = random.pick<i64>({1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 24, 32, 33, 56, 64, 65, 80, 128, 129});
    p.E = random.pick<i64>({1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 24, 32, 33, 63, 64, 65, 80, 128});
    if (random.chance(0.4)) p.E = p.D;
    // The definition takes its time: of what is too large, heads and widths go first, not lengths.
    const auto work = [&] { return p.B * p.H * p.T * std::max<i64>(p.S, 1) * (p.D + p.E); };
    constexpr i64 most = 500'000;
    if (work() > most) p.B = 1;
    if (work() > most) p.H = p.G;
    if (work() > most) p.H = p.G = 1 + random.below(2);
    while (work() > most && p.D + p.E > 2) {
        p.D = p.D / 2 + (p.D == 1);
        p.E = p.E / 2 + (p.E == 1);
    }
}

inline void draw_tensors(Random& random, Situation& x) {
    Problem& p = x.p;
    const auto layout = [&] { return random.chance(0.5) ? Array::plain : Array::strange; };
    x.q = Array(random, p.type, p.B, p.H, p.T, p.D, layout());
    // Equal products have the same sum in every order, which would tell nothing of the error to be expected.
    do x.k = Array(random, p.type, p.B, p.G, p.S, p.D, layout());
    while (x.q.is_shared(3) && x.k.is_shared(3));
    x.v = Array(random, p.type, p.B, p.G, p.S, p.E, layout());
    x.huge = random.chance(0.08);
    const i64 period = random.chance(0.12) ? random.pick<i64>({1, 3, 50}) : 0;
    x.repeats = x.k.is_shared(2);
    // Not where few scores differ: the error of so few, and as large, could not be told from others like them.
    x.loud = random.chance(0.08) && !period && !x.repeats && p.S > 2 && !x.q.is_shared(2);
    const double wide = x.loud ? 60 : 2, most = format(p.type).largest;
    x.q.each([&](i64 a, i64 b, i64 c, i64 d) { x.q.set(a, b, c, d, wide * random.normal()); });
    x.k.each([&](i64 a, i64 b, i64 c, i64 d) { x.k.set(a, b, c, d, random.normal()); });
    x.v.each([&](i64 a, i64 b, i64 c, i64 d) {
        // Sums of such values pass the largest number, their means do not; of the largest float16 not even the sums do.
        const double share = p.type == Type::float16 && random.chance(0.5) ? 1 : 0.9 - 0.2 * random.uniform();
        x.v.set(a, b, c, d, x.huge ? most * share * (d % 3 == 2 ? -1 : 1) : random.normal());
    });
    if (period && !x.k.shares()) {
        x.repeats = true;
        x.k.each([&](i64 a, i64 b, i64 c, i64 d) { x.k.set(a, b, c, d, x.k.at(a, b, c % period, d)); });
    }
}

constexpr i64 farthest = i64{1} << 62;

inline void draw_places(Random& random, Situation& x, const Options& o) {
    Problem& p = x.p;
    p.causal = !o.full;
    p.offset = p.S - p.T;
    if (o.offset) {
        p.offset = random.pick<i64>({0, 0, -3, -p.T, p.T > 20 ? -17 : -1, p.S - p.T + 1, p.S, p.S + 5, 100});
        if (!o.alibi && random.chance(0.1)) p.offset = random.pick<i64>({farthest, -farthest});
    }
    if (o.window) p.window = random.pick<i64>({1, 2, 3, 5, 40, 130, p.S / 2 + 1, p.S + 1, farthest});
    x.starts.assign(p.B, 0);
    x.lengths.assign(p.B, p.S);
    for (i64 b = 0; b < p.B; ++b) {
        if (o.starts) x.starts[b] = random.between(0, random.chance(0.8) ? p.S / 2 : p.S);
        if (o.lengths) x.lengths[b] = random.between(random.chance(0.8) ? p.S / 2 : 0, p.S);
    }
    p.starts = x.starts.data();
    p.lengths = x.lengths.data();
    if (o.segments) {
        const i64 base = random.pick<i64>({0, -1, farthest}), kinds = random.pick<i64>({2, 3, 6});
        const bool sorted = random.chance(0.6);
        const auto draw = [&](std::vector<i64>& ids, i64 count) {
            ids.resize(p.B * count);
            for (i64& id : ids) id = base + random.below(kinds);
            for (i64 b = 0; sorted && b < p.B; ++b) std::sort(ids.begin() + b * count, ids.begin() + (b + 1) * count);
        };
        draw(x.q_segments, p.T);
        draw(x.k_segments, p.S);
        p.q_segments = x.q_segments.data();
        p.k_segments = x.k_segments.data();
        if (p.S == 0) x.k_segments.reserve(1), p.k_segments = x.k_segments.data();
    }
}

inline void draw_scores(Random& random, Situation& x, const Options& o) {
    Problem& p = x.p;
    const auto layout = [&] { return random.chance(0.3) ? Array::plain : Array::strange; };
    const auto to_accumulator = [&](double a) { return p.type == Type::float64 ? a : static_cast<float>(a); };
    if (o.mask) {
        x.mask = Array(random, p.type, p.B, p.H, p.T, p.S, layout(), true);
        const double share = random.pick({0.05, 0.6, 0.95});
        x.mask.each([&](i64 a, i64 b, i64 c, i64 d) { x.mask.set_flag(a, b, c, d, random.chance(share)); });
        p.mask = x.mask.view();
    }
    if (o.bias) {
        p.bias_type = static_cast<Type>(random.below(4));
        x.bias = Array(random, p.bias_type, p.B, p.H, p.T, p.S, layout());
        const double holes = random.pick({0.0, 0.3, 0.9}), lowest = random.pick({0.0, 0.0, 0.5});
        x.bias.each([&](i64 a, i64 b, i64 c, i64 d) {
            x.bias.set(a, b, c, d, random.chance(holes) ? -infinity : random.chance(lowest) ? -60000 : random.normal());
        });
        p.bias = x.bias.view();
        x.repeats = false;
    }
    if (o.alibi) {
        for (i64 h = 0; h < p.H; ++h) x.alibi.push_back(to_accumulator(random.pick({0.5, 0.3, 0.01, 0.0, -0.02})));
        p.alibi = x.alibi.data();
        x.repeats = false;
    }
    if (o.sinks) {
        for (i64 h = 0; h < p.H; ++h) {
            const double rare = random.pick({-infinity, 40.0, -400.0, 400.0});
            x.sinks.push_back(to_accumulator(random.chance(0.6) ? random.normal() : rare));
        }
        p.sinks = x.sinks.data();
    }
    if (o.softcap) p.softcap = random.pick({0.1, 1.5, 30.0, 5000.0});
    p.scale = 1 / std::sqrt(static_cast<double>(p.D));
    if (o.scale) p.scale = random.pick({0.7, -0.5, 0.0, 0.1, 1e-30, 3.0});
}

inline void find_visible(Situation& x) {
    const Problem& p = x.p;
    x.visible.resize(p.B * p.H * p.T * p.S);
    auto at = x.visible.begin();
    for (i64 b = 0; b < p.B; ++b) {
        for (i64 h = 0; h < p.H; ++h) {
            for (i64 i = 0; i < p.T; ++i) {
                for (i64 j = 0; j < p.S; ++j) {
                    const i64 position = p.offset + i;
                    bool sees = j >= x.starts[b] && j < x.lengths[b];
                    sees = sees && (!p.causal || j <= position);
                    sees = sees && (!p.window || position - j < p.window);
                    sees = sees && (!p.q_segments || x.q_segments[b * p.T + i] == x.k_segments[b * p.S + j]);
                    sees = sees && (!x.mask || x.mask.flag(b, h, i, j));
                    sees = sees && (!x.bias || x.bias.at(b, h, i, j) != -infinity);
                    *at++ = sees;
                }
            }
        }
    }
}

inline Situation draw(std::uint64_t seed) {
    Random random(seed);
    Situation x;
    x.seed = seed;
    const Options options = draw_options(random, seed);
    draw_sizes(random, x.p);
    draw_tensors(random, x);
    draw_places(random, x, options);
    draw_scores(random, x, options);
    x.p.q = x.q.view();
    x.p.k = x.k.view();
    x.p.v = x.v.view();
    find_visible(x);
    if (random.chance(0.1) && x.p.S) {
        x.stray = random.pick({"q", "k", "v", "bias"});
        if (x.stray == "bias" && !x.bias) x.stray = "v";
        const i64 b = random.below(x.p.B), h = random.below(x.p.H), g = h / (x.p.H / x.p.G);
        const i64 i = random.below(x.p.T), j = random.below(x.p.S);
        if (x.stray == "q") x.q.set(b, h, i, random.below(x.p.D), not_a_number);
        else if (x.stray == "k") x.k.set(b, g, j, random.below(x.p.D), not_a_number);
        else if (x.stray == "v") x.v.set(b, g, j, random.below(x.p.E), not_a_number);
        else if (x.bias.at(b, h, i, j) != -infinity) x.bias.set(b, h, i, j, not_a_number);
    }
    x.top = random.pick<i64>({0, 1, 3, 8, 9, 20});
    x.R = random.pick<i64>({1, 2, 5, 30});
    x.C = random.pick<i64>({1, 3, 7, 40});
    for (i64 m = random.between(1, 3); m > 0; --m) x.heads.push_back(random.below(x.p.H));
    for (i64 n = random.pick<i64>({1, 4, 70}); n > 0; --n) x.queries.push_back(random.below(x.p.T));
    return x;
}

// What no row sees is made NaN or Inf: keys and values, and the queries of rows that see nothing. Whether any was.
inline bool spoil(Situation& x) {
    const Problem& p = x.p;
    Random random(x.seed + 77);
    bool any = false;
    const auto bad = [&] { return random.pick({not_a_number, not_a_number, infinity, -infinity}); };
    for (i64 b = 0; b < p.B; ++b) {
        for (i64 g = 0; g < p.G; ++g) {
            const i64 repeat = p.H / p.G;
            for (i64 j = 0; j < p.S; ++j) {
                bool seen = false;
                for (i64 h = g * repeat; h < (g + 1) * repeat; ++h) {
                    for (i64 i = 0; i < p.T; ++i) seen |= x.sees(b, h, i, j);
                }
                if (seen || random.chance(0.3)) continue;
                for (i64 d = 0; d < p.D && !x.k.shares(); ++d) x.k.set(b, g, j, d, bad()), any = true;
                for (i64 e = 0; e < p.E && !x.v.shares(); ++e) x.v.set(b, g, j, e, bad()), any = true;
            }
        }
        for (i64 h = 0; h < p.H; ++h) {
            for (i64 i = 0; i < p.T && !x.q.shares(); ++i) {
                bool sees = false;
                for (i64 j = 0; j < p.S; ++j) sees |= x.sees(b, h, i, j);
                for (i64 d = 0; d < p.D && !sees; ++d) x.q.set(b, h, i, d, bad()), any = true;
            }
        }
    }
    return any;
}

// Veltkamp's splitting.
template <class A>
A to_eight_bits(A x) {
    const A far = x * (std::ldexp(A{1}, std::numeric_limits<A>::digits - 8) + 1);
    return far - (far - x);
}

inline std::vector<double> numbers(Type type, const std::vector<char>& bytes) {
    const i64 size = format(type).size;
    std::vector<double> all(bytes.size() / size);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = get(type, bytes.data() + i * size);
    return all;
}

}  // namespace checks
