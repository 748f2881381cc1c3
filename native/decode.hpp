// Attention for few queries over long keys; the larger problem is forward.cpp's.
#pragma once

#include "problem.hpp"
#include "simd.hpp"

namespace regardant::REGARDANT_ISA {

// Up to so many queries the lanes of a full group would be mostly empty.
constexpr i64 decode_queries = REGARDANT_BYTES / 4;

bool decode(const Problem& p, const Results& r, int threads);

}  // namespace regardant::REGARDANT_ISA
