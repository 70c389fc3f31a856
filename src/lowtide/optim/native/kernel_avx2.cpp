// The update with AVX2, FMA and F16C. Built with the compiler's flags for them, and called only where the processor has them.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
// After the vectors, which it is written in.
#include "slice.h"

namespace lowtide {
SliceFunction slice_avx2() { return update_slice; }
}  // namespace lowtide
#else
#include "abi.h"

namespace lowtide {
SliceFunction slice_avx2() { return nullptr; }
}  // namespace lowtide
#endif
