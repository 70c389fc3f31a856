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

// The bits of the nearest bf16, ties to even, in the lower half.
inline I nearest_bfloat(F value) {
  const I bits = Vec::bits(value);
  const I odd = Vec::iand(Vec::right<16>(bits), Vec::ints(1));
  const I rounded = Vec::right<16>(Vec::iadd(bits, Vec::iadd(odd, Vec::ints(0x7fff))));
  return Vec::where_nan(value, Vec::ints(kNan >> 16), rounded);
}

inline F from_bfloat(I half) { return Vec::from_bits(Vec::left<16>(half)); }

void load_bfloat(const void* source, float* tile) {
  const auto* from = static_cast<const uint16_t*>(source);
  for (int i = 0; i < kBlock; i += Vec::kWidth) Vec::store(tile + i, from_bfloat(Vec::load_u16(from + i)));
}

void store_bfloat(void* target, const float* tile) {
  auto* to = static_cast<uint16_t*>(target);
  for (int i = 0; i < kBlock; i += Vec::kWidth) Vec::store_16(to + i, nearest_bfloat(Vec::load(tile + i)));
}

// Past the caches, to an address that is a multiple of 64: for weights that the update does not read, while a usual store
// reads the line first. On one core the whole update is 9% faster with fp32 moments, and as fast as before with 8-bit ones.
void stream_bfloat(void* target, const float* tile) {
  auto* to = static_cast<uint16_t*>(target);
  for (int i = 0; i < kBlock; i += 2 * Vec::kWidth) {
    const I low = nearest_bfloat(Vec::load(tile + i));
    Vec::stream_16(to + i, low, nearest_bfloat(Vec::load(tile + i + Vec::kWidth)));
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
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    const F value = Vec::load(tile + i);
    const I sum = Vec::iadd(Vec::bits(value), random_bits(key, first + static_cast<uint32_t>(i)));
    Vec::store_16(to + i, Vec::where_nan(value, Vec::ints(kNan >> 16), Vec::right<16>(sum)));
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
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    const F value = Vec::load(tile + i);
    const I bits = Vec::where_nan(value, Vec::ints(kNan), Vec::bits(value));
    // The remainder's low 16 bits are those of the whole: what is stored is cut to them anyway.
    Vec::store_16(to + i, Vec::right<16>(Vec::iadd(bits, Vec::ints(0x8000u))));
    Vec::store_16(rest + i, bits);
  }
}

constexpr float kSignedCode = 127.0f;
constexpr float kUnsignedCode = 255.0f;

inline F negative(F value) { return Vec::from_bits(Vec::ixor(Vec::bits(value), Vec::ints(0x80000000u))); }

// A division by a number whose reciprocal is at hand, rounded like the real one: that has the throughput of a dozen
// multiplications, and these are five. The first correction brings the quotient next to the true one, the second rounds it
// rightly (Markstein). Quotients and remainders must be normal numbers, or too small to matter.
inline F divide(F value, F divisor, F reciprocal) {
  F quotient = Vec::mul(value, reciprocal);
  quotient = Vec::fma(Vec::fma(negative(quotient), divisor, value), reciprocal, quotient);
  return Vec::fma(Vec::fma(negative(quotient), divisor, value), reciprocal, quotient);
}

inline F magnitude(F value) { return Vec::from_bits(Vec::iand(Vec::bits(value), Vec::ints(0x7fffffffu))); }

void load_signed_block(const void* source, float scale, float* tile) {
  const auto* from = static_cast<const int8_t*>(source);
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    const F code = Vec::to_float(Vec::load_i8(from + i));
    const F root = divide(code, Vec::broadcast(kSignedCode), Vec::broadcast(1.0f / kSignedCode));
    Vec::store(tile + i, Vec::mul(Vec::mul(root, magnitude(root)), Vec::broadcast(scale)));
  }
}

void load_unsigned_block(const void* source, float scale, float* tile) {
  const auto* from = static_cast<const uint8_t*>(source);
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    const F code = Vec::to_float(Vec::load_u8(from + i));
    const F root = divide(code, Vec::broadcast(kUnsignedCode), Vec::broadcast(1.0f / kUnsignedCode));
    const F square = Vec::mul(root, root);
    Vec::store(tile + i, Vec::mul(Vec::mul(square, square), Vec::broadcast(scale)));
  }
}

// The largest magnitude of a tile. As integers, because a NaN is then larger than everything and is not lost.
inline float largest_magnitude(const float* tile) {
  I largest = Vec::ints(0);
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    largest = Vec::imax(largest, Vec::iand(Vec::bits(Vec::load(tile + i)), Vec::ints(0x7fffffffu)));
  }
  const uint32_t bits = Vec::largest(largest);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// What the elements of a block are divided by. The reciprocal of a very small or large scale is not a normal number: then
// both sides of the division are first multiplied by a power of two.
struct Divisor {
  explicit Divisor(float scale) {
    constexpr float kLarge = 0x1p64f, kSmall = 0x1p-64f;
    const float factor = scale < kSmall ? kLarge : (scale > kLarge ? kSmall : 1.0f);
    shift = Vec::broadcast(factor);
    divisor = Vec::broadcast(scale * factor);
    reciprocal = Vec::broadcast(1.0f / (scale * factor));
  }
  F share(F size) const { return divide(Vec::mul(size, shift), divisor, reciprocal); }
  F shift, divisor, reciprocal;
};

// Writes the scale of a tile. False where no codes describe it: a block of zeros, or one that holds NaN or infinity, whose
// scale NaN makes all of it NaN when it is read. Its codes are zeros then.
inline bool store_scale(const float* tile, void* target, float* scale) {
  *scale = largest_magnitude(tile);
  if (*scale > 0.0f && *scale <= 3.4028234664e38f) return true;
  if (*scale != 0.0f) std::memcpy(scale, &kNan, 4);
  std::memset(target, 0, kBlock);
  return false;
}

void store_signed_block(void* target, float* scale, const float* tile) {
  if (!store_scale(tile, target, scale)) return;
  const Divisor divisor(*scale);
  auto* to = static_cast<int8_t*>(target);
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    const F value = Vec::load(tile + i);
    const F code = Vec::mul(Vec::sqrt(divisor.share(magnitude(value))), Vec::broadcast(kSignedCode));
    const I sign = Vec::iand(Vec::bits(value), Vec::ints(0x80000000u));
    Vec::store_8(to + i, Vec::to_int(Vec::from_bits(Vec::ior(Vec::bits(code), sign))));
  }
}

void store_unsigned_block(void* target, float* scale, const float* tile) {
  if (!store_scale(tile, target, scale)) return;
  const Divisor divisor(*scale);
  auto* to = static_cast<uint8_t*>(target);
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    const F value = magnitude(Vec::load(tile + i));
    const F code = Vec::mul(Vec::sqrt(Vec::sqrt(divisor.share(value))), Vec::broadcast(kUnsignedCode));
    // 1 for all but zero: a second moment that reads as zero would let the next step explode.
    const I least = Vec::right<31>(Vec::isub(Vec::ints(0), Vec::bits(value)));
    Vec::store_8(to + i, Vec::imax(Vec::to_int(code), least));
  }
}

}  // namespace
