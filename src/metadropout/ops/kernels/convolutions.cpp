// 3x3 convolutions of stride 1 and padding 1 on (n, height, width, channels) images, and their derivatives.
//
// Most go by Winograd's minimal filtering F(m x m, 3x3) (Lavin & Gray, 2016), with (m + 2)^2 multiplications where the
// plain sum takes 9 m^2. An output tile of m x m pixels depends on an input tile d of (m + 2) x (m + 2). With constant
// matrices A, B and G,
//   out = At [(G w Gt) * (Bt d B)] A,      g_w = Gt [(Bt d B) * (A g At)] G,
// where * is element by element, so that over many tiles and channels each of the (m + 2)^2 elements, called spots here,
// is a matrix product. The gradient of the input is a convolution with the weights turned round. Blocks of tiles are
// small enough to stay in the cache between the transforms and the products.
//
// A network's first layer, with its one or three input channels, is a matrix product of image patches and weights.
//
// S is the type in which images are stored: float, or bfloat16 on processors that multiply it. Tiles are transformed in
// float. Of bfloat16 images, transformed tiles and weights are rounded to bfloat16 before they are multiplied, and the
// products are summed up in float. Weights, biases, their gradients and the images that go into a first layer are float.

#include <cstdint>
#include <cstring>
#include <memory>

#include "bfloat16.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

typedef std::int64_t Int;

// LANES floats are a vector; ROWS x 2 vectors of sums fill the registers. Lanes never meet: results do not depend on this.
#ifdef __AVX512F__
const Int LANES = 16, ROWS = 12;
#else
const Int LANES = 8, ROWS = 6;
#endif
const Int LINE = 16;   // floats in a line of the cache; channels come in multiples of it
const Int IN_CACHE = 1 << 19;  // bytes of images that are worked on at once

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// Two bfloat16 values that follow each other in the sum of a product, the first in the lower half; and many of them.
typedef std::uint32_t Pair __attribute__((may_alias));
typedef std::uint32_t Pairs __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef std::uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

inline Int smaller(Int a, Int b) { return a < b ? a : b; }
inline Int larger(Int a, Int b) { return a > b ? a : b; }

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector v) { *reinterpret_cast<Vector*>(to) = v; }
inline Vector all(float v) { return v - Vector{}; }

inline Pairs load(const Pair* from) { return *reinterpret_cast<const Pairs*>(from); }
inline Vector load(const BFloat16* from) {
    return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Pairs) << 16);
}

// What the matrices that are multiplied consist of: TERMS values at once that follow each other in the sum.
// `put` transforms TERMS tiles or kernels, by transform(term, callback of (spot, values)), and puts them side by side.
template <class S> struct Factors;
const int MOST_SPOTS = 36;

template <> struct Factors<float> {
    enum { TERMS = 1 };
    typedef float One;
    template <class Transform> static void put(float* to, Int next_spot, Transform transform) {
        transform(0, [=](Int spot, Vector v) { store(to + spot * next_spot, v); });
    }
};

inline void add_product(Vector& sum, float a, const Vector& b) { sum += all(a) * b; }

#ifdef __AVX512BF16__
inline void store(BFloat16* to, Vector v) { *reinterpret_cast<Halves*>(to) = (Halves)_mm512_cvtneps_pbh((__m512)v); }

inline Pairs pairs(Vector first, Vector second) {
    const Pairs order = Pairs{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001 + (16 << 16);  // 0, 16, 1, 17
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (Pairs)_mm512_permutexvar_epi16((__m512i)order, both);
}

template <> struct Factors<BFloat16> {
    enum { TERMS = 2 };
    typedef Pair One;
    template <class Transform> static void put(BFloat16* to, Int next_spot, Transform transform) {
        Vector first[MOST_SPOTS];
        transform(0, [&](Int spot, Vector v) { first[spot] = v; });
        transform(1, [&](Int spot, Vector v) {
            *reinterpret_cast<Pairs*>(to + spot * next_spot) = pairs(first[spot], v);
        });
    }
};

inline void add_product(Vector& sum, Pair a, const Pairs& b) {
    sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
#endif

template <class S> using Factor = typename Factors<S>::One;
template <class S> inline const Factor<S>* factors(const S* from) { return reinterpret_cast<const Factor<S>*>(from); }

template <class S> using Buffer = std::unique_ptr<S[]>;
template <class S = float> inline Buffer<S> buffer(Int size) { return Buffer<S>(new S[size]); }
template <class S = float> inline Buffer<S> zeros(Int size) { return Buffer<S>(new S[size]()); }

// Sizes of what is kept for one spot: a block of tiles, or the weights. The odd line keeps values of spots that are used
// together from falling on the same place of the cache.
template <class Pieces> inline Int plane(Int channels) { return Pieces::TILES * channels + LINE; }
inline Int weight_plane(Int from, Int to) { return from * to + LINE; }

// Matrices in panels of as many columns as a vector has lanes, each panel contiguous.
inline Int in_panels(Int row, Int rows, Int column) { return (column / LANES * rows + row) * LANES + column % LANES; }

// A matrix's columns by vectors: how far apart in memory its rows are, and its vectors.
struct Layout {
    Int row, vector;
    static Layout panels(Int rows) { return {LANES, rows * LANES}; }
    static Layout plain(Int columns) { return {columns, LANES}; }
};

// What to do with the values that stand where a product goes: write over them, go on summing from them, or add the sum
// to them, which rounds less where there are many.
enum Sum { FRESH, GO_ON, ADD };

// out = [out] + a b for R rows from `first` and V vectors of columns.
template <int R, int V, class Left, class Right, class Out>
inline void multiply(Int first, Left a, const Right* b, Layout in_b, Int depth, Sum sum, Out* out, Layout in_out) {
    out += first * in_out.row;
    Vector sums[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            sums[r][v] = sum == GO_ON ? load(out + r * in_out.row + v * in_out.vector) : all(0);
    for (Int j = 0; j < depth; ++j) {
        decltype(load(b)) columns[V];
        for (int v = 0; v < V; ++v) columns[v] = load(b + j * in_b.row + v * in_b.vector);
        for (int r = 0; r < R; ++r) {
            const auto value = a(first + r, j);
            for (int v = 0; v < V; ++v) add_product(sums[r][v], value, columns[v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
            Out* to = out + r * in_out.row + v * in_out.vector;
            store(to, sum == ADD ? load(to) + sums[r][v] : sums[r][v]);
        }
}

// The same for any number of rows.
template <int V, class Left, class Right, class Out>
inline void multiply(Int rows, Left a, const Right* b, Layout in_b, Int depth, Sum sum, Out* out, Layout in_out) {
    Int r = 0;
    for (; r + ROWS <= rows; r += ROWS) multiply<ROWS, V>(r, a, b, in_b, depth, sum, out, in_out);
    for (; r + 4 <= rows; r += 4) multiply<4, V>(r, a, b, in_b, depth, sum, out, in_out);
    for (; r + 2 <= rows; r += 2) multiply<2, V>(r, a, b, in_b, depth, sum, out, in_out);
    if (r < rows) multiply<1, V>(r, a, b, in_b, depth, sum, out, in_out);
}

// out(r, k) = [out(r, k)] + sum over j of a(r, j) b(j, k), for any number of rows and of vectors of columns.
template <class Left, class Right, class Out>
inline void multiply(Int rows, Int columns, Left a, const Right* b, Layout in_b, Int depth, Sum sum, Out* out,
                     Layout in_out) {
    Int vectors = columns / LANES;
    for (; vectors >= 2; vectors -= 2, b += 2 * in_b.vector, out += 2 * in_out.vector)
        multiply<2>(rows, a, b, in_b, depth, sum, out, in_out);
    if (vectors) multiply<1>(rows, a, b, in_b, depth, sum, out, in_out);
}

// ---------------------------------------------------------------------------------------------------------------------
// Transforms of a row of pixels, its weights and its outputs' gradient; those of tiles apply them down and across.
// ---------------------------------------------------------------------------------------------------------------------

// F(2, 3) with the points 0, 1, -1 and infinity.
struct Two {
    enum { OUTPUTS = 2, POINTS = 4, TILES = 48 };  // TILES in a block
    static int spot(int point) { return point; }
    static void input(const Vector* d, Vector* v) {  // Bt d
        v[0] = d[0] - d[2], v[1] = d[1] + d[2], v[2] = d[2] - d[1], v[3] = d[1] - d[3];
    }
    static void output(const Vector* v, Vector* y) { y[0] = v[0] + v[1] + v[2], y[1] = v[1] - v[2] - v[3]; }  // At v
    static void gradient(const Vector* g, Vector* v) {  // A g
        v[0] = g[0], v[1] = g[0] + g[1], v[2] = g[0] - g[1], v[3] = -g[1];
    }
    static Vector total(const Vector* g) { return g[0] + g[1]; }
};

// F(4, 3) with the points 0, a, -a, b, -b and infinity, of which these a and b round least among short fractions: with
// 64 channels the error is three times that of F(2, 3), with the usual 1 and 2 it would be six times.
constexpr float A = 0.625f, B = 1.5f, A2 = A * A, A3 = A * A2, B2 = B * B, B3 = B * B2;

struct Four {
    enum { OUTPUTS = 4, POINTS = 6, TILES = 24 };
    static int spot(int point) { return point; }
    static void input(const Vector* d, Vector* v) {
        const Vector even_a = d[4] - B2 * d[2], odd_a = d[3] - B2 * d[1];
        const Vector even_b = d[4] - A2 * d[2], odd_b = d[3] - A2 * d[1];
        v[0] = A2 * B2 * d[0] + (d[4] - (A2 + B2) * d[2]);
        v[1] = even_a + A * odd_a, v[2] = even_a - A * odd_a;
        v[3] = even_b + B * odd_b, v[4] = even_b - B * odd_b;
        v[5] = A2 * B2 * d[1] + (d[5] - (A2 + B2) * d[3]);
    }
    static void output(const Vector* v, Vector* y) {
        const Vector even_a = v[1] + v[2], odd_a = v[1] - v[2], even_b = v[3] + v[4], odd_b = v[3] - v[4];
        y[0] = v[0] + even_a + even_b, y[1] = A * odd_a + B * odd_b;
        y[2] = A2 * even_a + B2 * even_b, y[3] = A3 * odd_a + (B3 * odd_b + v[5]);
    }
    static void gradient(const Vector* g, Vector* v) {
        const Vector even_a = g[0] + A2 * g[2], odd_a = A * g[1] + A3 * g[3];
        const Vector even_b = g[0] + B2 * g[2], odd_b = B * g[1] + B3 * g[3];
        v[0] = g[0], v[1] = even_a + odd_a, v[2] = even_a - odd_a;
        v[3] = even_b + odd_b, v[4] = even_b - odd_b, v[5] = g[3];
    }
    static Vector total(const Vector* g) { return (g[0] + g[1]) + (g[2] + g[3]); }
};

// F(3, 3) with the same points but -a, for rows whose length is no multiple of four. It works with F(4, 3)'s transformed
// weights, and so its input takes over the factors by which they differ from its own.
struct Three {
    enum { OUTPUTS = 3, POINTS = 5, TILES = Four::TILES };
    static int spot(int point) { return point < 2 ? point : point + 1; }  // among the points of Four
    static void input(const Vector* d, Vector* v) {
        const Vector t0 = d[1] - A * d[0], t1 = d[2] - A * d[1], t2 = d[3] - A * d[2], t3 = d[4] - A * d[3];
        v[0] = A * (t2 - B2 * t0), v[1] = 2 * A * (d[3] - B2 * d[1]);
        v[2] = (A + B) * (t2 + B * t1), v[3] = (A - B) * (t2 - B * t1), v[4] = t3 - B2 * t1;
    }
    static void output(const Vector* v, Vector* y) {
        const Vector even = v[2] + v[3], odd = v[2] - v[3];
        y[0] = v[0] + v[1] + even, y[1] = A * v[1] + B * odd, y[2] = A2 * v[1] + (B2 * even + v[4]);
    }
    static void gradient(const Vector* g, Vector* v) {
        const Vector even = g[0] + B2 * g[2], odd = B * g[1];
        v[0] = g[0], v[1] = g[0] + (A * g[1] + A2 * g[2]), v[2] = even + odd, v[3] = even - odd, v[4] = g[2];
    }
    static Vector total(const Vector* g) { return (g[0] + g[1]) + g[2]; }
};

// How rows are covered by pieces: first `longs` of one length, then `shorts` of another. The last may hang over.
struct Cover {
    Int longs, shorts;
};

// Tiles of 2x2.
struct Small {
    typedef Two Long;
    typedef Two Short;
    enum { POINTS = 4, SPOTS = 16, TILES = Two::TILES };
    static Sum sum() { return GO_ON; }
    static Cover cover(Int length) { return {(length + 1) / 2, 0}; }
    static void weights(const Vector* w, Vector* u) {  // G w
        const Vector half = all(0.5f), ends = w[0] + w[2];
        u[0] = w[0], u[1] = half * (ends + w[1]), u[2] = half * (ends - w[1]), u[3] = w[2];
    }
    static void end(const Vector* s, Vector* w) {  // Gt s
        const Vector half = all(0.5f);
        w[0] = s[0] + half * (s[1] + s[2]), w[1] = half * (s[1] - s[2]), w[2] = half * (s[1] + s[2]) + s[3];
    }
};

// Tiles of 4 and 3 pixels down and across.
struct Large {
    typedef Four Long;
    typedef Three Short;
    enum { POINTS = 6, SPOTS = 36, TILES = Four::TILES };
    static Sum sum() { return ADD; }
    static Cover cover(Int length) {  // with the fewest points
        Cover best = {(length + 3) / 4, 0};
        for (Int shorts = 1; shorts < 4; ++shorts) {
            const Int longs = (larger(length - 3 * shorts, 0) + 3) / 4;
            if (6 * longs + 5 * shorts < 6 * best.longs + 5 * best.shorts) best = {longs, shorts};
        }
        return best;
    }
    static void weights(const Vector* w, Vector* u) {
        const Vector even_a = FA * (w[0] + A2 * w[2]), odd_a = (FA * A) * w[1];
        const Vector even_b = FB * (w[0] + B2 * w[2]), odd_b = (FB * B) * w[1];
        u[0] = F0 * w[0], u[1] = even_a + odd_a, u[2] = even_a - odd_a;
        u[3] = even_b + odd_b, u[4] = even_b - odd_b, u[5] = w[2];
    }
    static void end(const Vector* s, Vector* w) {
        const Vector even_a = FA * (s[1] + s[2]), even_b = FB * (s[3] + s[4]);
        w[0] = F0 * s[0] + (even_a + even_b), w[1] = (FA * A) * (s[1] - s[2]) + (FB * B) * (s[3] - s[4]);
        w[2] = A2 * even_a + (B2 * even_b + s[5]);
    }

  private:  // one over the product of a point's distances to the others
    static constexpr float F0 = 1 / (A2 * B2), FA = 1 / (2 * A2 * (A2 - B2)), FB = 1 / (2 * B2 * (B2 - A2));
};

// ---------------------------------------------------------------------------------------------------------------------
// Tiles: transforms from and to images, and the products between.
// ---------------------------------------------------------------------------------------------------------------------

struct Images {
    Int height, width, channels;
    Int row() const { return width * channels; }
    Int size() const { return height * row(); }
};

// The tiles of one shape in several images, in rows and columns, and where their pixels are.
struct TileGrid {
    Int top, down, left, across;  // first row and number of tiles, first column and number of tiles
    Int tiles() const { return down * across; }  // per image
};

struct Place {
    Int image, y, x;
    static Place nowhere() { return {0, -MOST_SPOTS, -MOST_SPOTS}; }  // far outside of the image
    template <class Down, class Across> static Place of(const TileGrid& grid, Int tile) {
        return {tile / grid.tiles(), grid.top + tile % grid.tiles() / grid.across * Down::OUTPUTS,
                grid.left + tile % grid.across * Across::OUTPUTS};
    }
};

// Where the pixels of a tile lie, and of `margin` pixels around it; those outside of the image lead to zeros.
template <class S, class Down, class Across, int MARGIN> struct Window {
    enum { ROWS = Down::OUTPUTS + 2 * MARGIN, COLUMNS = Across::OUTPUTS + 2 * MARGIN };
    const S* at[ROWS][COLUMNS];

    void show(const Images& shape, const S* images, const Place& place, const S* outside) {
        const S* image = images + place.image * shape.size();
        for (int i = 0; i < ROWS; ++i) {
            const Int y = place.y - MARGIN + i;
            for (int j = 0; j < COLUMNS; ++j) {
                const Int x = place.x - MARGIN + j;
                const bool inside = y >= 0 && y < shape.height && x >= 0 && x < shape.width;
                at[i][j] = inside ? image + y * shape.row() + x * shape.channels : outside;
            }
        }
    }
};

// Fetch memory into the cache in its order, which is faster than tile by tile.
template <class S> inline void fetch(const S* from, Int size) {
    for (Int i = 0; i < size; i += LINE * sizeof(float) / sizeof(S)) __builtin_prefetch(from + i);
}

// Calls work.run<Down, Across>(grid) for all shapes of tiles, of which Small has one and Large four.
template <class Tile, class Work> inline void each_grid(const Cover& down, const Cover& across, Work& work) {
    typedef typename Tile::Long Long;
    typedef typename Tile::Short Short;
    const Int top = down.longs * Long::OUTPUTS, left = across.longs * Long::OUTPUTS;
    work.template run<Long, Long>({0, down.longs, 0, across.longs});
    if (across.shorts) work.template run<Long, Short>({0, down.longs, left, across.shorts});
    if (down.shorts) work.template run<Short, Long>({top, down.shorts, 0, across.longs});
    if (down.shorts && across.shorts) work.template run<Short, Short>({top, down.shorts, left, across.shorts});
}

// How many images to take at once: enough to fill blocks of tiles, and few enough to stay in the cache.
template <class Tile> inline Int images_at_once(const Cover& down, const Cover& across, Int bytes) {
    const Int tiles = larger(down.longs, 1) * larger(across.longs, 1);
    return smaller((Tile::TILES + tiles - 1) / tiles, larger(IN_CACHE / bytes, 1));
}

// Bt d B of a tile for the channels from c on, as many as a vector has: put(spot, values) for each spot.
template <class S, class Down, class Across, class Put>
inline void transform_input(const Window<S, Down, Across, 1>& from, Int c, Put put) {
    Vector m[Down::POINTS][Across::OUTPUTS + 2];
    for (int j = 0; j < Across::OUTPUTS + 2; ++j) {
        Vector d[Down::OUTPUTS + 2], v[Down::POINTS];
        for (int i = 0; i < Down::OUTPUTS + 2; ++i) d[i] = load(from.at[i][j] + c);
        Down::input(d, v);
        for (int i = 0; i < Down::POINTS; ++i) m[i][j] = v[i];
    }
    for (int i = 0; i < Down::POINTS; ++i) {
        Vector v[Across::POINTS];
        Across::input(m[i], v);
        for (int j = 0; j < Across::POINTS; ++j) put(i * Across::POINTS + j, v[j]);
    }
}

// A g At of a tile in the same way; adds up the tile's values in `bias`.
template <class S, class Down, class Across, class Put>
inline void transform_gradient(const Window<S, Down, Across, 0>& from, Int c, float* bias, Put put) {
    Vector m[Down::POINTS][Across::OUTPUTS], totals[Across::OUTPUTS];
    for (int j = 0; j < Across::OUTPUTS; ++j) {
        Vector g[Down::OUTPUTS], v[Down::POINTS];
        for (int i = 0; i < Down::OUTPUTS; ++i) g[i] = load(from.at[i][j] + c);
        Down::gradient(g, v);
        for (int i = 0; i < Down::POINTS; ++i) m[i][j] = v[i];
        totals[j] = Down::total(g);
    }
    store(bias + c, load(bias + c) + Across::total(totals));
    for (int i = 0; i < Down::POINTS; ++i) {
        Vector v[Across::POINTS];
        Across::gradient(m[i], v);
        for (int j = 0; j < Across::POINTS; ++j) put(i * Across::POINTS + j, v[j]);
    }
}

// At m A + bias + also of a tile's products m, in panels; `rows` and `columns` of it lie inside of the image.
template <class Down, class Across, class S>
void transform_output(const float* products, Int tile, Int C, const float* bias, const S* also, Int rows, Int columns,
                      Int row, S* out) {
    for (Int c = 0; c < C; c += LANES) {
        const float* from = products + in_panels(tile, Down::TILES, c);
        Vector m[Down::OUTPUTS][Across::POINTS];
        for (int j = 0; j < Across::POINTS; ++j) {
            Vector v[Down::POINTS], y[Down::OUTPUTS];
            for (int i = 0; i < Down::POINTS; ++i) v[i] = load(from + (i * Across::POINTS + j) * plane<Down>(C));
            Down::output(v, y);
            for (int i = 0; i < Down::OUTPUTS; ++i) m[i][j] = y[i];
        }
        const Vector offsets = bias ? load(bias + c) : all(0);
        for (int i = 0; i < Down::OUTPUTS && i < rows; ++i) {
            Vector y[Across::OUTPUTS];
            Across::output(m[i], y);
            for (int j = 0; j < Across::OUTPUTS && j < columns; ++j) {
                const Int at = i * row + j * C + c;
                const Vector value = y[j] + offsets;
                store(out + at, also ? value + load(also + at) : value);
            }
        }
    }
}

// out = x * w + x2 * w2 + bias + also for a few images.
template <class Tile, class S> struct Convolution {
    const Images input, output;
    const Int images;
    const S *x, *u, *x2, *u2;
    const float* bias;
    const S *also, *outside;
    S* tiles;
    float* products;
    S* out;

    template <class Down, class Across> void run(const TileGrid& grid) {
        const Int from = input.channels, to = output.channels, end = images * grid.tiles();
        const Int depth = from / Factors<S>::TERMS, next_spot = plane<Tile>(from);
        for (Int t = 0; t < end; t += Tile::TILES) {
            const Int count = smaller(end - t, Tile::TILES);
            for (int part = 0; part < (x2 ? 2 : 1); ++part) {
                for (Int i = 0; i < count; ++i) {
                    const Place place = Place::of<Down, Across>(grid, t + i);
                    Window<S, Down, Across, 1> window;
                    window.show(input, part ? x2 : x, place, outside);
                    S* at = tiles + i * from;
                    for (Int c = 0; c < from; c += LANES, at += LANES)
                        transform_input(window, c, [=](Int spot, Vector v) { store(at + spot * next_spot, v); });
                }
                for (int i = 0; i < Down::POINTS; ++i)
                    for (int j = 0; j < Across::POINTS; ++j) {
                        const Int spot = i * Across::POINTS + j, in_u = Down::spot(i) * Tile::POINTS + Across::spot(j);
                        const Factor<S>* left = factors(tiles + spot * next_spot);
                        multiply(count, to, [=](Int tile, Int c) { return left[tile * depth + c]; },
                                 factors((part ? u2 : u) + in_u * weight_plane(from, to)), Layout::panels(depth), depth,
                                 part ? GO_ON : FRESH, products + spot * plane<Tile>(to), Layout::panels(Tile::TILES));
                    }
            }
            for (Int i = 0; i < count; ++i) {
                const Place place = Place::of<Down, Across>(grid, t + i);
                const Int at = place.image * output.size() + place.y * output.row() + place.x * to;
                transform_output<Down, Across>(products, i, to, bias, also ? also + at : nullptr,
                                               output.height - place.y, output.width - place.x, output.row(), out + at);
            }
        }
    }
};

// The weights' and the bias' gradients, not yet transformed back, added up over a few images: (spots, k, c) in panels.
template <class Tile, class S> struct Gradient {
    enum { TERMS = Factors<S>::TERMS };  // tiles that are multiplied at once
    const Images input, output;
    const Int images;
    const S *x, *g, *outside;
    S *tiles, *gradients;
    float *sums, *bias;

    template <class Down, class Across> void run(const TileGrid& grid) {
        const Int C = input.channels, K = output.channels, end = images * grid.tiles();
        for (Int t = 0; t < end; t += Tile::TILES) {
            const Int count = smaller(end - t, Tile::TILES), depth = (count + TERMS - 1) / TERMS;
            for (Int i = 0; i < depth; ++i) transform<Down, Across>(grid, t + i * TERMS, end, i);
            for (int i = 0; i < Down::POINTS; ++i)
                for (int j = 0; j < Across::POINTS; ++j) {
                    const Int spot = i * Across::POINTS + j, in_u = Down::spot(i) * Tile::POINTS + Across::spot(j);
                    const Factor<S>* left = factors(gradients + spot * plane<Tile>(K));
                    multiply(K, C, [=](Int k, Int tile) { return left[tile * K + k]; },
                             factors(tiles + spot * plane<Tile>(C)), Layout::panels(Tile::TILES / TERMS), depth,
                             Tile::sum(), sums + in_u * weight_plane(C, K), Layout::panels(K));
                }
        }
    }

    // Transforms TERMS tiles, or nothing but zeros for those from `end` on; their factors are rows of the matrices.
    template <class Down, class Across> void transform(const TileGrid& grid, Int tile, Int end, Int row) {
        const Int C = input.channels, K = output.channels;
        Window<S, Down, Across, 1> around[TERMS];
        Window<S, Down, Across, 0> windows[TERMS];
        for (int term = 0; term < TERMS; ++term) {
            const Place place = tile + term < end ? Place::of<Down, Across>(grid, tile + term) : Place::nowhere();
            around[term].show(input, x, place, outside);
            windows[term].show(output, g, place, outside);
        }
        for (Int c = 0; c < C; c += LANES)  // in panels
            Factors<S>::put(tiles + row * TERMS * LANES + c * Tile::TILES, plane<Tile>(C),
                            [&](int term, auto put) { transform_input(around[term], c, put); });
        for (Int k = 0; k < K; k += LANES)
            Factors<S>::put(gradients + (row * K + k) * TERMS, plane<Tile>(K),
                            [&](int term, auto put) { transform_gradient(windows[term], k, bias, put); });
    }
};

// G w Gt of kernels: (spots, rows, columns) in panels, for kernels that are (rows, 9, columns) or (9, rows, columns).
template <class Tile, class S>
void transform_weights(const float* w, Int rows, Int columns, Int next_row, Int next_weight, bool turned, S* to) {
    const Int TERMS = Factors<S>::TERMS;
    const auto transform = [=](const float* from, auto put) {
        Vector m[Tile::POINTS][3];
        for (int j = 0; j < 3; ++j) {
            Vector v[3], u[Tile::POINTS];
            for (int i = 0; i < 3; ++i) v[i] = load(from + (turned ? 8 - 3 * i - j : 3 * i + j) * next_weight);
            Tile::weights(v, u);
            for (int i = 0; i < Tile::POINTS; ++i) m[i][j] = u[i];
        }
        for (int i = 0; i < Tile::POINTS; ++i) {
            Vector u[Tile::POINTS];
            Tile::weights(m[i], u);
            for (int j = 0; j < Tile::POINTS; ++j) put(i * Tile::POINTS + j, u[j]);
        }
    };
    for (Int column = 0; column < columns; column += LANES)
        for (Int row = 0; row < rows; row += TERMS) {
            const float* from = w + row * next_row + column;
            Factors<S>::put(to + in_panels(row / TERMS, rows / TERMS, column) * TERMS, weight_plane(rows, columns),
                            [=](int term, auto put) { transform(from + term * next_row, put); });
        }
}

template <class Tile, class S> void weights(Int K, Int C, bool turned, const float* w, S* u) {
    if (turned) {
        transform_weights<Tile>(w, K, C, 9 * C, C, true, u);
        return;
    }
    const Buffer<float> by_input = buffer(9 * C * K);  // (3, 3, c, k)
    for (Int c0 = 0; c0 < C; c0 += LINE)               // squares that stay in the cache
        for (Int k0 = 0; k0 < K; k0 += LINE)
            for (Int i = 0; i < 9; ++i)
                for (Int c = c0; c < c0 + LINE; ++c)
                    for (Int k = k0; k < k0 + LINE; ++k) by_input[(i * C + c) * K + k] = w[(k * 9 + i) * C + c];
    transform_weights<Tile>(by_input.get(), C, K, K, C * K, false, u);
}

template <class Tile, class S>
void convolution(Int first, Int last, Int height, Int width, Int from, Int to, const S* x, const S* u, const S* x2,
                 const S* u2, const float* bias, const S* also, S* out) {
    const Images input = {height, width, from}, output = {height, width, to};
    const Cover down = Tile::cover(height), across = Tile::cover(width);
    const Int most = images_at_once<Tile>(down, across, sizeof(S) * input.size());
    const Buffer<S> tiles = buffer<S>(Tile::SPOTS * plane<Tile>(from)), outside = zeros<S>(from);
    const Buffer<float> products = buffer(Tile::SPOTS * plane<Tile>(to));
    for (Int i = first; i < last; i += most) {
        const Int in_x = i * input.size(), in_out = i * output.size();
        const Int images = smaller(last - i, most);
        fetch(x + in_x, images * input.size());
        if (x2) fetch(x2 + in_x, images * input.size());
        Convolution<Tile, S> work = {input, output, images, x + in_x, u, x2 ? x2 + in_x : nullptr, u2,
                                     bias, also ? also + in_out : nullptr, outside.get(), tiles.get(), products.get(),
                                     out + in_out};
        each_grid<Tile>(down, across, work);
    }
}

template <class Tile, class S>
void gradient(Int first, Int last, Int parts, Int n, Int height, Int width, Int C, Int K, const S* x, const S* g,
              float* g_u, float* g_b) {
    const Images input = {height, width, C}, output = {height, width, K};
    const Cover down = Tile::cover(height), across = Tile::cover(width);
    const Int most = images_at_once<Tile>(down, across, sizeof(S) * (input.size() + output.size()));
    const Buffer<S> tiles = buffer<S>(Tile::SPOTS * plane<Tile>(C)), outside = zeros<S>(larger(C, K));
    const Buffer<S> gradients = buffer<S>(Tile::SPOTS * plane<Tile>(K));
    for (Int part = first; part < last; ++part) {
        float* sums = g_u + part * Tile::SPOTS * weight_plane(C, K);
        float* bias = g_b + part * K;
        std::memset(sums, 0, sizeof(float) * Tile::SPOTS * weight_plane(C, K));
        std::memset(bias, 0, sizeof(float) * K);
        const Int end = n * (part + 1) / parts;
        for (Int i = n * part / parts; i < end; i += most) {
            const Int images = smaller(end - i, most);
            fetch(x + i * input.size(), images * input.size());
            fetch(g + i * output.size(), images * output.size());
            Gradient<Tile, S> work = {input, output, images, x + i * input.size(), g + i * output.size(),
                                      outside.get(), tiles.get(), gradients.get(), sums, bias};
            each_grid<Tile>(down, across, work);
        }
    }
}

template <class Tile>
void gradient_end(Int parts, Int C, Int K, const float* g_u, const float* parts_b, float* g_w, float* g_b) {
    const Int plane = weight_plane(C, K);
    for (Int k = 0; k < K; ++k) {
        g_b[k] = 0;
        for (Int part = 0; part < parts; ++part) g_b[k] += parts_b[part * K + k];
    }
    for (Int c = 0; c < C; c += LANES)
        for (Int k = 0; k < K; ++k) {
            Vector m[3][Tile::POINTS];
            for (int j = 0; j < Tile::POINTS; ++j) {
                Vector s[Tile::POINTS], w[3];
                for (int i = 0; i < Tile::POINTS; ++i) {
                    const float* from = g_u + (Tile::POINTS * i + j) * plane + in_panels(k, K, c);
                    s[i] = load(from);
                    for (Int part = 1; part < parts; ++part) s[i] += load(from + part * Tile::SPOTS * plane);
                }
                Tile::end(s, w);
                for (int i = 0; i < 3; ++i) m[i][j] = w[i];
            }
            for (int i = 0; i < 3; ++i) {
                Vector w[3];
                Tile::end(m[i], w);
                for (int j = 0; j < 3; ++j) store(g_w + (k * 9 + 3 * i + j) * C + c, w[j]);
            }
        }
}

// An image with a margin of zeros, and after it a row of ones, which meet the bias. The values of the 3x3 patch around
// a pixel, and a one, lie at `offsets` from the patch's corner; those of the next pixel are `channels` further on.
class Patches {
  public:
    const Int depth;  // values in a patch

    explicit Patches(const Images& shape)
        : depth(9 * shape.channels + 1), shape(shape), row((shape.width + 2) * shape.channels),
          padded(zeros((shape.height + 2) * row + shape.row())), offsets(new Int[depth]) {
        for (Int i = 0; i < 9 * shape.channels; ++i)
            offsets[i] = i / (3 * shape.channels) * row + i % (3 * shape.channels);
        for (Int i = 0; i < shape.row(); ++i) padded[(shape.height + 2) * row + i] = 1;
    }

    void take(const float* image) {
        for (Int y = 0; y < shape.height; ++y)
            std::memcpy(&padded[(y + 1) * row + shape.channels], image + y * shape.row(), sizeof(float) * shape.row());
    }

    // The offsets of the patches in row y of the image.
    const float* corner(Int y) {
        offsets[depth - 1] = (shape.height + 2 - y) * row;
        return &padded[y * row];
    }

    const Int* places() const { return offsets.get(); }

  private:
    const Images shape;
    const Int row;
    const Buffer<float> padded;
    const std::unique_ptr<Int[]> offsets;
};

// out = x * w + bias for images of few channels.
template <class S>
void patches(Int first, Int last, Int height, Int width, Int C, Int K, const float* x, const float* w,
             const float* bias, S* out) {
    const Images input = {height, width, C};
    Patches patches(input);
    const Int depth = patches.depth;
    const Int* at = patches.places();
    const Buffer<float> weights = buffer(depth * K);
    for (Int k = 0; k < K; ++k) {
        for (Int j = 0; j < 9 * C; ++j) weights[in_panels(j, depth, k)] = w[k * 9 * C + j];
        weights[in_panels(9 * C, depth, k)] = bias ? bias[k] : 0;
    }
    for (Int image = first; image < last; ++image) {
        patches.take(x + image * height * width * C);
        for (Int y = 0; y < height; ++y) {
            const float* corner = patches.corner(y);
            multiply(width, K, [=](Int pixel, Int j) { return corner[at[j] + pixel * C]; }, weights.get(),
                     Layout::panels(depth), depth, FRESH, out + (image * height + y) * width * K, Layout::plain(K));
        }
    }
}

// The gradient of those images, g * w turned round, + also: what each pixel of g gives to the patch around it.
template <class S>
void patches_turned(Int first, Int last, Int height, Int width, Int C, Int K, const S* g, const float* w,
                    const float* also, float* out) {
    const Images input = {height, width, C};
    const Int depth = 9 * C, columns = (depth + LANES - 1) / LANES * LANES;
    const Int row = (width + 2) * C, size = (height + 2) * row;
    const Buffer<float> weights = zeros(K * columns), shares = buffer(width * columns), padded = buffer(size);
    for (Int k = 0; k < K; ++k)
        for (Int j = 0; j < depth; ++j) weights[in_panels(k, K, j)] = w[k * depth + j];
    for (Int image = first; image < last; ++image) {
        std::memset(padded.get(), 0, sizeof(float) * size);
        for (Int y = 0; y < height; ++y) {
            const S* from = g + (image * height + y) * width * K;
            multiply(width, columns, [=](Int pixel, Int k) { return float(from[pixel * K + k]); }, weights.get(),
                     Layout::panels(K), K, FRESH, shares.get(), Layout::plain(columns));
            for (Int pixel = 0; pixel < width; ++pixel)
                for (Int dy = 0; dy < 3; ++dy)
                    for (Int i = 0; i < 3 * C; ++i)
                        padded[(y + dy) * row + pixel * C + i] += shares[pixel * columns + dy * 3 * C + i];
        }
        for (Int y = 0; y < height; ++y) {
            const Int start = (image * height + y) * input.row();
            const float* sums = &padded[(y + 1) * row + C];
            for (Int i = 0; i < input.row(); ++i) out[start + i] = sums[i] + (also ? also[start + i] : 0);
        }
    }
}

// The gradients of weights and bias from some parts of the images: (parts, 9 c + 1, k) in panels.
template <class S>
void patches_gradient(Int first, Int last, Int parts, Int n, Int height, Int width, Int C, Int K, const float* x,
                      const S* g, float* g_u) {
    const Images input = {height, width, C};
    Patches patches(input);
    const Int depth = patches.depth;
    const Int* at = patches.places();
    for (Int part = first; part < last; ++part) {
        float* sums = g_u + part * depth * K;
        std::memset(sums, 0, sizeof(float) * depth * K);
        for (Int image = n * part / parts; image < n * (part + 1) / parts; ++image) {
            patches.take(x + image * height * width * C);
            for (Int y = 0; y < height; ++y) {
                const float* corner = patches.corner(y);
                multiply(depth, K, [=](Int j, Int pixel) { return corner[at[j] + pixel * C]; },
                         g + (image * height + y) * width * K, Layout::plain(K), width, GO_ON, sums,
                         Layout::panels(depth));
            }
        }
    }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// What Python calls, for each type. `tile` is 2 or 4. Pointers that may be null: x2 and u2, bias, also.
// ---------------------------------------------------------------------------------------------------------------------

// convolution_weights: transformed weights (k, 3, 3, c), as right-hand sides of products: (spots, c, k) in panels. Turned
// round, they are the kernels of the input's gradient: (spots, k, c).
// convolution: out = x * w + x2 * w2 + bias + also, for images first, ..., last - 1 of `from` channels.
// convolution_gradient: the weights' gradients from some parts of the images, not yet transformed back: g_u (parts,
// spots, k, c) in panels, g_b (parts, k). The number of parts does not depend on that of threads, and so neither does
// the sum.
#define FOR_TYPE(S, NAME)                                                                                              \
    extern "C" void convolution_weights_##NAME(Int tile, Int K, Int C, Int turned, const float* w, S* u) {             \
        (tile == 2 ? weights<Small, S> : weights<Large, S>)(K, C, turned, w, u);                                       \
    }                                                                                                                  \
    extern "C" void convolution_##NAME(Int first, Int last, Int tile, Int height, Int width, Int from, Int to,         \
                                       const S* x, const S* u, const S* x2, const S* u2, const float* bias,            \
                                       const S* also, S* out) {                                                        \
        (tile == 2 ? convolution<Small, S> : convolution<Large, S>)(first, last, height, width, from, to, x, u, x2,    \
                                                                    u2, bias, also, out);                              \
    }                                                                                                                  \
    extern "C" void convolution_gradient_##NAME(Int first, Int last, Int tile, Int parts, Int n, Int height,           \
                                                Int width, Int C, Int K, const S* x, const S* g, float* g_u,           \
                                                float* g_b) {                                                          \
        (tile == 2 ? gradient<Small, S> : gradient<Large, S>)(first, last, parts, n, height, width, C, K, x, g, g_u,   \
                                                              g_b);                                                    \
    }                                                                                                                  \
    extern "C" void patches_##NAME(Int first, Int last, Int height, Int width, Int C, Int K, const float* x,           \
                                   const float* w, const float* bias, S* out) {                                        \
        patches<S>(first, last, height, width, C, K, x, w, bias, out);                                                 \
    }                                                                                                                  \
    extern "C" void patches_turned_##NAME(Int first, Int last, Int height, Int width, Int C, Int K, const S* g,        \
                                          const float* w, const float* also, float* out) {                             \
        patches_turned<S>(first, last, height, width, C, K, g, w, also, out);                                          \
    }                                                                                                                  \
    extern "C" void patches_gradient_##NAME(Int first, Int last, Int parts, Int n, Int height, Int width, Int C,       \
                                            Int K, const float* x, const S* g, float* g_u) {                           \
        patches_gradient<S>(first, last, parts, n, height, width, C, K, x, g, g_u);                                    \
    }

FOR_TYPE(float, float32)
#ifdef __AVX512BF16__
FOR_TYPE(BFloat16, bfloat16)
#endif

// g_w (k, 3, 3, c) and g_b (k) from the sums of all parts.
extern "C" void convolution_gradient_end_float32(Int tile, Int parts, Int C, Int K, const float* g_u,
                                                 const float* parts_b, float* g_w, float* g_b) {
    (tile == 2 ? gradient_end<Small> : gradient_end<Large>)(parts, C, K, g_u, parts_b, g_w, g_b);
}

// g_w (k, 3, 3, c) and g_b (k) from the sums of all parts.
extern "C" void patches_gradient_end_float32(Int parts, Int C, Int K, const float* g_u, float* g_w, float* g_b) {
    const Int depth = 9 * C + 1;
    for (Int k = 0; k < K; ++k)
        for (Int j = 0; j < depth; ++j) {
            float sum = 0;
            for (Int part = 0; part < parts; ++part) sum += g_u[part * depth * K + in_panels(j, depth, k)];
            (j < 9 * C ? g_w[k * 9 * C + j] : g_b[k]) = sum;
        }
}
