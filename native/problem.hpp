// What one call of attention is, as plain data: the checked arguments and where the results go.
//
// The caller has checked everything (regardant/problem.py): shapes fit, bounds lie inside, pointers are aligned.
// Strides are in elements and may be zero or negative. Nothing here owns memory.
//
// Shape legend: B batch, H query heads, G key/value heads (H a multiple of G), T queries, S keys,
// D query/key width, E value width.
#pragma once

#include <cstdint>

namespace regardant {

using i64 = std::int64_t;

enum class Type : int { float64, float32, float16, bfloat16 };

// An array of four axes; which four stands where it is used.
struct Array4 {
    const char* data = nullptr;
    i64 strides[4] = {0, 0, 0, 0};
};

struct Problem {
    Type type;
    i64 B, H, G, T, S, D, E;
    Array4 q, k, v;             // (B, H, T, D), (B, G, S, D), (B, G, S, E)
    bool causal;
    i64 offset;                 // position of the first query among the keys
    i64 window;                 // keys a query reaches back over, its own included; 0 for all
    const i64* starts;          // (B): first visible key
    const i64* lengths;         // (B): first invisible key after it
    const i64* q_segments;      // (B, T), or null
    const i64* k_segments;      // (B, S), or null
    Array4 mask;                // bool (B, H, T, S), or no data
    Array4 bias;                // (B, H, T, S) of bias_type, or no data
    Type bias_type;
    const double* alibi;        // (H), or null
    const double* sinks;        // (H), or null
    double softcap;             // 0 for none
    double scale;
};

// Statistics are double for float64 input and float for all else; every array is contiguous.
struct Results {
    void* out;                  // (B, H, T, E) of the input's type
    void* lse;                  // (B, H, T)
    bool watching;              // the rest is written only if so
    void* max_logit;            // (B, H, T)
    void* entropy;              // (B, H, T)
    void* sink_weight;          // (B, H, T)
    i64 top;
    i64* top_keys;              // (B, H, T, top)
    void* top_weights;          // (B, H, T, top)
};

// The second pass over finished weights.
struct Sums {
    const void* lse;            // (B, H, T), as attention gave it
    void* received;             // (B, H, S), or null
    void* pooled;               // (B, H, R, C), or null
    i64 R, C;
};

struct Rows {
    const void* lse;            // (B, H, T), as attention gave it
    const i64* heads;           // (M)
    const i64* queries;         // (N)
    i64 M, N;
    void* weights;              // (B, M, N, S), zero where nothing is written
};

// The backward pass. Results are contiguous and of the input's type where nothing else is said.
struct Gradients {
    Array4 out, dout;           // (B, H, T, E): what attention gave, and the gradient that arrives there
    const void* lse;            // (B, H, T), as attention gave it
    const void* dlse;           // (B, H, T), the gradient that arrives there, or null for none
    void *dq, *dk, *dv;         // (B, H, T, D), (B, G, S, D), (B, G, S, E)
    void* dsinks;               // (H), as statistics are, or null
    void* dbias;                // of bias_type, or null
    i64 dbias_strides[4];       // 0 along the axes that are summed over
};

// One instruction set's kernels. The first four return whether they had the memory to work in.
struct Kernels {
    bool (*attend)(const Problem&, const Results&, int threads);
    bool (*sums)(const Problem&, const Sums&, int threads);
    bool (*rows)(const Problem&, const Rows&, int threads);
    bool (*backward)(const Problem&, const Gradients&, int threads);
    double (*multiply_adds)(i64 rounds, int threads);
    bool (*read_all)(const char* data, i64 bytes, int threads);
};

}  // namespace regardant
