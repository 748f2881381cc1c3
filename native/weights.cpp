// Finished weights e^(s − lse), made again from q, k and lse: what each key received, the mass in blocks of the
// matrix, and single rows. Sums are over queries, so a task is a range of keys and walks along the queries that
// may see them: the same order, and so the same bits, for any number of threads.
#include "products.hpp"

namespace regardant::REGARDANT_ISA {
namespace {

constexpr i64 key_block = 256;
constexpr i64 groups_at_once = 16;   // so many are summed in A before they are added in double

template <class A>
constexpr int lanes = tile_vectors * Simd<A>::W;

// Calls use(key, v, w) with the weights of a tile of scores, vector by vector; hidden ones, those of rows that see
// nothing and those of lanes that stand for no row are 0.
template <class A, class F>
void weigh(const Group<A, tile_vectors>& g, const Problem& p, const A* lse_BHT, A* s, i64 n, bool hides, const F& use) {
    constexpr int W = Simd<A>::W, L = lanes<A>;
    A base[L];
    for (int lane = 0; lane < L; ++lane) {
        base[lane] = lse_BHT[(g.b * p.H + g.head[lane]) * p.T + g.query[lane]];
        if (base[lane] == -infinity) base[lane] = 0;
        for (i64 i = 0; lane >= g.count && i < n; ++i) s[i * L + lane] = -infinity;
    }
    hides |= g.count < L;
    for (int v = 0; v < tile_vectors; ++v) {
        const Vec<A> by = load(base + v * W);
        if (hides) {                         // e^(−∞ − NaN) would be NaN
            for (i64 i = 0; i < n; ++i) {
                const Vec<A> score = load(s + i * L + v * W);
                use(i, v, score == -infinity ? Vec<A>{} : exp_negative(score - by));
            }
        } else {
            for (i64 i = 0; i < n; ++i) use(i, v, exp_negative(load(s + i * L + v * W) - by));
        }
    }
}

// count · at // parts, for at <= parts < 2^31, without passing 2^63 on the way.
i64 portion(i64 count, i64 at, i64 parts) { return count / parts * at + count % parts * at / parts; }

// Where a query or a key falls when `count` are cut into `parts`: part r holds count·r//parts … count·(r+1)//parts.
i64 part_of(i64 at, i64 count, i64 parts) {
    i64 r = portion(parts, at, count);
    while (r + 1 < parts && portion(count, r + 1, parts) <= at) ++r;
    while (portion(count, r, parts) > at) --r;
    return r;
}

template <class A>
class Column {
  public:
    static constexpr int W = Simd<A>::W, L = lanes<A>;

    static i64 bytes(const Problem& p) {
        return padded(p.D * L * sizeof(A)) + 2 * padded(key_block * L * sizeof(A)) + padded(key_block * p.D * sizeof(A)) +
               padded(key_block * 8);
    }

    Column(const Problem& p, const Sums& sums, Scratch& scratch)
        : p_(p), sums_(sums), q_(scratch.take<A>(p.D * L)), s_(scratch.take<A>(key_block * L)),
          run_(scratch.take<A>(key_block * L)),
          copies_(Rows_of<A>::in_place(p, p.k, p.D) ? nullptr : scratch.take<A>(key_block * p.D)),
          total_(scratch.take<double>(key_block)) {}

    // Keys [from, to), at most key_block of them, of head h; `pooled` is this head's column of blocks, or null.
    void run(i64 b, i64 h, i64 from, i64 to, double* pooled) {
        const Rows_of<A> keys(p_, p_.k, b, h / (p_.H / p_.G), p_.D, copies_);
        i64 row;
        const A* const k = keys.rows(from, to, row);
        for (i64 j = 0; j < to - from; ++j) total_[j] = 0;
        for (i64 t = 0; t < p_.T; t += L * groups_at_once) {
            for (i64 i = 0; i < (to - from) * L; ++i) run_[i] = 0;
            for (i64 i = t; i < smaller_of(t + L * groups_at_once, p_.T); i += L) add(b, h, i, from, to, k, row, pooled);
            for (i64 j = 0; j < to - from; ++j) {
                double sum = 0;
                for (int lane = 0; lane < L; ++lane) sum += static_cast<double>(run_[j * L + lane]);
                total_[j] += sum;
            }
        }
        if (!sums_.received) return;
        A* const received = static_cast<A*>(sums_.received) + (b * p_.H + h) * p_.S;
        for (i64 j = from; j < to; ++j) received[j] = static_cast<A>(total_[j - from]);
    }

  private:
    // One group of queries, from query i on.
    void add(i64 b, i64 h, i64 i, i64 from, i64 to, const A* k, i64 row, double* pooled) {
        Group<A, tile_vectors> g{};
        g.b = b;
        for (i64 t = i; t < smaller_of(i + L, p_.T); ++t) g.add(p_, h, t);
        g.close();
        const i64 low = larger_of(from, g.first), high = smaller_of(to, g.last);
        if (low >= high || apart(p_, g, low, high - low)) return;
        pack_queries(p_, g, q_);
        scores<Plainly<A>>(k + (low - from) * row, row * static_cast<i64>(sizeof(A)), high - low, q_, p_.D, static_cast<A>(p_.scale), s_);
        const bool hides = apply_options(p_, g, low, high - low, s_);
        A* const run = run_ + (low - from) * L;
        Vec<A> mass[tile_vectors] = {};
        weigh(g, p_, static_cast<const A*>(sums_.lse), s_, high - low, hides, [&](i64 j, int v, Vec<A> w) {
            A* const sum = run + j * L + v * W;
            store<A>(sum, load(sum) + w);
            mass[v] += w;
        });
        for (int lane = 0; pooled && lane < g.count; ++lane) {
            pooled[part_of(i + lane, p_.T, sums_.R) * sums_.C] += static_cast<double>(mass[lane / W][lane % W]);
        }
    }

    const Problem& p_;
    const Sums& sums_;
    A *q_, *s_, *run_, *copies_;
    double* total_;
};

template <class A>
bool column_sums(const Problem& p, const Sums& sums, int threads) {
    // With pooled mass a task is a whole column of blocks, so that no two tasks add to the same number.
    const i64 parts = sums.pooled ? sums.C : (p.S + key_block - 1) / key_block;
    const Memory wide(sums.pooled ? p.B * p.H * sums.R * sums.C * 8 : 1);
    if (!wide.data) return false;
    double* const pooled = sums.pooled ? static_cast<double*>(wide.data) : nullptr;
    for (i64 i = 0; pooled && i < p.B * p.H * sums.R * sums.C; ++i) pooled[i] = 0;
    const bool good = each(p.B * p.H * parts, threads, [&](i64 task) {
        Scratch scratch(workspace(Column<A>::bytes(p)));
        if (!scratch) return false;
        Column<A> column(p, sums, scratch);
        const i64 c = task % parts, bh = task / parts;
        const auto edge = [&](i64 at) {
            return pooled ? portion(p.S, at, parts) : smaller_of(at * key_block, p.S);
        };
        for (i64 j = edge(c); j < edge(c + 1); j += key_block) {
            column.run(bh / p.H, bh % p.H, j, smaller_of(j + key_block, edge(c + 1)),
                       pooled ? pooled + bh * sums.R * sums.C + c : nullptr);
        }
        return true;
    });
    for (i64 i = 0; pooled && i < p.B * p.H * sums.R * sums.C; ++i) {
        static_cast<A*>(sums.pooled)[i] = static_cast<A>(pooled[i]);
    }
    return good;
}

template <class A>
bool weight_rows(const Problem& p, const Rows& rows, int threads) {
    constexpr int W = Simd<A>::W, L = lanes<A>;
    const i64 groups = (rows.N + L - 1) / L;
    return each(p.B * rows.M * groups, threads, [&](i64 task) {
        Scratch scratch(workspace(padded(p.D * L * sizeof(A)) + padded(key_block * L * sizeof(A)) +
                                  padded(key_block * p.D * sizeof(A))));
        if (!scratch) return false;
        A* const q = scratch.take<A>(p.D * L);
        A* const s = scratch.take<A>(key_block * L);
        A* const copies = Rows_of<A>::in_place(p, p.k, p.D) ? nullptr : scratch.take<A>(key_block * p.D);
        const i64 from = task % groups * L, m = task / groups % rows.M, b = task / groups / rows.M, h = rows.heads[m];
        const Rows_of<A> keys(p, p.k, b, h / (p.H / p.G), p.D, copies);
        Group<A, tile_vectors> g{};
        g.b = b;
        for (i64 n = from; n < smaller_of(from + L, rows.N); ++n) g.add(p, h, rows.queries[n]);
        g.close();
        pack_queries(p, g, q);
        for (i64 j = g.first; j < g.last; j += key_block) {
            const i64 n = smaller_of(key_block, g.last - j);
            if (apart(p, g, j, n)) continue;
            i64 row;
            const A* const k = keys.rows(j, j + n, row);
            scores<Plainly<A>>(k, row * static_cast<i64>(sizeof(A)), n, q, p.D, static_cast<A>(p.scale), s);
            const bool hides = apply_options(p, g, j, n, s);
            weigh(g, p, static_cast<const A*>(rows.lse), s, n, hides,
                  [&](i64 i, int v, Vec<A> w) { store<A>(s + i * L + v * W, w); });
            for (int lane = 0; lane < g.count; ++lane) {
                A* const out = static_cast<A*>(rows.weights) + ((b * rows.M + m) * rows.N + from + lane) * p.S + j;
                for (i64 i = 0; i < n; ++i) out[i] = s[i * L + lane];
            }
        }
        return true;
    });
}

}  // namespace

bool sums(const Problem& p, const Sums& s, int threads) {
    if (p.B * p.H == 0 || (p.S == 0 && !s.pooled)) return true;
    return p.type == Type::float64 ? column_sums<double>(p, s, threads) : column_sums<float>(p, s, threads);
}

bool rows(const Problem& p, const Rows& r, int threads) {
    if (p.B * r.M * r.N == 0) return true;
    return p.type == Type::float64 ? weight_rows<double>(p, r, threads) : weight_rows<float>(p, r, threads);
}

}  // namespace regardant::REGARDANT_ISA
