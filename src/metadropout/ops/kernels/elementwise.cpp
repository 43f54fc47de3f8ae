// Element-wise work of the inner loop in few passes over memory, with first and second derivatives.
//
// Images lie in memory as (n, height, width, channels), so the inner loops over channels are contiguous and the
// compiler vectorises them. Functions that take a range [first, last) of images may run in several threads; sums are
// kept per image and added in the order of the images, so that the number of threads changes nothing. Sums of floats
// are accumulated in double, a few values at a time. S is the type in which images are stored, T that in which they are
// computed with, and which statistics have.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "bfloat16.h"

typedef std::int64_t Int;

// From normal.cpp: the values of places first, ..., last - 1 of a draw.
template <class T> void normals(Int key, Int draw, Int first, Int last, T* out);

namespace {

typedef std::uint8_t Code;

// The rounds of the next loop do not depend on each other.
#define SIMD _Pragma("omp simd")

// Copies values from one type to another.
template <class From, class To> inline void copy(Int size, const From* __restrict__ from, To* __restrict__ to) {
    SIMD
    for (Int k = 0; k < size; ++k) to[k] = from[k];
}

// ---------------------------------------------------------------------------------------------------------------------
// exp and log1p, good to about 1e-7 for float: loops over them vectorise, unlike loops over the C library's.
// ---------------------------------------------------------------------------------------------------------------------

// exp(y) and exp(y) - 1 for y <= 0, the latter without cancellation.
template <class T> struct Exponential { T value, minus_one; };

inline Exponential<double> exponential(double y) { return {std::exp(y), std::expm1(y)}; }

inline Exponential<float> exponential(float y) {
    const bool vanishes = y < -87.0f;           // below that 2^k is no normal number; false for NaN
    y = vanishes ? -87.0f : y;
    const float round = 12582912.0f;            // 1.5 * 2^23: adding it leaves no bits for a fraction
    const float k = (y * 1.44269504f + round) - round;
    const float r = (y - k * 0.693359375f) - k * -2.12194440e-4f;  // y - k ln 2, |r| <= ln(2)/2
    float q = 1.0f / 5040;                      // exp(r) - 1 = r + r^2/2! + ... + r^7/7!
    q = q * r + 1.0f / 720;
    q = q * r + 1.0f / 120;
    q = q * r + 1.0f / 24;
    q = q * r + 1.0f / 6;
    q = q * r + 0.5f;
    q = q * r * r + r;
    const std::int32_t bits = (static_cast<std::int32_t>(k) + 127) << 23;
    float two_to_k;
    std::memcpy(&two_to_k, &bits, sizeof bits);
    const float minus_one = two_to_k * q + (two_to_k - 1.0f);
    return {vanishes ? 0.0f : two_to_k * q + two_to_k, vanishes ? -1.0f : minus_one};
}

inline double log1p_of_fraction(double t) { return std::log1p(t); }

// log(1 + t) = 2 atanh(z), z = t / (2 + t), for 0 <= t <= 1: then z <= 1/3 and the series is short.
inline float log1p_of_fraction(float t) {
    const float z = t / (2.0f + t), w = z * z;
    float q = 1.0f / 13;
    q = q * w + 1.0f / 11;
    q = q * w + 1.0f / 9;
    q = q * w + 1.0f / 7;
    q = q * w + 1.0f / 5;
    q = q * w + 1.0f / 3;
    return 2.0f * (z + z * w * q);
}

// softplus is the identity above 20, as PyTorch has it; in float the two do not differ there.
template <class T> inline T softplus(T a) {
    const T positive = a > 0 ? a : T(0);
    const T s = positive + log1p_of_fraction(exponential(a > 0 ? -a : a).value);  // NaN comes through the second term
    return sizeof(T) == 8 && a > 20 ? a : s;
}

// The derivative of softplus, sigma = 1 - exp(-s), and 1 - sigma, from s = softplus(a).
template <class T> struct Slope { T sigma, rest; };

template <class T> inline Slope<T> slope(T s) {
    const Exponential<T> e = exponential(-s);
    const bool linear = sizeof(T) == 8 && s > 20;
    return {linear ? T(1) : -e.minus_one, linear ? T(0) : e.value};
}

// ---------------------------------------------------------------------------------------------------------------------
// Noisy product: out = f * s, s = softplus(mean + noise). `size` is the number of values in one image.
// ---------------------------------------------------------------------------------------------------------------------

// Calls work(at, size, from, to) with values as numbers, here all of them at once. Either pointer may be null.
template <class T, int IN, int OUT, class Work>
inline void as_numbers(Int size, const T* const (&from)[IN], T* const (&to)[OUT], bool, Work work) {
    work(Int(0), size, from, to);
}

// Loops over values of one size vectorise best. So pieces of images that are stored in bfloat16, small enough for the
// cache, are turned into numbers before and rounded after. With `add` the work needs what stands where the results go.
template <int IN, int OUT, class Work>
inline void as_numbers(Int size, const BFloat16* const (&from)[IN], BFloat16* const (&to)[OUT], bool add, Work work) {
    const Int piece = 512;
    float inputs[IN][piece], outputs[OUT][piece];
    const float* in[IN];
    float* out[OUT];
    for (int i = 0; i < IN; ++i) in[i] = from[i] ? inputs[i] : nullptr;
    for (int i = 0; i < OUT; ++i) out[i] = to[i] ? outputs[i] : nullptr;
    for (Int at = 0; at < size; at += piece) {
        const Int count = size - at < piece ? size - at : piece;
        for (int i = 0; i < IN; ++i)
            if (from[i]) copy(count, from[i] + at, inputs[i]);
        for (int i = 0; i < OUT; ++i)
            if (to[i] && add) copy(count, to[i] + at, outputs[i]);
        work(at, count, in, out);
        for (int i = 0; i < OUT; ++i)
            if (to[i]) copy(count, outputs[i], to[i] + at);
    }
}

// Noise that is not given as values: a key and the number of a draw for each sample.
struct Draws {
    const Int* keys;
    Int images;  // per sample
};

template <class T> inline void product(Int size, const T* f, const T* mean, const T* noise, T* out, T* s) {
    if (!noise) {
        SIMD
        for (Int k = 0; k < size; ++k) s[k] = softplus(mean[k]), out[k] = f[k] * s[k];
        return;
    }
    SIMD
    for (Int k = 0; k < size; ++k) s[k] = softplus(mean[k] + noise[k]), out[k] = f[k] * s[k];
}

// Images of the result first, ..., last - 1. Those of f and mean, `images` in number, are used over and over.
template <class S>
void product_forward(Int first, Int last, Int pixels, Int channels, Int images, bool noise_by_channel, Draws draws,
                     const S* f_all, const S* mean_all, const S* noise_all, S* out_all, S* s_all) {
    typedef Number<S> T;
    const Int size = pixels * channels;
    for (Int i = first; i < last; ++i) {
        const S* f = f_all + i % images * size;
        const S* mean = mean_all + i % images * size;
        const S* __restrict__ noise = noise_all ? noise_all + i * size : nullptr;
        S* out = out_all + i * size;
        S* __restrict__ s = s_all + i * size;
        const auto with = [=](const S* noise, Int begin, Int end) {
            const S* const from[] = {f + begin, mean + begin, noise};
            S* const to[] = {out + begin, s + begin};
            as_numbers(end - begin, from, to, false, [](Int, Int count, const T* const* in, T* const* results) {
                product(count, in[0], in[1], in[2], results[0], results[1]);
            });
        };
        if (draws.keys) {
            const Int* key = draws.keys + i / draws.images * 2;
            const Int start = i % draws.images * size, piece = 1024;  // places; a piece stays in the cache
            T values[piece];
            for (Int at = 0, next; at < size; at = next) {
                next = (start + at) / piece * piece + piece - start;
                next = next < size ? next : size;
                normals(key[0], key[1], start + at, start + next, values);
                const S* const from[] = {f + at, mean + at};
                S* const to[] = {out + at, s + at};
                as_numbers(next - at, from, to, false, [&](Int k, Int count, const T* const* in, T* const* results) {
                    product(count, in[0], in[1], values + k, results[0], results[1]);
                });
            }
        } else if (!noise_by_channel) {
            with(noise, 0, size);
        } else {
            // The noise is (channels, pixels). It is turned over into `s` in strips of pixels that stay in the cache.
            const Int strip = 16;
            for (Int p0 = 0; p0 < pixels; p0 += strip) {
                const Int p1 = p0 + strip < pixels ? p0 + strip : pixels;
                for (Int c = 0; c < channels; ++c) {
                    __builtin_prefetch(noise + c * pixels + p1 + strip);  // too many rows for the hardware's
                    for (Int p = p0; p < p1; ++p) s[p * channels + c] = noise[c * pixels + p];
                }
                with(s + p0 * channels, p0 * channels, p1 * channels);
            }
        }
    }
}

// g_f = g s;  g_mean = (g f + g_s) sigma, where g_s is what second derivatives say of s. Either result may be left out.
// With Add, both are added to what is there: images of f that were used over and over.
template <class T, bool WithGs, bool Add>
void product_gradient(Int size, const T* __restrict__ g, const T* __restrict__ f, const T* __restrict__ s,
                      const T* __restrict__ g_s, T* __restrict__ g_f, T* __restrict__ g_mean) {
    const auto of_f = [=](Int k) { return Add ? g_f[k] + g[k] * s[k] : g[k] * s[k]; };
    const auto of_mean = [=](Int k) {
        const T value = (g[k] * f[k] + (WithGs ? g_s[k] : T(0))) * slope(s[k]).sigma;
        return Add ? g_mean[k] + value : value;
    };
    if (!g_mean) {
        SIMD
        for (Int k = 0; k < size; ++k) g_f[k] = of_f(k);
    } else if (!g_f) {
        SIMD
        for (Int k = 0; k < size; ++k) g_mean[k] = of_mean(k);
    } else {
        SIMD
        for (Int k = 0; k < size; ++k) g_f[k] = of_f(k), g_mean[k] = of_mean(k);
    }
}

// The same for images of f first, ..., last - 1 of `images`, each used in `samples` images of the result.
template <class S, bool WithGs>
void product_gradients(Int first, Int last, Int size, Int images, Int samples, const S* g, const S* f, const S* s,
                       const S* g_s, S* g_f, S* g_mean) {
    typedef Number<S> T;
    for (Int i = first; i < last; ++i)
        for (Int sample = 0; sample < samples; ++sample) {
            const Int at = i * size, in_g = (sample * images + i) * size;
            const S* const from[] = {g + in_g, f + at, s + in_g, WithGs ? g_s + in_g : nullptr};
            S* const to[] = {g_f ? g_f + at : nullptr, g_mean ? g_mean + at : nullptr};
            as_numbers(size, from, to, sample > 0, [=](Int, Int count, const T* const* in, T* const* out) {
                (sample ? product_gradient<T, WithGs, true> : product_gradient<T, WithGs, false>)(
                    count, in[0], in[1], in[2], in[3], out[0], out[1]);
            });
        }
}

// For cotangents u of g_f and v of g_mean:
// d_g = u s + v f sigma;  d_f = v g sigma;  d_s = u g + v g f (1 - sigma).
template <class T, bool WithU>
void product_second(Int size, const T* __restrict__ g, const T* __restrict__ f, const T* __restrict__ s,
                    const T* __restrict__ u, const T* __restrict__ v, T* __restrict__ d_g, T* __restrict__ d_f,
                    T* __restrict__ d_s) {
    if (!v) {  // then d_f is zero and left out
        SIMD
        for (Int k = 0; k < size; ++k) d_g[k] = u[k] * s[k], d_s[k] = u[k] * g[k];
        return;
    }
    SIMD
    for (Int k = 0; k < size; ++k) {
        const Slope<T> e = slope(s[k]);
        const T vg = v[k] * g[k], uk = WithU ? u[k] : T(0);
        d_g[k] = uk * s[k] + v[k] * f[k] * e.sigma;
        d_f[k] = vg * e.sigma;
        d_s[k] = uk * g[k] + vg * f[k] * e.rest;
    }
}

// The same for images first, ..., last - 1.
template <class S>
void product_seconds(Int first, Int last, Int size, const S* g, const S* f, const S* s, const S* u, const S* v, S* d_g,
                     S* d_f, S* d_s) {
    typedef Number<S> T;
    const Int at = first * size;
    const S* const from[] = {g + at, f + at, s + at, u ? u + at : nullptr, v ? v + at : nullptr};
    S* const to[] = {d_g + at, d_f ? d_f + at : nullptr, d_s + at};
    as_numbers((last - first) * size, from, to, false, [=](Int, Int count, const T* const* in, T* const* out) {
        (u ? product_second<T, true> : product_second<T, false>)(count, in[0], in[1], in[2], in[3], in[4], out[0],
                                                                 out[1], out[2]);
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Normalisation, ReLU and 2x2 pooling: out = relu((p - mean) r + b), p = maxpool(x), r = 1 / sqrt(var + eps).
//
// Pooling comes first, because r > 0 keeps the order. `code` says of each pooled value which of its four pixels it is
// (0 to 3), plus INACTIVE where the ReLU is off. With M values per channel and group, xhat = (x - mean) r and
// G = the gradient of the output, put where its pooled value came from:
//   g_x = r (G - mean(G) - xhat A),  A = mean(G xhat);   g_b = sum(G).
// ---------------------------------------------------------------------------------------------------------------------

const Code INACTIVE = 4;

struct Shape {
    Int n, height, width, channels, groups;
    Int per_group() const { return n / groups; }
    Int values() const { return per_group() * height * width; }             // M
    Int image() const { return height * width * channels; }
    Int pooled() const { return (height / 2) * (width / 2) * channels; }
    Int row() const { return width * channels; }
};

// Calls quad(offset in x, offset in the pooled image) for each 2x2 square, single(offset in x) for the pixels that
// valid pooling leaves out.
template <class Quad, class Single> inline void each_pixel(const Shape& shape, Quad quad, Single single) {
    const Int rows = shape.height / 2, columns = shape.width / 2, step = shape.channels;
    for (Int y = 0; y < rows; ++y) {
        const Int top = 2 * y * shape.row();
        for (Int x = 0; x < columns; ++x) quad(top + 2 * x * step, (y * columns + x) * step);
        if (shape.width % 2) single(top + (shape.width - 1) * step), single(top + (2 * shape.width - 1) * step);
    }
    if (shape.height % 2)
        for (Int x = 0; x < shape.width; ++x) single((shape.height - 1) * shape.row() + x * step);
}

inline void clear(double* sums, Int size) {
    for (Int c = 0; c < size; ++c) sums[c] = 0;
}

// Sum over the images of a group, in their order.
inline double over_images(const Shape& shape, const double* sums, Int group, Int c) {
    double total = 0;
    const Int first = group * shape.per_group();
    for (Int i = first; i < first + shape.per_group(); ++i) total += sums[i * shape.channels + c];
    return total;
}

// Pools and sums x - K and (x - K)^2, where K is the group's first pixel: close enough to the mean to lose nothing in
// the variance. sums: (2, n, channels).
template <class S>
void pool_and_sum(Int first, Int last, const Shape& shape, const S* x_all, S* p_all, Code* code_all, double* sums) {
    typedef Number<S> T;
    const Int C = shape.channels, row = shape.row();
    for (Int i = first; i < last; ++i) {
        const S* __restrict__ x = x_all + i * shape.image();
        const S* __restrict__ shift = x_all + i / shape.per_group() * shape.per_group() * shape.image();
        S* __restrict__ p = p_all + i * shape.pooled();
        Code* __restrict__ code = code_all + i * shape.pooled();
        double* __restrict__ sum = sums + i * C;
        double* __restrict__ square = sums + (shape.n + i) * C;
        clear(sum, C), clear(square, C);
        each_pixel(
            shape,
            [=](Int at, Int pooled) {
                SIMD
                for (Int c = 0; c < C; ++c) {
                    const T x0 = x[at + c], x1 = x[at + C + c], x2 = x[at + row + c], x3 = x[at + row + C + c];
                    const T k = shift[c], d0 = x0 - k, d1 = x1 - k, d2 = x2 - k, d3 = x3 - k;
                    sum[c] += (d0 + d1) + (d2 + d3);
                    square[c] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3);
                    T best = x0;
                    int which = 0;
                    which = x1 > best ? 1 : which, best = x1 > best ? x1 : best;
                    which = x2 > best ? 2 : which, best = x2 > best ? x2 : best;
                    which = x3 > best ? 3 : which, best = x3 > best ? x3 : best;
                    p[pooled + c] = best;
                    code[pooled + c] = static_cast<Code>(which);
                }
            },
            [=](Int at) {
                SIMD
                for (Int c = 0; c < C; ++c) {
                    const T d = x[at + c] - shift[c];
                    sum[c] += d, square[c] += d * d;
                }
            });
    }
}

// stats: mean and r, each (groups, channels).
template <class S>
void statistics(const Shape& shape, double eps, const S* x, const double* sums, Number<S>* stats) {
    typedef Number<S> T;
    const Int C = shape.channels, all = shape.groups * C;
    for (Int group = 0; group < shape.groups; ++group)
        for (Int c = 0; c < C; ++c) {
            const double m = over_images(shape, sums, group, c) / shape.values();
            const double square = over_images(shape, sums + shape.n * C, group, c) / shape.values();
            double variance = square - m * m;
            variance = variance < 0 ? 0 : variance;  // NaN stays
            stats[group * C + c] = static_cast<T>(x[group * shape.per_group() * shape.image() + c] + m);
            stats[all + group * C + c] = static_cast<T>(1 / std::sqrt(variance + eps));
        }
}

template <class S>
void normalise(Int first, Int last, const Shape& shape, const S* p_all, const Number<S>* stats,
               const Number<S>* __restrict__ bias, Code* code_all, S* out_all) {
    typedef Number<S> T;
    const Int C = shape.channels;
    for (Int i = first; i < last; ++i) {
        const Int group = i / shape.per_group() * C;
        const T* __restrict__ mean = stats + group;
        const T* __restrict__ r = stats + shape.groups * C + group;
        for (Int at = i * shape.pooled(); at < (i + 1) * shape.pooled(); at += C) {
            const S* __restrict__ p = p_all + at;
            Code* __restrict__ code = code_all + at;
            S* __restrict__ out = out_all + at;
            SIMD
            for (Int c = 0; c < C; ++c) {
                const T t = (p[c] - mean[c]) * r[c] + bias[c];
                out[c] = t <= 0 ? T(0) : t;  // NaN stays
                code[c] = t <= 0 ? code[c] | INACTIVE : code[c];
            }
        }
    }
}

// sums: G and G xhat, each (n, channels).
template <class S>
void gradient_sums(Int first, Int last, const Shape& shape, const S* g_all, const S* p_all, const Code* code_all,
                   const Number<S>* stats, double* sums) {
    typedef Number<S> T;
    const Int C = shape.channels;
    for (Int i = first; i < last; ++i) {
        const Int group = i / shape.per_group() * C;
        const T* __restrict__ mean = stats + group;
        const T* __restrict__ r = stats + shape.groups * C + group;
        double* __restrict__ sum = sums + i * C;
        double* __restrict__ product = sums + (shape.n + i) * C;
        clear(sum, C), clear(product, C);
        const S* __restrict__ g = g_all + i * shape.pooled();
        const S* __restrict__ p = p_all + i * shape.pooled();
        const Code* __restrict__ code = code_all + i * shape.pooled();
        const auto G = [=](Int k) { return code[k] < INACTIVE ? g[k] : T(0); };
        Int at = 0;
        for (; at + 4 * C <= shape.pooled(); at += 4 * C) {  // four pixels at a time
            SIMD
            for (Int c = 0; c < C; ++c) {
                const Int k0 = at + c, k1 = k0 + C, k2 = k1 + C, k3 = k2 + C;
                const T G0 = G(k0), G1 = G(k1), G2 = G(k2), G3 = G(k3), m = mean[c];
                sum[c] += (G0 + G1) + (G2 + G3);
                product[c] += ((G0 * (p[k0] - m) + G1 * (p[k1] - m)) + (G2 * (p[k2] - m) + G3 * (p[k3] - m))) * r[c];
            }
        }
        for (; at < shape.pooled(); at += C) {
            SIMD
            for (Int c = 0; c < C; ++c) sum[c] += G(at + c), product[c] += G(at + c) * ((p[at + c] - mean[c]) * r[c]);
        }
    }
}

// moments: mean(G) and A, each (groups, channels). factors: r mean(G) and r^2 A. g_b: (channels).
template <class S>
void gradient_factors(const Shape& shape, const double* sums, const Number<S>* stats, double* moments,
                      Number<S>* factors, Number<S>* g_b) {
    typedef Number<S> T;
    const Int C = shape.channels, all = shape.groups * C;
    for (Int c = 0; c < C; ++c) {
        double total = 0;
        for (Int group = 0; group < shape.groups; ++group) {
            const Int k = group * C + c;
            const double r = stats[all + k], sum = over_images(shape, sums, group, c);
            const double mean = sum / shape.values();
            const double A = over_images(shape, sums + shape.n * C, group, c) / shape.values();
            total += sum;
            moments[k] = mean, moments[all + k] = A;
            factors[k] = static_cast<T>(r * mean), factors[all + k] = static_cast<T>(r * r * A);
        }
        g_b[c] = static_cast<T>(total);
    }
}

// g_x = r G - r mean(G) - (x - mean) r^2 A (+ g_also, what second derivatives say of x).
template <class S, bool WithAlso>
void gradient(Int first, Int last, const Shape& shape, const S* g_all, const S* x_all, const Code* code_all,
              const Number<S>* stats, const Number<S>* factors, const S* also_all, S* g_x_all) {
    typedef Number<S> T;
    const Int C = shape.channels, row = shape.row(), all = shape.groups * C;
    for (Int i = first; i < last; ++i) {
        const Int group = i / shape.per_group() * C;
        const T* __restrict__ mean = stats + group;
        const T* __restrict__ r = stats + all + group;
        const T* __restrict__ f0 = factors + group;
        const T* __restrict__ f1 = factors + all + group;
        const S* __restrict__ x = x_all + i * shape.image();
        const S* __restrict__ g = g_all + i * shape.pooled();
        const Code* __restrict__ code = code_all + i * shape.pooled();
        const S* __restrict__ also = also_all + (WithAlso ? i * shape.image() : 0);
        S* __restrict__ g_x = g_x_all + i * shape.image();
        const auto rest = [=](Int k, Int c) {
            const T value = -f0[c] - (x[k] - mean[c]) * f1[c];
            return WithAlso ? value + also[k] : value;
        };
        each_pixel(
            shape,
            [=](Int at, Int pooled) {
                SIMD
                for (Int c = 0; c < C; ++c) {
                    const int which = code[pooled + c];
                    const T rG = r[c] * g[pooled + c];
                    g_x[at + c] = (which == 0 ? rG : T(0)) + rest(at + c, c);
                    g_x[at + C + c] = (which == 1 ? rG : T(0)) + rest(at + C + c, c);
                    g_x[at + row + c] = (which == 2 ? rG : T(0)) + rest(at + row + c, c);
                    g_x[at + row + C + c] = (which == 3 ? rG : T(0)) + rest(at + row + C + c, c);
                }
            },
            [=](Int at) {
                SIMD
                for (Int c = 0; c < C; ++c) g_x[at + c] = rest(at + c, c);
            });
    }
}

// For the cotangent v of g_x. sums: v, v xhat and v G, each (n, channels). at_max: v where the pooled values came from.
template <class S>
void second_sums(Int first, Int last, const Shape& shape, const S* v_all, const S* g_all, const S* x_all,
                 const Code* code_all, const Number<S>* stats, double* sums, S* at_max_all) {
    typedef Number<S> T;
    const Int C = shape.channels, row = shape.row();
    for (Int i = first; i < last; ++i) {
        const Int group = i / shape.per_group() * C;
        const T* __restrict__ mean = stats + group;
        const T* __restrict__ r = stats + shape.groups * C + group;
        const S* __restrict__ v = v_all + i * shape.image();
        const S* __restrict__ x = x_all + i * shape.image();
        const S* __restrict__ g = g_all + i * shape.pooled();
        const Code* __restrict__ code = code_all + i * shape.pooled();
        S* __restrict__ at_max = at_max_all + i * shape.pooled();
        double* __restrict__ sum = sums + i * C;
        double* __restrict__ with_xhat = sums + (shape.n + i) * C;
        double* __restrict__ with_G = sums + (2 * shape.n + i) * C;
        clear(sum, C), clear(with_xhat, C), clear(with_G, C);
        each_pixel(
            shape,
            [=](Int at, Int pooled) {
                SIMD
                for (Int c = 0; c < C; ++c) {
                    const T v0 = v[at + c], v1 = v[at + C + c], v2 = v[at + row + c], v3 = v[at + row + C + c];
                    const T m = mean[c];
                    const T h0 = x[at + c] - m, h1 = x[at + C + c] - m;
                    const T h2 = x[at + row + c] - m, h3 = x[at + row + C + c] - m;
                    const int code_here = code[pooled + c], which = code_here & 3;
                    T here = v0;
                    here = which == 1 ? v1 : here;
                    here = which == 2 ? v2 : here;
                    here = which == 3 ? v3 : here;
                    at_max[pooled + c] = here;
                    const T G = code_here < INACTIVE ? g[pooled + c] : T(0);
                    sum[c] += (v0 + v1) + (v2 + v3);
                    with_xhat[c] += ((v0 * h0 + v1 * h1) + (v2 * h2 + v3 * h3)) * r[c];
                    with_G[c] += here * G;
                }
            },
            [=](Int at) {
                SIMD
                for (Int c = 0; c < C; ++c)
                    sum[c] += v[at + c], with_xhat[c] += v[at + c] * ((x[at + c] - mean[c]) * r[c]);
            });
    }
}

// With B = mean(v xhat), L = sum(v g_x) = r (sum(v G) - M mean(v) mean(G) - M A B) and H = -r (v A + G B):
//   d_g = [active] (r (v - mean(v) - xhat B) + u_b) at the maxima
//   d_x = r (H - mean(H) - xhat mean(H xhat)) - L r xhat / M,
//   mean(H) = -r (mean(v) A + mean(G) B),  mean(H xhat) = -2 r A B;  the last term is L/r dr/dx.
// factors: r mean(v) - u_b, r^2 B, r^2 A, r mean(H), r^2 (mean(H xhat) + L/M), each (groups, channels).
template <class S>
void second_factors(const Shape& shape, const double* sums, const Number<S>* stats, const double* moments,
                    const Number<S>* u_b, Number<S>* factors) {
    typedef Number<S> T;
    const Int C = shape.channels, all = shape.groups * C;
    const double M = static_cast<double>(shape.values());
    for (Int group = 0; group < shape.groups; ++group)
        for (Int c = 0; c < C; ++c) {
            const Int k = group * C + c;
            const double r = stats[all + k], mean_G = moments[k], A = moments[all + k];
            const double mean_v = over_images(shape, sums, group, c) / M;
            const double B = over_images(shape, sums + shape.n * C, group, c) / M;
            const double sum_vG = over_images(shape, sums + 2 * shape.n * C, group, c);
            const double L = r * (sum_vG - M * mean_v * mean_G - M * A * B);
            const double mean_H = -r * (mean_v * A + mean_G * B), mean_H_xhat = -2 * r * A * B;
            factors[k] = static_cast<T>(r * mean_v - (u_b ? u_b[c] : T(0)));
            factors[all + k] = static_cast<T>(r * r * B);
            factors[2 * all + k] = static_cast<T>(r * r * A);
            factors[3 * all + k] = static_cast<T>(r * mean_H);
            factors[4 * all + k] = static_cast<T>(r * r * (mean_H_xhat + L / M));
        }
}

// d_g holds v at the maxima at first.
template <class S>
void second(Int first, Int last, const Shape& shape, const S* v_all, const S* g_all, const S* x_all, const S* p_all,
            const Code* code_all, const Number<S>* stats, const Number<S>* factors, S* d_g_all, S* d_x_all) {
    typedef Number<S> T;
    const Int C = shape.channels, row = shape.row(), all = shape.groups * C;
    for (Int i = first; i < last; ++i) {
        const Int group = i / shape.per_group() * C;
        const T* __restrict__ mean = stats + group;
        const T* __restrict__ r = stats + all + group;
        const T* __restrict__ f0 = factors + group;
        const T* __restrict__ r2B = factors + all + group;
        const T* __restrict__ r2A = factors + 2 * all + group;
        const T* __restrict__ f3 = factors + 3 * all + group;
        const T* __restrict__ f4 = factors + 4 * all + group;
        const S* __restrict__ v = v_all + i * shape.image();
        const S* __restrict__ x = x_all + i * shape.image();
        const S* __restrict__ g = g_all + i * shape.pooled();
        const S* __restrict__ p = p_all + i * shape.pooled();
        const Code* __restrict__ code = code_all + i * shape.pooled();
        S* __restrict__ d_g = d_g_all + i * shape.pooled();
        S* __restrict__ d_x = d_x_all + i * shape.image();
        const auto rest = [=](Int k, Int c) { return -r2A[c] * v[k] - f3[c] - (x[k] - mean[c]) * f4[c]; };
        each_pixel(
            shape,
            [=](Int at, Int pooled) {
                SIMD
                for (Int c = 0; c < C; ++c) {
                    const int which = code[pooled + c];
                    const T r2BG = r2B[c] * g[pooled + c];
                    const T inner = r[c] * d_g[pooled + c] - f0[c] - (p[pooled + c] - mean[c]) * r2B[c];
                    d_g[pooled + c] = which < INACTIVE ? inner : T(0);
                    d_x[at + c] = rest(at + c, c) - (which == 0 ? r2BG : T(0));
                    d_x[at + C + c] = rest(at + C + c, c) - (which == 1 ? r2BG : T(0));
                    d_x[at + row + c] = rest(at + row + c, c) - (which == 2 ? r2BG : T(0));
                    d_x[at + row + C + c] = rest(at + row + C + c, c) - (which == 3 ? r2BG : T(0));
                }
            },
            [=](Int at) {
                SIMD
                for (Int c = 0; c < C; ++c) d_x[at + c] = rest(at + c, c);
            });
    }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// What Python calls, for each type. Pointers that may be null: noise, keys, g_s, g_f, g_mean, u, v, d_f, g_also, u_b.
// The normalisation's functions have three stages: 1, sums per image, over a range of images; 2, over all images, what
// follows from the sums; 4, the result, over a range of images. One thread asks for all of them at once (7).
// ---------------------------------------------------------------------------------------------------------------------

#define SHAPE Int n, Int height, Int width, Int channels, Int groups
#define AS_SHAPE (Shape{n, height, width, channels, groups})

#define FOR_TYPE(S, NAME)                                                                                              \
    extern "C" void product_forward_##NAME(Int first, Int last, Int pixels, Int channels, Int images,                  \
                                           Int noise_by_channel, Int per_sample, const S* f, const S* mean,            \
                                           const S* noise, const Int* keys, S* out, S* s) {                            \
        product_forward<S>(first, last, pixels, channels, images, noise_by_channel, {keys, per_sample}, f, mean,       \
                           noise, out, s);                                                                             \
    }                                                                                                                  \
    extern "C" void product_gradient_##NAME(Int first, Int last, Int size, Int images, Int samples, const S* g,        \
                                            const S* f, const S* s, const S* g_s, S* g_f, S* g_mean) {                 \
        (g_s ? product_gradients<S, true> : product_gradients<S, false>)(first, last, size, images, samples, g, f, s,  \
                                                                         g_s, g_f, g_mean);                            \
    }                                                                                                                  \
    extern "C" void product_second_##NAME(Int first, Int last, Int size, const S* g, const S* f, const S* s,           \
                                          const S* u, const S* v, S* d_g, S* d_f, S* d_s) {                            \
        product_seconds<S>(first, last, size, g, f, s, u, v, d_g, d_f, d_s);                                           \
    }                                                                                                                  \
    extern "C" void norm_forward_##NAME(Int stages, Int first, Int last, SHAPE, double eps, const S* x,                \
                                        const Number<S>* bias, S* p, Code* code, double* sums, Number<S>* stats,       \
                                        S* out) {                                                                      \
        if (stages & 1) pool_and_sum<S>(first, last, AS_SHAPE, x, p, code, sums);                                      \
        if (stages & 2) statistics<S>(AS_SHAPE, eps, x, sums, stats);                                                  \
        if (stages & 4) normalise<S>(first, last, AS_SHAPE, p, stats, bias, code, out);                                \
    }                                                                                                                  \
    extern "C" void norm_gradient_##NAME(Int stages, Int first, Int last, SHAPE, const S* g, const S* x, const S* p,   \
                                         const Code* code, const Number<S>* stats, const S* g_also, double* sums,      \
                                         double* moments, Number<S>* factors, Number<S>* g_b, S* g_x) {                \
        if (stages & 1) gradient_sums<S>(first, last, AS_SHAPE, g, p, code, stats, sums);                              \
        if (stages & 2) gradient_factors<S>(AS_SHAPE, sums, stats, moments, factors, g_b);                             \
        if (stages & 4)                                                                                                \
            (g_also ? gradient<S, true>                                                                                \
                    : gradient<S, false>)(first, last, AS_SHAPE, g, x, code, stats, factors, g_also, g_x);             \
    }                                                                                                                  \
    extern "C" void norm_second_##NAME(Int stages, Int first, Int last, SHAPE, const S* v, const Number<S>* u_b,       \
                                       const S* g, const S* x, const S* p, const Code* code, const Number<S>* stats,   \
                                       const double* moments, double* sums, Number<S>* factors, S* d_g, S* d_x) {      \
        if (stages & 1) second_sums<S>(first, last, AS_SHAPE, v, g, x, code, stats, sums, d_g);                        \
        if (stages & 2) second_factors<S>(AS_SHAPE, sums, stats, moments, u_b, factors);                               \
        if (stages & 4) second<S>(first, last, AS_SHAPE, v, g, x, p, code, stats, factors, d_g, d_x);                  \
    }

FOR_TYPE(float, float32)
FOR_TYPE(double, float64)
FOR_TYPE(BFloat16, bfloat16)
