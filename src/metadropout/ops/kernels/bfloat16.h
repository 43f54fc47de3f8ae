// The types in which images are stored, and those in which they are computed with.
//
// bfloat16 is the upper half of a float. It is only for storing: it turns into a float when it is read and is rounded,
// to the nearest and half-way cases to the even one, when it is written.

#pragma once

#include <cstdint>
#include <cstring>

struct BFloat16 {
    std::uint16_t bits;

    operator float() const {
        const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }

    BFloat16& operator=(float value) {
        std::uint32_t wide;
        std::memcpy(&wide, &value, sizeof wide);
        const std::uint32_t rounded = wide + 0x7FFF + (wide >> 16 & 1);
        bits = static_cast<std::uint16_t>((value != value ? wide | 0x400000 : rounded) >> 16);  // NaN stays
        return *this;
    }
};

template <class Stored> struct Computed { typedef Stored Number; };
template <> struct Computed<BFloat16> { typedef float Number; };

// What images of a type are computed with.
template <class Stored> using Number = typename Computed<Stored>::Number;
