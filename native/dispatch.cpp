#include "dispatch.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace regardant {

#define REGARDANT_DECLARE(isa)                                 \
    namespace isa {                                            \
    bool attend(const Problem&, const Results&, int threads);  \
    bool sums(const Problem&, const Sums&, int threads);       \
    bool rows(const Problem&, const Rows&, int threads);       \
    bool backward(const Problem&, const Gradients&, int threads); \
    double multiply_adds(i64 rounds, int threads);             \
    bool read_all(const char*, i64 bytes, int threads);        \
    }
REGARDANT_DECLARE(scalar)
REGARDANT_DECLARE(avx2)
REGARDANT_DECLARE(avx512)
REGARDANT_DECLARE(avx512bf16)
REGARDANT_DECLARE(neon)
REGARDANT_DECLARE(wide)
REGARDANT_DECLARE(widebf16)

#define REGARDANT_KERNELS(isa) {isa::attend, isa::sums, isa::rows, isa::backward, isa::multiply_adds, isa::read_all}

namespace {

struct Set {
    const char* name;
    bool here;
    Kernels kernels;
};

#if defined(__x86_64__)
// What the processor says of itself, and which registers the system keeps for each thread. Asked directly, because the
// compilers' own question is answered by a library that is not linked everywhere.
struct Processor {
    unsigned basic = 0, extended = 0, more = 0, kept = 0;

    Processor() {
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        basic = c;
        if (!(basic >> 27 & 1)) return;      // cannot be asked which registers are kept
        asm volatile("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        extended = b;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) more = a;
    }

    static bool all_of(unsigned word, std::initializer_list<int> bits) {
        return std::all_of(bits.begin(), bits.end(), [=](int bit) { return word >> bit & 1; });
    }

    bool avx2() const {                      // FMA, AVX, F16C; BMI, AVX2, BMI2
        return all_of(kept, {1, 2}) && all_of(basic, {12, 28, 29}) && all_of(extended, {3, 5, 8});
    }
    bool avx512() const {                    // F, DQ, CD, BW, VL
        return avx2() && all_of(kept, {5, 6, 7}) && all_of(extended, {16, 17, 28, 30, 31});
    }
    bool avx512bf16() const { return avx512() && all_of(more, {5}); }
};

const Processor& processor() {
    static const Processor found;
    return found;
}
#endif

[[maybe_unused]] bool can_emulate() {
#if defined(__x86_64__)
    return processor().avx2();
#else
    return true;
#endif
}

// In order of preference, the best last.
const std::vector<Set>& all_sets() {
    static const std::vector<Set> sets = [] {
        return std::vector<Set>{
#if defined(REGARDANT_WIDE)  // for tests alone, so never the best
            {"wide", can_emulate(), REGARDANT_KERNELS(wide)},
#endif
#if defined(REGARDANT_WIDEBF16)
            {"widebf16", can_emulate(), REGARDANT_KERNELS(widebf16)},
#endif
#if defined(REGARDANT_SCALAR)
            {"scalar", true, REGARDANT_KERNELS(scalar)},
#endif
#if defined(REGARDANT_NEON)
            {"neon", true, REGARDANT_KERNELS(neon)},
#endif
#if defined(REGARDANT_AVX2)
            {"avx2", processor().avx2(), REGARDANT_KERNELS(avx2)},
#endif
#if defined(REGARDANT_AVX512)
            {"avx512", processor().avx512(), REGARDANT_KERNELS(avx512)},
#endif
#if defined(REGARDANT_AVX512BF16)
            {"avx512bf16", processor().avx512bf16(), REGARDANT_KERNELS(avx512bf16)},
#endif
        };
    }();
    return sets;
}

const Set& named(const std::string& name, const std::string& asked) {
    std::string known;
    for (const Set& set : all_sets()) {
        if (!set.here) continue;
        if (set.name == name) return set;
        known += (known.empty() ? "" : ", ") + std::string(set.name);
    }
    throw std::invalid_argument(asked + " must be one of this machine's instruction sets, " + known + "; got '" + name + "'");
}

std::vector<std::string> names(bool only_here) {
    std::vector<std::string> found;
    for (const Set& set : all_sets()) {
        if (set.here || !only_here) found.emplace_back(set.name);
    }
    return found;
}

std::atomic<const Set*> chosen{nullptr};

const Set& current() {
    const Set* set = chosen.load();
    if (!set) {
        const char* asked = std::getenv("REGARDANT_ISA");
        set = asked && *asked ? &named(asked, "REGARDANT_ISA") : &named(present().back(), "");
        chosen.store(set);
    }
    return *set;
}

}  // namespace

std::vector<std::string> built() { return names(false); }
std::vector<std::string> present() { return names(true); }

const Kernels& kernels() { return current().kernels; }
std::string instruction_set() { return current().name; }
void choose(const std::string& name) { chosen.store(&named(name, "the instruction set")); }

}  // namespace regardant
