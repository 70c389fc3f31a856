// The update in plain C++, for machines without the instruction sets of the other two.
#include "simd_plain.h"
// After the vectors, which it is written in.
#include "slice.h"

namespace lowtide {
SliceFunction slice_plain() { return update_slice; }
}  // namespace lowtide
