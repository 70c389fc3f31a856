// Vectors of sixteen floats: AVX-512 F, BW, DQ and VL. Conversions to bf16 are integer arithmetic elsewhere, so that no
// newer extension is needed.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct Vec {
  static constexpr int kWidth = 16;
  using F = __m512;
  using I = __m512i;
  static constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static F broadcast(float a) { return _mm512_set1_ps(a); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static F larger(F a, F b) { return _mm512_max_ps(a, b); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static F flushed(F a) { return a; }
  // Zero by infinity is the processor's own NaN. Its lower bits are zero: the code of zero.
  static F root_steps(F a, float origin, float) {
    return _mm512_fmadd_round_ps(a, _mm512_rsqrt14_ps(a), _mm512_set1_ps(origin), kDown);
  }
  static F fourth_root_steps(F a, float origin, float) {
    return _mm512_add_round_ps(_mm512_rsqrt14_ps(_mm512_rsqrt14_ps(a)), _mm512_set1_ps(origin), kDown);
  }
  static F signed_size(F a, F size) {
    const F zero = _mm512_setzero_ps();
    const F positive = _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, zero, _CMP_GT_OQ), size);
    return _mm512_mask_sub_ps(positive, _mm512_cmp_ps_mask(a, zero, _CMP_LT_OQ), zero, size);
  }

  static I bits(F a) { return _mm512_castps_si512(a); }
  static F from_bits(I a) { return _mm512_castsi512_ps(a); }
  static I ints(uint32_t a) { return _mm512_set1_epi32(static_cast<int>(a)); }
  static I lanes() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
  static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I iand(I a, I b) { return _mm512_and_si512(a, b); }
  static I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
  static I imax(I a, I b) { return _mm512_max_epi32(a, b); }
  template <int kShift> static I left(I a) { return _mm512_slli_epi32(a, kShift); }
  template <int kShift> static I right(I a) { return _mm512_srli_epi32(a, kShift); }
  static I where_nan(F test, I yes, I no) {
    return _mm512_mask_mov_epi32(no, _mm512_cmp_ps_mask(test, test, _CMP_UNORD_Q), yes);
  }
  static I next_where(F value, F border, I a) {
    return _mm512_mask_add_epi32(a, _mm512_cmp_ps_mask(value, border, _CMP_GE_OQ), a, ints(1));
  }
  static I negative_where(F value, I a) {
    return _mm512_mask_sub_epi32(a, _mm512_movepi32_mask(bits(value)), _mm512_setzero_si512(), a);
  }
  static I at_least_where(F value, I least, I a) {
    return _mm512_mask_max_epi32(a, _mm512_test_epi32_mask(bits(value), bits(value)), a, least);
  }
  static uint32_t largest(I a) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(a)); }

  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }

  static __m256i raw_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static __m128i raw_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static I load_u16(const uint16_t* p) { return _mm512_cvtepu16_epi32(raw_256(p)); }
  static I load_i16(const int16_t* p) { return _mm512_cvtepi16_epi32(raw_256(p)); }
  // Halves of one vector in the even places and of another in the odd ones, brought to their order: half the work of
  // cutting each vector by itself.
  static I in_order(I halves) {
    const I even = _mm512_setr_epi32(0x20000, 0x60004, 0xa0008, 0xe000c, 0x120010, 0x160014, 0x1a0018, 0x1e001c, 0x30001,
                                     0x70005, 0xb0009, 0xf000d, 0x130011, 0x170015, 0x1b0019, 0x1f001d);
    return _mm512_permutexvar_epi16(even, halves);
  }
  static I upper(I low, I high) { return in_order(_mm512_mask_mov_epi16(right<16>(low), 0xaaaaaaaau, high)); }
  static void store_upper(void* p, I low, I high) { _mm512_storeu_si512(p, upper(low, high)); }
  static void stream_upper(void* p, I low, I high) { _mm512_stream_si512(static_cast<I*>(p), upper(low, high)); }
  static void store_lower(void* p, I low, I high) {
    _mm512_storeu_si512(p, in_order(_mm512_mask_mov_epi16(low, 0xaaaaaaaau, left<16>(high))));
  }
  static void end_streams() { _mm_sfence(); }
  static I load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(raw_128(p)); }
  static I load_i8(const int8_t* p) { return _mm512_cvtepi8_epi32(raw_128(p)); }
  static void store_8(void* p, I a) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
  static F load_half(const uint16_t* p) { return _mm512_cvtph_ps(raw_256(p)); }
  static void store_half(uint16_t* p, F a) {
    const __m256i halves = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
  }
};

}  // namespace
