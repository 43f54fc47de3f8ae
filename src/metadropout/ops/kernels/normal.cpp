// Standard normal values as a function of a key, the number of a draw and a place in it, so that whoever needs a value
// computes it and nothing is kept: words from Philox4x32 with ten rounds (Salmon et al., 2011), normal values from those
// by Box and Muller's transform.
//
// A group of 64 places has 16 counters, whose first, second, third and fourth words give 16 values each. The same in
// plain PyTorch is in draws.py.

#include <cmath>
#include <cstdint>
#include <cstring>

typedef std::int64_t Int;

namespace {

typedef std::uint64_t Wide;

#define SIMD _Pragma("omp simd")

const int COUNTERS = 16;
const Int GROUP = 4 * COUNTERS;
const Wide LOW = 0xFFFFFFFF;

// The words of 16 counters that follow each other, each in the lower half of 64 bits, of which a product takes no more.
struct Words {
    Wide a[COUNTERS], b[COUNTERS], c[COUNTERS], d[COUNTERS];

    Words(Wide key, Wide draw, Wide group) {
        SIMD
        for (int i = 0; i < COUNTERS; ++i) {
            const Wide counter = group * COUNTERS + i;
            a[i] = counter, b[i] = counter >> 32, c[i] = draw, d[i] = draw >> 32;
        }
        Wide k0 = key & LOW, k1 = key >> 32;
#pragma GCC unroll 10
        for (int round = 0; round < 10; ++round) {
            SIMD
            for (int i = 0; i < COUNTERS; ++i) {
                const Wide p = (a[i] & LOW) * 0xD2511F53u, q = (c[i] & LOW) * 0xCD9E8D57u;
                a[i] = (q >> 32) ^ b[i] ^ k0, b[i] = q, c[i] = (p >> 32) ^ d[i] ^ k1, d[i] = p;
            }
            k0 = (k0 + 0x9E3779B9u) & LOW, k1 = (k1 + 0xBB67AE85u) & LOW;
        }
    }
};

inline double logarithm(double u) { return std::log(u); }

// log(u) for a positive normal u, after Cephes: u = m 2^e, m between sqrt(1/2) and sqrt(2).
inline float logarithm(float u) {
    std::int32_t bits;
    std::memcpy(&bits, &u, sizeof bits);
    const std::int32_t e = (bits - 0x3F3504F3) >> 23;
    bits -= e * (1 << 23);
    float m;
    std::memcpy(&m, &bits, sizeof bits);
    const float t = m - 1.0f, square = t * t, exponent = static_cast<float>(e);
    float q = 7.0376836292e-2f;
    q = q * t - 1.1514610310e-1f;
    q = q * t + 1.1676998740e-1f;
    q = q * t - 1.2420140846e-1f;
    q = q * t + 1.4249322787e-1f;
    q = q * t - 1.6668057665e-1f;
    q = q * t + 2.0000714765e-1f;
    q = q * t - 2.4999993993e-1f;
    q = q * t + 3.3333331174e-1f;
    q = q * t * square - 2.12194440e-4f * exponent - 0.5f * square;
    return (t + q) + 0.693359375f * exponent;
}

template <class T> struct Direction { T cos, sin; };

// Of an angle of f quarter turns, |f| <= 1/2.
inline Direction<double> direction(double f) {
    const double angle = f * 1.5707963267948966;
    return {std::cos(angle), std::sin(angle)};
}

inline Direction<float> direction(float f) {  // Taylor's series, of which no more is needed
    const float w = f * f;
    float s = 1.6044118478735982e-4f, c = 9.1926027483942659e-4f;
    s = s * w - 4.6817541353186881e-3f, c = c * w - 2.0863480763352961e-2f;
    s = s * w + 7.9692626246167046e-2f, c = c * w + 2.5366950790104801e-1f;
    s = s * w - 6.4596409750624625e-1f, c = c * w - 1.2337005501361698f;
    s = s * w + 1.5707963267948966f, c = c * w + 1.0f;
    return {c, s * f};
}

// Two normal values from two words: the upper 23 bits of one give the radius, the upper 24 bits of the other the angle.
// Both are exact in float, so that float and double give the same values.
template <class T> inline void box_muller(Wide first, Wide second, T* x, T* y) {
    const T u = static_cast<T>(static_cast<std::int32_t>((first & LOW) >> 9 << 1 | 1)) * T(1.0 / (1 << 24));
    const T radius = std::sqrt(-2 * logarithm(u));
    const std::int32_t turn = static_cast<std::int32_t>((second & LOW) >> 8);
    const std::int32_t quarter = (turn + (1 << 21)) >> 22;  // the nearest one; what is left is at most half of one
    const Direction<T> rest = direction(static_cast<T>(turn - quarter * (1 << 22)) * T(1.0 / (1 << 22)));
    const T cos = quarter & 1 ? rest.sin : rest.cos, sin = quarter & 1 ? rest.cos : rest.sin;
    *x = radius * ((quarter + 1) & 2 ? -cos : cos);
    *y = radius * (quarter & 2 ? -sin : sin);
}

template <class T> inline void group_of_normals(Wide key, Wide draw, Wide group, T* out) {
    const Words words(key, draw, group);
    SIMD
    for (int i = 0; i < COUNTERS; ++i) box_muller(words.a[i], words.b[i], out + i, out + COUNTERS + i);
    SIMD
    for (int i = 0; i < COUNTERS; ++i)
        box_muller(words.c[i], words.d[i], out + 2 * COUNTERS + i, out + 3 * COUNTERS + i);
}

}  // namespace

// The values of places first, ..., last - 1.
template <class T> void normals(Int key, Int draw, Int first, Int last, T* out) {
    for (Int start = first / GROUP * GROUP; start < last; start += GROUP) {
        if (start >= first && start + GROUP <= last) {
            group_of_normals(key, draw, start / GROUP, out + (start - first));
            continue;
        }
        T values[GROUP];
        group_of_normals(key, draw, start / GROUP, values);
        for (Int place = start < first ? first : start; place < start + GROUP && place < last; ++place)
            out[place - first] = values[place - start];
    }
}

template void normals<float>(Int, Int, Int, Int, float*);
template void normals<double>(Int, Int, Int, Int, double*);

// What Python calls: the values of images first, ..., last - 1, each of `size` places.
extern "C" void normal_float32(Int first, Int last, Int size, Int key, Int draw, float* out) {
    normals(key, draw, first * size, last * size, out + first * size);
}
extern "C" void normal_float64(Int first, Int last, Int size, Int key, Int draw, double* out) {
    normals(key, draw, first * size, last * size, out + first * size);
}
