#!/usr/bin/env bash
# Builds the kernels for 64-bit ARM with Debian's cross compiler and runs check_kernels on an emulated processor.
#
#     scripts/neon.sh [how many situations are drawn]
#
# An emulator says nothing of speed, orders memory as this machine does, and cannot fork a process that has threads: it
# checks the arithmetic.
set -euo pipefail
cd "$(dirname "$0")/.."
situations=${1:-60}
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}

if ! command -v aarch64-linux-gnu-g++ >/dev/null || ! command -v qemu-aarch64 >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu qemu-user >/dev/null
fi

cmake -S . -B build/neon -DREGARDANT_CHECKS=ON -DREGARDANT_SETS=neon -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static >/dev/null
cmake --build build/neon --target check_kernels >/dev/null
qemu-aarch64 build/neon/check_kernels callers
qemu-aarch64 build/neon/check_kernels numbers "$situations"
