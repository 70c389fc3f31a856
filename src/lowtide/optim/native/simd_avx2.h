// Vectors of eight floats: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct Vec {
  static constexpr int kWidth = 8;
  using F = __m256;
  using I = __m256i;

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  static F broadcast(float a) { return _mm256_set1_ps(a); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  static F larger(F a, F b) { return _mm256_max_ps(a, b); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F flushed(F a) { return a; }
  // Zero by infinity is the processor's own NaN. Its lower bits are zero: the code of zero.
  static F root_steps(F a, float origin, float half) {
    return add(fma(a, _mm256_rsqrt_ps(a), broadcast(-half)), broadcast(origin));
  }
  static F fourth_root_steps(F a, float origin, float half) {
    return add(sub(_mm256_rsqrt_ps(_mm256_rsqrt_ps(a)), broadcast(half)), broadcast(origin));
  }
  static F signed_size(F a, F size) {
    const F zero = _mm256_setzero_ps();
    const F positive = _mm256_blendv_ps(a, size, _mm256_cmp_ps(a, zero, _CMP_GT_OQ));
    return _mm256_blendv_ps(positive, _mm256_sub_ps(zero, size), _mm256_cmp_ps(a, zero, _CMP_LT_OQ));
  }

  static I bits(F a) { return _mm256_castps_si256(a); }
  static F from_bits(I a) { return _mm256_castsi256_ps(a); }
  static I ints(uint32_t a) { return _mm256_set1_epi32(static_cast<int>(a)); }
  static I lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
  static I imul(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static I iand(I a, I b) { return _mm256_and_si256(a, b); }
  static I ixor(I a, I b) { return _mm256_xor_si256(a, b); }
  static I imax(I a, I b) { return _mm256_max_epi32(a, b); }
  template <int kShift> static I left(I a) { return _mm256_slli_epi32(a, kShift); }
  template <int kShift> static I right(I a) { return _mm256_srli_epi32(a, kShift); }
  static I where_nan(F test, I yes, I no) {
    return _mm256_blendv_epi8(no, yes, _mm256_castps_si256(_mm256_cmp_ps(test, test, _CMP_UNORD_Q)));
  }
  static I next_where(F value, F border, I a) {
    return _mm256_sub_epi32(a, bits(_mm256_cmp_ps(value, border, _CMP_GE_OQ)));
  }
  static I negative_where(F value, I a) { return _mm256_sign_epi32(a, _mm256_or_si256(bits(value), ints(1))); }
  static I at_least_where(F value, I least, I a) {
    return imax(a, _mm256_andnot_si256(_mm256_cmpeq_epi32(bits(value), _mm256_setzero_si256()), least));
  }
  static uint32_t largest(I a) {
    __m128i r = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    r = _mm_max_epi32(r, _mm_shuffle_epi32(r, 0x4e));
    r = _mm_max_epi32(r, _mm_shuffle_epi32(r, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(r));
  }

  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }

  static __m128i raw_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m128i raw_64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
  static I load_u16(const uint16_t* p) { return _mm256_cvtepu16_epi32(raw_128(p)); }
  static I load_i16(const int16_t* p) { return _mm256_cvtepi16_epi32(raw_128(p)); }
  // The pack saturates unsigned values: what lies above 16 bits has to go first.
  static I packed(I low, I high) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8); }
  static void store_upper(void* p, I low, I high) {
    _mm256_storeu_si256(static_cast<I*>(p), packed(right<16>(low), right<16>(high)));
  }
  static void stream_upper(void* p, I low, I high) {
    _mm256_stream_si256(static_cast<I*>(p), packed(right<16>(low), right<16>(high)));
  }
  static void store_lower(void* p, I low, I high) {
    _mm256_storeu_si256(static_cast<I*>(p), packed(iand(low, ints(0xffff)), iand(high, ints(0xffff))));
  }
  static void end_streams() { _mm_sfence(); }
  static I load_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(raw_64(p)); }
  static I load_i8(const int8_t* p) { return _mm256_cvtepi8_epi32(raw_64(p)); }
  static void store_8(void* p, I a) {
    const I low = _mm256_and_si256(a, _mm256_set1_epi32(0xff));
    const I words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0xd8);
    const __m128i words_low = _mm256_castsi256_si128(words);
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packus_epi16(words_low, words_low));
  }
  static F load_half(const uint16_t* p) { return _mm256_cvtph_ps(raw_128(p)); }
  static void store_half(uint16_t* p, F a) {
    const __m128i halves = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
  }
};

}  // namespace
