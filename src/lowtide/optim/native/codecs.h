// Tiles of 128 elements between the format they are stored in and fp32. Included once for each instruction set, after the
// header that defines its `Vec`.
//
// NaN needs care wherever rounding adds to the bits: the sum would run over into the sign. It is written as one fixed NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "abi.h"

namespace {

using lowtide::kBlock;
using F = Vec::F;
using I = Vec::I;

constexpr uint32_t kNan = 0x7fc00000u;

// The bits of a number after something was added below the upper half; one fixed NaN for every NaN.
inline I plus_bits(F value, I added) {
  return Vec::where_nan(value, Vec::ints(kNan), Vec::iadd(Vec::bits(value), added));
}

// The nearest bf16, ties to even, in the upper half.
inline I nearest_bfloat(F value) {
  const I odd = Vec::iand(Vec::right<16>(Vec::bits(value)), Vec::ints(1));
  return plus_bits(value, Vec::iadd(odd, Vec::ints(0x7fff)));
}

inline F from_bfloat(I half) { return Vec::from_bits(Vec::left<16>(half)); }

void load_bfloat(const void* source, float* tile) {
  const auto* from = static_cast<const uint16_t*>(source);
  for (int i = 0; i < kBlock; i += Vec::kWidth) Vec::store(tile + i, from_bfloat(Vec::load_u16(from + i)));
}

void store_bfloat(void* target, const float* tile) {
  auto* to = static_cast<uint16_t*>(target);
  for (int i = 0; i < kBlock; i += 2 * Vec::kWidth) {
    const I low = nearest_bfloat(Vec::load(tile + i));
    Vec::store_upper(to + i, low, nearest_bfloat(Vec::load(tile + i + Vec::kWidth)));
  }
}

// Past the caches, to an address that is a multiple of 64: for weights that the update does not read, while a usual store
// reads the line first. On one core the whole update is 9% faster with fp32 moments, and 3% with 8-bit ones.
void stream_bfloat(void* target, const float* tile) {
  auto* to = static_cast<uint16_t*>(target);
  for (int i = 0; i < kBlock; i += 2 * Vec::kWidth) {
    const I low = nearest_bfloat(Vec::load(tile + i));
    Vec::stream_upper(to + i, low, nearest_bfloat(Vec::load(tile + i + Vec::kWidth)));
  }
}

void load_half(const void* source, float* tile) {
  const auto* from = static_cast<const uint16_t*>(source);
  for (int i = 0; i < kBlock; i += Vec::kWidth) Vec::store(tile + i, Vec::load_half(from + i));
}

void store_half(void* target, const float* tile) {
  auto* to = static_cast<uint16_t*>(target);
  for (int i = 0; i < kBlock; i += Vec::kWidth) Vec::store_half(to + i, Vec::load(tile + i));
}

// `random_bits` of update_types.py, for the elements from `first` on.
inline I random_bits(uint32_t key, uint32_t first) {
  I x = Vec::iadd(Vec::imul(Vec::iadd(Vec::ints(first), Vec::lanes()), Vec::ints(0x9e3779b9u)), Vec::ints(key));
  x = Vec::imul(Vec::ixor(x, Vec::right<16>(x)), Vec::ints(0x85ebca6bu));
  x = Vec::imul(Vec::ixor(x, Vec::right<13>(x)), Vec::ints(0xc2b2ae35u));
  x = Vec::ixor(x, Vec::right<16>(x));
  return Vec::iand(x, Vec::ints(0xffffu));
}

void store_stochastic(void* target, const float* tile, uint32_t key, uint32_t first) {
  auto* to = static_cast<uint16_t*>(target);
  for (int i = 0; i < kBlock; i += 2 * Vec::kWidth) {
    const uint32_t low = first + static_cast<uint32_t>(i), high = low + Vec::kWidth;
    const I rounded = plus_bits(Vec::load(tile + i), random_bits(key, low));
    Vec::store_upper(to + i, rounded, plus_bits(Vec::load(tile + i + Vec::kWidth), random_bits(key, high)));
  }
}

void load_exact(const void* source, const void* remainders, float* tile) {
  const auto* from = static_cast<const uint16_t*>(source);
  const auto* rest = static_cast<const int16_t*>(remainders);
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    const I bits = Vec::iadd(Vec::left<16>(Vec::load_u16(from + i)), Vec::load_i16(rest + i));
    Vec::store(tile + i, Vec::from_bits(bits));
  }
}

void store_exact(void* target, void* remainders, const float* tile) {
  auto* to = static_cast<uint16_t*>(target);
  auto* rest = static_cast<int16_t*>(remainders);
  const I half = Vec::ints(0x8000u);
  for (int i = 0; i < kBlock; i += 2 * Vec::kWidth) {
    const I low = plus_bits(Vec::load(tile + i), Vec::ints(0));
    const I high = plus_bits(Vec::load(tile + i + Vec::kWidth), Vec::ints(0));
    Vec::store_upper(to + i, Vec::iadd(low, half), Vec::iadd(high, half));
    // The remainder's low 16 bits are those of the whole.
    Vec::store_lower(rest + i, low, high);
  }
}

// A division by a number whose reciprocal is at hand, rounded like the real one: that has the throughput of a dozen
// multiplications, and these are five. The first correction brings the quotient next to the true one, the second rounds it
// rightly (Markstein). Quotients and remainders must be normal numbers, or too small to matter.
inline F divide(F value, F divisor, F reciprocal) {
  F quotient = Vec::mul(value, reciprocal);
  quotient = Vec::fma(Vec::fnma(quotient, divisor, value), reciprocal, quotient);
  return Vec::fma(Vec::fnma(quotient, divisor, value), reciprocal, quotient);
}

inline F magnitude(F value) { return Vec::from_bits(Vec::iand(Vec::bits(value), Vec::ints(0x7fffffffu))); }

// From here on Note [8-bit blocks] in update_types.py.

void load_signed_block(const void* source, float scale, float* tile) {
  const auto* from = static_cast<const int8_t*>(source);
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    const F root = Vec::mul(Vec::to_float(Vec::load_i8(from + i)), Vec::broadcast(1.0f / 127.0f));
    Vec::store(tile + i, Vec::flushed(Vec::mul(Vec::mul(root, magnitude(root)), Vec::broadcast(scale))));
  }
}

void load_unsigned_block(const void* source, float scale, float* tile) {
  const auto* from = static_cast<const uint8_t*>(source);
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    const F root = Vec::mul(Vec::to_float(Vec::load_u8(from + i)), Vec::broadcast(1.0f / 255.0f));
    const F square = Vec::mul(root, root);
    Vec::store(tile + i, Vec::flushed(Vec::mul(Vec::mul(square, square), Vec::broadcast(scale))));
  }
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The scale of a tile: its largest magnitude. As integers, because a NaN is then larger than everything and is not lost.
inline float scale_of(const float* tile) {
  I largest = Vec::ints(0);
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    largest = Vec::imax(largest, Vec::bits(magnitude(Vec::load(tile + i))));
  }
  const float scale = float_of(Vec::largest(largest));
  if (scale >= 0x1p-124f && scale <= 3.4028234664e38f) return scale;
  return scale < 0x1p-124f ? 0.0f : float_of(kNan);
}

// A root in steps, one for each code. The lower bits of `origin` and some steps are the code: 2^23 steps leave no room for
// fractions.
struct Steps {
  explicit constexpr Steps(float step) : half(step / 2), origin(step * 0x1p23f) {}
  // The root half-way between a code and the next.
  F border(F code) const { return Vec::sub(code, Vec::broadcast(origin - half)); }
  I first_code() const { return Vec::iadd(Vec::bits(Vec::broadcast(origin)), Vec::ints(1)); }
  float half, origin;
};

// A fast root leads to the right code or the one before, and then to the next one if the share has reached the border to
// it: so the codes are those of the Note, whatever the root is. Half a step before `origin` the border is 0, and the next
// code is 0 too.
inline I signed_code(F value, F factor) {
  constexpr Steps kSteps(0x1p-5f);
  const F share = Vec::mul(magnitude(value), factor);
  const F code = Vec::root_steps(share, kSteps.origin, kSteps.half);
  const F border = kSteps.border(code);
  return Vec::negative_where(value, Vec::next_where(share, Vec::mul(border, border), Vec::bits(code)));
}

// 1 for all but zero: a second moment that reads as zero would let the next step explode.
inline I unsigned_code(F value, F factor) {
  constexpr Steps kSteps(0x1p-7f);
  const F share = Vec::mul(value, factor);
  const F code = Vec::fourth_root_steps(share, kSteps.origin, kSteps.half);
  const F border = kSteps.border(code);
  const F square = Vec::mul(border, border);
  const I nearest = Vec::next_where(share, Vec::mul(square, square), Vec::bits(code));
  return Vec::at_least_where(value, kSteps.first_code(), nearest);
}

// Where the scale is zero or NaN it says everything, and the codes are zeros.
void store_signed_block(void* target, float scale, const float* tile) {
  if (!(scale > 0.0f)) {
    std::memset(target, 0, kBlock);
    return;
  }
  auto* to = static_cast<int8_t*>(target);
  const F factor = Vec::broadcast(16129.0f * 0x1p-10f / scale);
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    Vec::store_8(to + i, signed_code(Vec::flushed(Vec::load(tile + i)), factor));
  }
}

void store_unsigned_block(void* target, float scale, const float* tile) {
  if (!(scale > 0.0f)) {
    std::memset(target, 0, kBlock);
    return;
  }
  auto* to = static_cast<uint8_t*>(target);
  const F factor = Vec::broadcast(4228250624.0f * 0x1p-28f / scale);
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    Vec::store_8(to + i, unsigned_code(Vec::flushed(Vec::load(tile + i)), factor));
  }
}

}  // namespace
