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

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static F broadcast(float a) { return _mm512_set1_ps(a); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }
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
  static I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I iand(I a, I b) { return _mm512_and_si512(a, b); }
  static I ior(I a, I b) { return _mm512_or_si512(a, b); }
  static I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
  static I imax(I a, I b) { return _mm512_max_epi32(a, b); }
  template <int kShift> static I left(I a) { return _mm512_slli_epi32(a, kShift); }
  template <int kShift> static I right(I a) { return _mm512_srli_epi32(a, kShift); }
  static I where_nan(F test, I yes, I no) {
    return _mm512_mask_mov_epi32(no, _mm512_cmp_ps_mask(test, test, _CMP_UNORD_Q), yes);
  }
  static uint32_t largest(I a) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(a)); }

  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static I to_int(F a) { return _mm512_cvtps_epi32(a); }

  static __m256i raw_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static __m128i raw_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static I load_u16(const uint16_t* p) { return _mm512_cvtepu16_epi32(raw_256(p)); }
  static I load_i16(const int16_t* p) { return _mm512_cvtepi16_epi32(raw_256(p)); }
  static void store_16(void* p, I a) { _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a)); }
  static void stream_16(void* p, I low, I high) {
    const I first = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(low));
    _mm512_stream_si512(static_cast<__m512i*>(p), _mm512_inserti64x4(first, _mm512_cvtepi32_epi16(high), 1));
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
