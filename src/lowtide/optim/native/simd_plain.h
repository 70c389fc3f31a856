// Vectors of eight floats in plain C++: the fallback, and what a compiler may turn into NEON or SVE.
//
// Every operation but two, the roots in steps, gives the same bits as its namesakes in simd_avx2.h and simd_avx512.h.
// `std::fma` rounds once on every machine; where there is no such instruction it is slow, and still right.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  uint32_t exponent = (half >> 10) & 0x1fu;
  uint32_t fraction = half & 0x3ffu;
  uint32_t bits;
  if (exponent == 0x1f) {
    bits = sign | 0x7f800000u | (fraction << 13) | (fraction ? 0x400000u : 0u);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  } else if (fraction == 0) {
    bits = sign;
  } else {
    exponent = 113;
    while (!(fraction & 0x400u)) {
      fraction <<= 1;
      --exponent;
    }
    bits = sign | (exponent << 23) | ((fraction & 0x3ffu) << 13);
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  uint32_t kept, rest, half_way;
  if (magnitude >= 0x38800000u) {  // a normal half
    kept = (magnitude - 0x38000000u) >> 13;
    rest = magnitude & 0x1fffu;
    half_way = 0x1000u;
  } else {
    const uint32_t shift = 126u - (magnitude >> 23);
    if (shift > 24u) return static_cast<uint16_t>(sign);
    const uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
    kept = fraction >> shift;
    rest = fraction & ((1u << shift) - 1u);
    half_way = 1u << (shift - 1u);
  }
  if (rest > half_way || (rest == half_way && (kept & 1u))) ++kept;
  return static_cast<uint16_t>(sign | kept);
}

struct Vec {
  static constexpr int kWidth = 8;

  struct F {
    float x[kWidth];
  };
  struct I {
    uint32_t x[kWidth];
  };

#define LOWTIDE_EACH for (int i = 0; i < kWidth; ++i)
  static F load(const float* p) { F r; std::memcpy(r.x, p, sizeof r.x); return r; }
  static void store(float* p, F a) { std::memcpy(p, a.x, sizeof a.x); }
  static F broadcast(float a) { F r; LOWTIDE_EACH r.x[i] = a; return r; }
  static F add(F a, F b) { F r; LOWTIDE_EACH r.x[i] = a.x[i] + b.x[i]; return r; }
  static F sub(F a, F b) { F r; LOWTIDE_EACH r.x[i] = a.x[i] - b.x[i]; return r; }
  static F mul(F a, F b) { F r; LOWTIDE_EACH r.x[i] = a.x[i] * b.x[i]; return r; }
  static F div(F a, F b) { F r; LOWTIDE_EACH r.x[i] = a.x[i] / b.x[i]; return r; }
  static F fma(F a, F b, F c) { F r; LOWTIDE_EACH r.x[i] = std::fma(a.x[i], b.x[i], c.x[i]); return r; }
  static F fnma(F a, F b, F c) { F r; LOWTIDE_EACH r.x[i] = std::fma(-a.x[i], b.x[i], c.x[i]); return r; }
  // The second where one of them is a NaN.
  static F larger(F a, F b) { F r; LOWTIDE_EACH r.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return r; }
  static F sqrt(F a) { F r; LOWTIDE_EACH r.x[i] = std::sqrt(a.x[i]); return r; }
  // Zero for numbers that are too small to be normal. Where the processor sees to it, nothing is done here.
  static F flushed(F a) { F r; LOWTIDE_EACH r.x[i] = std::fabs(a.x[i]) < 0x1p-126f ? 0.0f : a.x[i]; return r; }
  // The root of `a` in whole steps, the nearest number or one less, on top of `origin`: that is 2^23 steps, and leaves no room
  // for fractions. The only operations that differ between machines, whose roots are wrong by up to a quarter of a step. A
  // root of less than a quarter may come to `origin - half`.
  static F root_steps(F a, float origin, float half) { return add(sub(sqrt(a), broadcast(half)), broadcast(origin)); }
  static F fourth_root_steps(F a, float origin, float half) { return root_steps(sqrt(a), origin, half); }
  // `size` with the sign of `a`; 0 where `a` is 0, NaN where it is NaN.
  static F signed_size(F a, F size) {
    F r;
    LOWTIDE_EACH r.x[i] = a.x[i] > 0.0f ? size.x[i] : (a.x[i] < 0.0f ? 0.0f - size.x[i] : a.x[i]);
    return r;
  }

  static I bits(F a) { I r; std::memcpy(r.x, a.x, sizeof r.x); return r; }
  static F from_bits(I a) { F r; std::memcpy(r.x, a.x, sizeof r.x); return r; }
  static I ints(uint32_t a) { I r; LOWTIDE_EACH r.x[i] = a; return r; }
  static I lanes() { I r; LOWTIDE_EACH r.x[i] = static_cast<uint32_t>(i); return r; }
  static I iadd(I a, I b) { I r; LOWTIDE_EACH r.x[i] = a.x[i] + b.x[i]; return r; }
  static I imul(I a, I b) { I r; LOWTIDE_EACH r.x[i] = a.x[i] * b.x[i]; return r; }
  static I iand(I a, I b) { I r; LOWTIDE_EACH r.x[i] = a.x[i] & b.x[i]; return r; }
  static I ixor(I a, I b) { I r; LOWTIDE_EACH r.x[i] = a.x[i] ^ b.x[i]; return r; }
  static I imax(I a, I b) {
    I r;
    LOWTIDE_EACH r.x[i] = static_cast<int32_t>(a.x[i]) > static_cast<int32_t>(b.x[i]) ? a.x[i] : b.x[i];
    return r;
  }
  template <int kShift> static I left(I a) { I r; LOWTIDE_EACH r.x[i] = a.x[i] << kShift; return r; }
  template <int kShift> static I right(I a) { I r; LOWTIDE_EACH r.x[i] = a.x[i] >> kShift; return r; }
  static I where_nan(F test, I yes, I no) {
    I r;
    LOWTIDE_EACH r.x[i] = test.x[i] != test.x[i] ? yes.x[i] : no.x[i];
    return r;
  }
  // `a + 1` where the value has reached the border.
  static I next_where(F value, F border, I a) {
    I r;
    LOWTIDE_EACH r.x[i] = a.x[i] + (value.x[i] >= border.x[i] ? 1u : 0u);
    return r;
  }
  // `-a` where the value is negative.
  static I negative_where(F value, I a) {
    I r;
    LOWTIDE_EACH r.x[i] = std::signbit(value.x[i]) ? 0u - a.x[i] : a.x[i];
    return r;
  }
  // `a`, or `least` if that is more, where the value is not zero.
  static I at_least_where(F value, I least, I a) {
    const I more = imax(a, least);
    I r;
    LOWTIDE_EACH r.x[i] = value.x[i] != 0.0f ? more.x[i] : a.x[i];
    return r;
  }
  static uint32_t largest(I a) {
    uint32_t r = a.x[0];
    for (int i = 1; i < kWidth; ++i) r = static_cast<int32_t>(a.x[i]) > static_cast<int32_t>(r) ? a.x[i] : r;
    return r;
  }

  static F to_float(I a) { F r; LOWTIDE_EACH r.x[i] = static_cast<float>(static_cast<int32_t>(a.x[i])); return r; }

  static I load_u16(const uint16_t* p) { I r; LOWTIDE_EACH r.x[i] = p[i]; return r; }
  static I load_i16(const int16_t* p) {
    I r;
    LOWTIDE_EACH r.x[i] = static_cast<uint32_t>(static_cast<int32_t>(p[i]));
    return r;
  }
  // The upper halves of two vectors, one after the other.
  static void store_upper(void* p, I low, I high) { store_lower(p, right<16>(low), right<16>(high)); }
  // The same past the caches, where there is a way to; `p` is a multiple of 64.
  static void stream_upper(void* p, I low, I high) { store_upper(p, low, high); }
  static void store_lower(void* p, I low, I high) {
    uint16_t r[2 * kWidth];
    LOWTIDE_EACH r[i] = static_cast<uint16_t>(low.x[i]);
    LOWTIDE_EACH r[kWidth + i] = static_cast<uint16_t>(high.x[i]);
    std::memcpy(p, r, sizeof r);
  }
  // Before other threads may read what was streamed.
  static void end_streams() {}
  static I load_u8(const uint8_t* p) { I r; LOWTIDE_EACH r.x[i] = p[i]; return r; }
  static I load_i8(const int8_t* p) {
    I r;
    LOWTIDE_EACH r.x[i] = static_cast<uint32_t>(static_cast<int32_t>(p[i]));
    return r;
  }
  static void store_8(void* p, I a) {
    uint8_t r[kWidth];
    LOWTIDE_EACH r[i] = static_cast<uint8_t>(a.x[i]);
    std::memcpy(p, r, sizeof r);
  }
  static F load_half(const uint16_t* p) { F r; LOWTIDE_EACH r.x[i] = half_to_float(p[i]); return r; }
  static void store_half(uint16_t* p, F a) { LOWTIDE_EACH p[i] = float_to_half(a.x[i]); }
#undef LOWTIDE_EACH
};

}  // namespace
