// The kernels for Python: unpack arrays that regardant/native.py has prepared, release the GIL, call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <optional>
#include <utility>

#include "dispatch.hpp"
#include "problem.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using regardant::Array4;
using regardant::i64;
using regardant::Type;

namespace {

using In = nb::ndarray<nb::ro, nb::ndim<4>, nb::device::cpu>;
using Out = nb::ndarray<nb::c_contig, nb::device::cpu>;
using MaybeIn = std::optional<In>;
using MaybeOut = std::optional<Out>;
using Integers = nb::ndarray<const i64, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::c_contig, nb::device::cpu>;

Array4 array4(const In& array) {
    return {static_cast<const char*>(array.data()),
            {array.stride(0), array.stride(1), array.stride(2), array.stride(3)}};
}

void* data(const MaybeOut& array) { return array ? array->data() : nullptr; }

// Keeps the arrays that the plain Problem points into.
struct Held {
    regardant::Problem problem;
    In q, k, v;
    Integers starts, lengths;
    std::optional<std::pair<Integers, Integers>> segments;
    MaybeIn mask, bias;
    std::optional<Doubles> alibi, sinks;
};

Held hold(In q, In k, In v, int type, bool causal, i64 offset, i64 window, Integers starts, Integers lengths,
          std::optional<Integers> q_segments, std::optional<Integers> k_segments, MaybeIn mask, MaybeIn bias,
          int bias_type, std::optional<Doubles> alibi, std::optional<Doubles> sinks, double softcap, double scale) {
    regardant::Problem p{};
    p.type = static_cast<Type>(type);
    p.B = static_cast<i64>(q.shape(0));
    p.H = static_cast<i64>(q.shape(1));
    p.G = static_cast<i64>(k.shape(1));
    p.T = static_cast<i64>(q.shape(2));
    p.S = static_cast<i64>(k.shape(2));
    p.D = static_cast<i64>(q.shape(3));
    p.E = static_cast<i64>(v.shape(3));
    p.q = array4(q);
    p.k = array4(k);
    p.v = array4(v);
    p.causal = causal;
    p.offset = offset;
    p.window = window;
    p.starts = starts.data();
    p.lengths = lengths.data();
    if (q_segments) p.q_segments = q_segments->data();
    if (k_segments) p.k_segments = k_segments->data();
    if (mask) p.mask = array4(*mask);
    if (bias) p.bias = array4(*bias);
    p.bias_type = static_cast<Type>(bias_type);
    if (alibi) p.alibi = alibi->data();
    if (sinks) p.sinks = sinks->data();
    p.softcap = softcap;
    p.scale = scale;
    std::optional<std::pair<Integers, Integers>> segments;
    if (q_segments && k_segments) segments.emplace(*q_segments, *k_segments);
    return {p, q, k, v, starts, lengths, segments, mask, bias, alibi, sinks};
}

void check(bool good) {
    if (!good) throw std::bad_alloc();
}

void attend(const Held& held, int threads, Out out, Out lse, MaybeOut max_logit, MaybeOut entropy, MaybeOut sink_weight,
            MaybeOut top_keys, MaybeOut top_weights, i64 top) {
    const regardant::Results results{out.data(),        lse.data(),        max_logit.has_value(), data(max_logit),
                                     data(entropy),     data(sink_weight), top,
                                     static_cast<i64*>(data(top_keys)),    data(top_weights)};
    const regardant::Kernels& kernels = regardant::kernels();
    nb::gil_scoped_release released;
    check(kernels.attend(held.problem, results, threads));
}

void sums(const Held& held, int threads, Out lse, MaybeOut received, MaybeOut pooled, i64 R, i64 C) {
    const regardant::Sums sums{lse.data(), data(received), data(pooled), R, C};
    const regardant::Kernels& kernels = regardant::kernels();
    nb::gil_scoped_release released;
    check(kernels.sums(held.problem, sums, threads));
}

void rows(const Held& held, int threads, Out lse, Integers heads, Integers queries, Out weights) {
    const regardant::Rows rows{lse.data(), heads.data(), queries.data(), static_cast<i64>(heads.shape(0)),
                               static_cast<i64>(queries.shape(0)), weights.data()};
    const regardant::Kernels& kernels = regardant::kernels();
    nb::gil_scoped_release released;
    check(kernels.rows(held.problem, rows, threads));
}

// A view of a result of four axes is summed into along those of one number.
void backward(const Held& held, int threads, In out, In dout, Out lse, MaybeOut dlse, Out dq, Out dk, Out dv,
              MaybeOut dsinks, MaybeOut dbias) {
    regardant::Gradients r{array4(out), array4(dout), lse.data(), data(dlse), dq.data(), dk.data(), dv.data(),
                           data(dsinks), data(dbias), {}};
    for (std::size_t axis = 0; axis < 4 && dbias; ++axis) {
        r.dbias_strides[axis] = dbias->shape(axis) == 1 ? 0 : dbias->stride(axis);
    }
    const regardant::Kernels& kernels = regardant::kernels();
    nb::gil_scoped_release released;
    check(kernels.backward(held.problem, r, threads));
}

double multiply_adds(i64 rounds, int threads) {
    const regardant::Kernels& kernels = regardant::kernels();
    nb::gil_scoped_release released;
    return kernels.multiply_adds(rounds, threads);
}

void read_all(const nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>& array, int threads) {
    const regardant::Kernels& kernels = regardant::kernels();
    nb::gil_scoped_release released;
    kernels.read_all(static_cast<const char*>(array.data()), static_cast<i64>(array.nbytes()), threads);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::class_<Held>(m, "Problem")
        .def(nb::new_(&hold), "q"_a, "k"_a, "v"_a, "element"_a, "causal"_a, "offset"_a, "window"_a, "starts"_a,
             "lengths"_a, "q_segments"_a.none(), "k_segments"_a.none(), "mask"_a.none(), "bias"_a.none(), "bias_type"_a,
             "alibi"_a.none(), "sinks"_a.none(), "softcap"_a, "scale"_a);
    m.def("attend", &attend, "problem"_a, "threads"_a, "out"_a, "lse"_a, "max_logit"_a.none() = nb::none(),
          "entropy"_a.none() = nb::none(), "sink_weight"_a.none() = nb::none(), "top_keys"_a.none() = nb::none(),
          "top_weights"_a.none() = nb::none(), "top"_a = 0);
    m.def("sums", &sums, "problem"_a, "threads"_a, "lse"_a, "received"_a.none(), "pooled"_a.none(), "R"_a, "C"_a);
    m.def("rows", &rows, "problem"_a, "threads"_a, "lse"_a, "heads"_a, "queries"_a, "weights"_a);
    m.def("backward", &backward, "problem"_a, "threads"_a, "out"_a, "dout"_a, "lse"_a, "dlse"_a.none(), "dq"_a, "dk"_a,
          "dv"_a, "dsinks"_a.none(), "dbias"_a.none());
    m.def("multiply_adds", &multiply_adds, "rounds"_a, "threads"_a);
    m.def("read_all", &read_all, "data"_a, "threads"_a);
    m.def("built", &regardant::built);
    m.def("present", &regardant::present);
    m.def("instruction_set", &regardant::instruction_set);
    m.def("choose", &regardant::choose, "name"_a);
}
