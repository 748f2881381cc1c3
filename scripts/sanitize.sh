#!/usr/bin/env bash
# Runs check_kernels where a step outside an array, undefined behaviour or a race between threads ends it: once with the
# address and undefined-behaviour sanitizers, once, for the parts that threads share, with the thread sanitizer.
#
#     scripts/sanitize.sh [how many situations are drawn]
#
# The 64-byte-wide kernels run everywhere: emulated where the machine has no such vectors. Optimized kernels would take
# several times as long to compile as they then save.
set -euo pipefail
cd "$(dirname "$0")/.."
situations=${1:-120}
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}

check() {  # folder, sanitizers, instruction sets, arguments of check_kernels
    local build=build/$1 flags="-O1 -g1 -fsanitize=$2 -fno-sanitize-recover=all" sets=$3
    shift 3
    cmake -S . -B "$build" -DREGARDANT_CHECKS=ON -DREGARDANT_EMULATE=ON "-DREGARDANT_SETS=$sets" \
        -DCMAKE_BUILD_TYPE=None "-DCMAKE_CXX_FLAGS=$flags" -DREGARDANT_OPTIMIZE=-O0 >/dev/null
    cmake --build "$build" --target check_kernels >/dev/null
    "$build/check_kernels" "$@"
}

wide='wide;widebf16'
if grep -qw avx512bf16 /proc/cpuinfo; then wide='avx512;avx512bf16'; fi
check sanitized address,undefined "scalar;neon;avx2;$wide" all "$situations"
check raced thread 'scalar;neon' callers
