#include "dispatch.hpp"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace regardant {

#define REGARDANT_DECLARE(isa)                                 \
    namespace isa {                                            \
    bool attend(const Problem&, const Results&, int threads);  \
    bool sums(const Problem&, const Sums&, int threads);       \
    bool rows(const Problem&, const Rows&, int threads);       \
    double multiply_adds(i64 rounds, int threads);             \
    bool read_all(const char*, i64 bytes, int threads);        \
    }
REGARDANT_DECLARE(scalar)
REGARDANT_DECLARE(avx2)
REGARDANT_DECLARE(avx512)
REGARDANT_DECLARE(avx512bf16)
REGARDANT_DECLARE(neon)

#define REGARDANT_KERNELS(isa) {isa::attend, isa::sums, isa::rows, isa::multiply_adds, isa::read_all}

namespace {

struct Set {
    const char* name;
    bool here;
    Kernels kernels;
};

#if defined(__x86_64__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
}
#endif

// In order of preference, the best last.
const std::vector<Set>& all_sets() {
    static const std::vector<Set> sets = [] {
#if defined(__x86_64__)
        __builtin_cpu_init();
#endif
        return std::vector<Set>{
#if defined(REGARDANT_SCALAR)
            {"scalar", true, REGARDANT_KERNELS(scalar)},
#endif
#if defined(REGARDANT_NEON)
            {"neon", true, REGARDANT_KERNELS(neon)},
#endif
#if defined(REGARDANT_AVX2)
            {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"),
             REGARDANT_KERNELS(avx2)},
#endif
#if defined(REGARDANT_AVX512)
            {"avx512", has_avx512(), REGARDANT_KERNELS(avx512)},
#endif
#if defined(REGARDANT_AVX512BF16)
            {"avx512bf16", has_avx512() && __builtin_cpu_supports("avx512bf16"), REGARDANT_KERNELS(avx512bf16)},
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
