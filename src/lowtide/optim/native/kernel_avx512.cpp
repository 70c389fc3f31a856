// The update with AVX-512. Built with the compiler's flags for them, and called only where the processor has them.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "simd_avx512.h"
// After the vectors, which it is written in.
#include "slice.h"

namespace lowtide {
SliceFunction slice_avx512() { return update_slice; }
}  // namespace lowtide
#else
#include "abi.h"

namespace lowtide {
SliceFunction slice_avx512() { return nullptr; }
}  // namespace lowtide
#endif
