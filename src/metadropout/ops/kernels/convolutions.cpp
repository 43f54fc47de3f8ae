// 3x3 convolutions of stride 1 and padding 1 on (n, height, width, channels) images, and their derivatives.
//
// Most go by Winograd's minimal filtering F(2x2, 3x3) (Lavin & Gray, 2016), with 16 multiplications where the plain sum
// takes 36. An output tile of 2x2 pixels depends on an input tile d of 4x4. With the constant matrices A, B and G,
//   out = At [(G w Gt) * (Bt d B)] A,      g_w = Gt [(Bt d B) * (A g At)] G,
// where * is element by element, so that over many tiles and channels each of the 16 elements is a matrix product. The
// gradient of the input is a convolution with the weights turned round. Blocks of tiles are small enough to stay in the
// cache between the transforms and the products.
//
// A network's first layer, with its one or three input channels, is a matrix product of image patches and weights.

#include <cstdint>
#include <cstring>
#include <memory>

namespace {

typedef std::int64_t Int;

// LANES floats are a vector; ROWS x 2 vectors of sums fill the registers. Lanes never meet: results do not depend on this.
#ifdef __AVX512F__
const Int LANES = 16, ROWS = 12;
#else
const Int LANES = 8, ROWS = 6;
#endif
const Int LINE = 16;    // floats in a line of the cache; channels come in multiples of it
const Int TILES = 48;   // tiles in a block
const Int SPOTS = 16;   // elements of a transformed tile

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector v) { *reinterpret_cast<Vector*>(to) = v; }
inline Vector all(float v) { return v - Vector{}; }

typedef std::unique_ptr<float[]> Buffer;
inline Buffer buffer(Int size) { return Buffer(new float[size]); }
inline Buffer zeros(Int size) { return Buffer(new float[size]()); }

// Sizes of what is kept for one spot: a block of tiles, or the weights. The odd line keeps values of the 16 spots that
// are used together from falling on the same place of the cache.
inline Int plane(Int channels) { return TILES * channels + LINE; }
inline Int weight_plane(Int from, Int to) { return from * to + LINE; }

// Matrices in panels of as many columns as a vector has lanes, each panel contiguous.
inline Int in_panels(Int row, Int rows, Int column) { return (column / LANES * rows + row) * LANES + column % LANES; }

// A matrix's columns by vectors: how far apart in memory its rows are, and its vectors.
struct Layout {
    Int row, vector;
    static Layout panels(Int rows) { return {LANES, rows * LANES}; }
    static Layout plain(Int columns) { return {columns, LANES}; }
};

// out = [out] + a b for R rows from `first` and V vectors of columns.
template <int R, int V, class Left>
inline void multiply(Int first, Left a, const float* b, Layout in_b, Int depth, bool add, float* out, Layout in_out) {
    out += first * in_out.row;
    Vector sums[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = add ? load(out + r * in_out.row + v * in_out.vector) : all(0);
    for (Int j = 0; j < depth; ++j) {
        Vector columns[V];
        for (int v = 0; v < V; ++v) columns[v] = load(b + j * in_b.row + v * in_b.vector);
        for (int r = 0; r < R; ++r) {
            const Vector value = all(a(first + r, j));
            for (int v = 0; v < V; ++v) sums[r][v] += value * columns[v];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(out + r * in_out.row + v * in_out.vector, sums[r][v]);
}

// The same for any number of rows.
template <int V, class Left>
inline void multiply(Int rows, Left a, const float* b, Layout in_b, Int depth, bool add, float* out, Layout in_out) {
    Int r = 0;
    for (; r + ROWS <= rows; r += ROWS) multiply<ROWS, V>(r, a, b, in_b, depth, add, out, in_out);
    for (; r + 4 <= rows; r += 4) multiply<4, V>(r, a, b, in_b, depth, add, out, in_out);
    for (; r + 2 <= rows; r += 2) multiply<2, V>(r, a, b, in_b, depth, add, out, in_out);
    if (r < rows) multiply<1, V>(r, a, b, in_b, depth, add, out, in_out);
}

// out(r, k) = [out(r, k)] + sum over j of a(r, j) b(j, k), for any number of rows and of vectors of columns.
template <class Left>
inline void multiply(Int rows, Int columns, Left a, const float* b, Layout in_b, Int depth, bool add, float* out,
                     Layout in_out) {
    Int vectors = columns / LANES;
    for (; vectors >= 2; vectors -= 2, b += 2 * in_b.vector, out += 2 * in_out.vector)
        multiply<2>(rows, a, b, in_b, depth, add, out, in_out);
    if (vectors) multiply<1>(rows, a, b, in_b, depth, add, out, in_out);
}

struct Images {
    Int height, width, channels;
    Int across() const { return (width + 1) / 2; }
    Int tiles() const { return (height + 1) / 2 * across(); }  // per image; those at an odd edge hang over
    Int row() const { return width * channels; }
};

// Where a tile's 2x2 pixels lie.
struct Place {
    Int image, y, x;
    Place(const Images& shape, Int tile)
        : image(tile / shape.tiles()), y(tile % shape.tiles() / shape.across() * 2), x(tile % shape.across() * 2) {}
    Int offset(const Images& shape) const { return ((image * shape.height + y) * shape.width + x) * shape.channels; }
};

// Bt d B of tiles first, first + 1, ...: (spots, tiles, channels).
void transform_images(const Images& shape, const float* images, Int first, Int count, const float* outside, float* to) {
    const Int C = shape.channels, spot = plane(C);
    for (Int t = 0; t < count; ++t) {
        const Place place(shape, first + t);
        const float* from[4][4];
        for (Int i = 0; i < 4; ++i)
            for (Int j = 0; j < 4; ++j) {
                const Int y = place.y - 1 + i, x = place.x - 1 + j;
                const bool inside = y >= 0 && y < shape.height && x >= 0 && x < shape.width;
                from[i][j] = inside ? images + place.offset(shape) + (i - 1) * shape.row() + (j - 1) * C : outside;
            }
        for (Int c = 0; c < C; c += LANES) {
            Vector m[4][4];
            for (int j = 0; j < 4; ++j) {
                const Vector d0 = load(from[0][j] + c), d1 = load(from[1][j] + c);
                const Vector d2 = load(from[2][j] + c), d3 = load(from[3][j] + c);
                m[0][j] = d0 - d2, m[1][j] = d1 + d2, m[2][j] = d2 - d1, m[3][j] = d1 - d3;
            }
            float* at = to + t * C + c;
            for (int i = 0; i < 4; ++i, at += 4 * spot) {
                store(at, m[i][0] - m[i][2]), store(at + spot, m[i][1] + m[i][2]);
                store(at + 2 * spot, m[i][2] - m[i][1]), store(at + 3 * spot, m[i][1] - m[i][3]);
            }
        }
    }
}

// A g At of tiles first, first + 1, ...: (spots, tiles, channels), in panels.
void transform_gradients(const Images& shape, const float* g, Int first, Int count, const float* outside, float* to) {
    const Int C = shape.channels, spot = plane(C);
    for (Int t = 0; t < count; ++t) {
        const Place place(shape, first + t);
        const float* at = g + place.offset(shape);
        const bool right = place.x + 1 < shape.width, below = place.y + 1 < shape.height;
        const float* from[4] = {at, right ? at + C : outside, below ? at + shape.row() : outside,
                                right && below ? at + shape.row() + C : outside};
        for (Int c = 0; c < C; c += LANES) {
            const Vector g0 = load(from[0] + c), g1 = load(from[1] + c), g2 = load(from[2] + c), g3 = load(from[3] + c);
            const Vector m[4][2] = {{g0, g1}, {g0 + g2, g1 + g3}, {g0 - g2, g1 - g3}, {-g2, -g3}};
            float* into = to + in_panels(t, TILES, c);
            for (int i = 0; i < 4; ++i, into += 4 * spot) {
                store(into, m[i][0]), store(into + spot, m[i][0] + m[i][1]);
                store(into + 2 * spot, m[i][0] - m[i][1]), store(into + 3 * spot, -m[i][1]);
            }
        }
    }
}

// out = At m A + bias + also, for products m in panels.
void transform_back(const Images& shape, const float* products, const float* bias, const float* also, Int first,
                    Int count, float* out) {
    const Int C = shape.channels, spot = plane(C);
    for (Int t = 0; t < count; ++t) {
        const Place place(shape, first + t);
        const Int offset = place.offset(shape);
        const bool right = place.x + 1 < shape.width, below = place.y + 1 < shape.height;
        for (Int c = 0; c < C; c += LANES) {
            const float* from = products + in_panels(t, TILES, c);
            Vector m[2][4];
            for (int j = 0; j < 4; ++j, from += spot) {
                const Vector p0 = load(from), p1 = load(from + 4 * spot);
                const Vector p2 = load(from + 8 * spot), p3 = load(from + 12 * spot);
                m[0][j] = p0 + p1 + p2, m[1][j] = p1 - p2 - p3;
            }
            const Vector offsets = bias ? load(bias + c) : all(0);
            for (int i = 0; i < (below ? 2 : 1); ++i) {
                const Int at = offset + i * shape.row() + c;
                const Vector left = m[i][0] + m[i][1] + m[i][2] + offsets;
                store(out + at, also ? left + load(also + at) : left);
                if (!right) continue;
                const Vector next = m[i][1] - m[i][2] - m[i][3] + offsets;
                store(out + at + C, also ? next + load(also + at + C) : next);
            }
        }
    }
}

// G w Gt of kernels: (spots, rows, columns) in panels, for kernels that are (rows, 9, columns) or (9, rows, columns).
void transform_weights(const float* w, Int rows, Int columns, Int next_row, Int next_weight, bool turned, float* to) {
    const Vector half = all(0.5f);
    for (Int column = 0; column < columns; column += LANES)
        for (Int row = 0; row < rows; ++row) {
            const float* from = w + row * next_row + column;
            const auto weight = [=](int i, int j) {
                return load(from + (turned ? 8 - 3 * i - j : 3 * i + j) * next_weight);
            };
            Vector m[4][3];
            for (int j = 0; j < 3; ++j) {
                const Vector ends = weight(0, j) + weight(2, j);
                m[0][j] = weight(0, j), m[1][j] = half * (ends + weight(1, j));
                m[2][j] = half * (ends - weight(1, j)), m[3][j] = weight(2, j);
            }
            const Int spot = weight_plane(rows, columns);
            float* at = to + in_panels(row, rows, column);
            for (int i = 0; i < 4; ++i, at += 4 * spot) {
                const Vector ends = m[i][0] + m[i][2];
                store(at, m[i][0]), store(at + spot, half * (ends + m[i][1]));
                store(at + 2 * spot, half * (ends - m[i][1])), store(at + 3 * spot, m[i][2]);
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
    const Buffer padded;
    const std::unique_ptr<Int[]> offsets;
};

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// What Python calls. Pointers that may be null: x2 and u2, bias, also.
// ---------------------------------------------------------------------------------------------------------------------

// Transformed weights (k, 3, 3, c), as right-hand sides of products: (spots, c, k) in panels. Turned round, they are
// the kernels of the input's gradient: (spots, k, c).
extern "C" void convolution_weights_float32(Int K, Int C, Int turned, const float* w, float* u) {
    if (turned) {
        transform_weights(w, K, C, 9 * C, C, true, u);
        return;
    }
    const Buffer by_input = buffer(9 * C * K);  // (3, 3, c, k)
    for (Int c0 = 0; c0 < C; c0 += LINE)        // squares that stay in the cache
        for (Int k0 = 0; k0 < K; k0 += LINE)
            for (Int i = 0; i < 9; ++i)
                for (Int c = c0; c < c0 + LINE; ++c)
                    for (Int k = k0; k < k0 + LINE; ++k) by_input[(i * C + c) * K + k] = w[(k * 9 + i) * C + c];
    transform_weights(by_input.get(), C, K, K, C * K, false, u);
}

// out = x * w + x2 * w2 + bias + also, for images first, ..., last - 1 of `from` channels.
extern "C" void convolution_float32(Int first, Int last, Int height, Int width, Int from, Int to, const float* x,
                                    const float* u, const float* x2, const float* u2, const float* bias,
                                    const float* also, float* out) {
    const Images input = {height, width, from}, output = {height, width, to};
    const Buffer tiles = buffer(SPOTS * plane(from)), products = buffer(SPOTS * plane(to)), outside = zeros(from);
    const Int end = last * input.tiles();
    for (Int t = first * input.tiles(); t < end; t += TILES) {
        const Int count = end - t < TILES ? end - t : TILES;
        for (int part = 0; part < (x2 ? 2 : 1); ++part) {
            transform_images(input, part ? x2 : x, t, count, outside.get(), tiles.get());
            for (Int spot = 0; spot < SPOTS; ++spot) {
                const float* left = tiles.get() + spot * plane(from);
                multiply(count, to, [=](Int tile, Int c) { return left[tile * from + c]; },
                         (part ? u2 : u) + spot * weight_plane(from, to), Layout::panels(from), from, part,
                         products.get() + spot * plane(to), Layout::panels(TILES));
            }
        }
        transform_back(output, products.get(), bias, also, t, count, out);
    }
}

// The weights' gradients from some parts of the images, not yet transformed back: g_u (parts, spots, c, k) in panels,
// g_b (parts, k). The number of parts does not depend on that of threads, and so neither does the sum.
extern "C" void convolution_gradient_float32(Int first, Int last, Int parts, Int n, Int height, Int width, Int C, Int K,
                                             const float* x, const float* g, float* g_u, float* g_b) {
    const Images input = {height, width, C}, output = {height, width, K};
    const Buffer tiles = buffer(SPOTS * plane(C)), gradients = buffer(SPOTS * plane(K)), outside = zeros(C > K ? C : K);
    for (Int part = first; part < last; ++part) {
        float* sums = g_u + part * SPOTS * weight_plane(C, K);
        float* bias = g_b + part * K;
        std::memset(sums, 0, sizeof(float) * SPOTS * weight_plane(C, K));
        std::memset(bias, 0, sizeof(float) * K);
        const Int end = n * (part + 1) / parts * input.tiles();
        for (Int t = n * part / parts * input.tiles(); t < end; t += TILES) {
            const Int count = end - t < TILES ? end - t : TILES;
            transform_images(input, x, t, count, outside.get(), tiles.get());
            transform_gradients(output, g, t, count, outside.get(), gradients.get());
            for (Int spot = 0; spot < SPOTS; ++spot) {
                const float* left = tiles.get() + spot * plane(C);
                multiply(C, K, [=](Int c, Int tile) { return left[tile * C + c]; },
                         gradients.get() + spot * plane(K), Layout::panels(TILES), count, true,
                         sums + spot * weight_plane(C, K), Layout::panels(C));
            }
            const float* whole = gradients.get() + 5 * plane(K);  // this spot holds the sum of a tile's four pixels
            for (Int tile = 0; tile < count; ++tile)
                for (Int k = 0; k < K; ++k) bias[k] += whole[in_panels(tile, TILES, k)];
        }
    }
}

// g_w (k, 3, 3, c) and g_b (k) from the sums of all parts.
extern "C" void convolution_gradient_end_float32(Int parts, Int C, Int K, const float* g_u, const float* parts_b,
                                                 float* g_w, float* g_b) {
    for (Int k = 0; k < K; ++k) {
        g_b[k] = 0;
        for (Int part = 0; part < parts; ++part) g_b[k] += parts_b[part * K + k];
    }
    const Vector half = all(0.5f);
    for (Int k0 = 0; k0 < K; k0 += LANES)
        for (Int c = 0; c < C; ++c) {
            Vector m[3][4];
            for (int j = 0; j < 4; ++j) {
                Vector s[4];
                for (int i = 0; i < 4; ++i) {
                    const float* from = g_u + (4 * i + j) * weight_plane(C, K) + in_panels(c, C, k0);
                    s[i] = load(from);
                    for (Int part = 1; part < parts; ++part) s[i] += load(from + part * SPOTS * weight_plane(C, K));
                }
                m[0][j] = s[0] + half * (s[1] + s[2]), m[1][j] = half * (s[1] - s[2]);
                m[2][j] = half * (s[1] + s[2]) + s[3];
            }
            for (int i = 0; i < 3; ++i) {
                const Vector w[3] = {m[i][0] + half * (m[i][1] + m[i][2]), half * (m[i][1] - m[i][2]),
                                     half * (m[i][1] + m[i][2]) + m[i][3]};
                for (int j = 0; j < 3; ++j)
                    for (Int lane = 0; lane < LANES; ++lane)
                        g_w[((k0 + lane) * 9 + 3 * i + j) * C + c] = w[j][lane];
            }
        }
}

// out = x * w + bias for images of few channels.
extern "C" void patches_float32(Int first, Int last, Int height, Int width, Int C, Int K, const float* x,
                                const float* w, const float* bias, float* out) {
    const Images input = {height, width, C};
    Patches patches(input);
    const Int depth = patches.depth;
    const Int* at = patches.places();
    const Buffer weights = buffer(depth * K);
    for (Int k = 0; k < K; ++k) {
        for (Int j = 0; j < 9 * C; ++j) weights[in_panels(j, depth, k)] = w[k * 9 * C + j];
        weights[in_panels(9 * C, depth, k)] = bias ? bias[k] : 0;
    }
    for (Int image = first; image < last; ++image) {
        patches.take(x + image * height * width * C);
        for (Int y = 0; y < height; ++y) {
            const float* corner = patches.corner(y);
            multiply(width, K, [=](Int pixel, Int j) { return corner[at[j] + pixel * C]; }, weights.get(),
                     Layout::panels(depth), depth, false, out + (image * height + y) * width * K, Layout::plain(K));
        }
    }
}

// The gradient of those images, g * w turned round, + also: what each pixel of g gives to the patch around it.
extern "C" void patches_turned_float32(Int first, Int last, Int height, Int width, Int C, Int K, const float* g,
                                       const float* w, const float* also, float* out) {
    const Images input = {height, width, C};
    const Int depth = 9 * C, columns = (depth + LANES - 1) / LANES * LANES;
    const Int row = (width + 2) * C, size = (height + 2) * row;
    const Buffer weights = zeros(K * columns), shares = buffer(width * columns), padded = buffer(size);
    for (Int k = 0; k < K; ++k)
        for (Int j = 0; j < depth; ++j) weights[in_panels(k, K, j)] = w[k * depth + j];
    for (Int image = first; image < last; ++image) {
        std::memset(padded.get(), 0, sizeof(float) * size);
        for (Int y = 0; y < height; ++y) {
            const float* from = g + (image * height + y) * width * K;
            multiply(width, columns, [=](Int pixel, Int k) { return from[pixel * K + k]; }, weights.get(),
                     Layout::panels(K), K, false, shares.get(), Layout::plain(columns));
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
extern "C" void patches_gradient_float32(Int first, Int last, Int parts, Int n, Int height, Int width, Int C, Int K,
                                         const float* x, const float* g, float* g_u) {
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
                         g + (image * height + y) * width * K, Layout::plain(K), width, true, sums,
                         Layout::panels(depth));
            }
        }
    }
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
