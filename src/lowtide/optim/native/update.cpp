// The entry: cuts pieces into slices, chooses the instruction set, and hands the slices to the threads.
#include <cstdint>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "abi.h"
#include "threads.h"

namespace lowtide {
namespace {

constexpr int64_t kSlice = 64 * 1024;  // elements: large against handing it out, small against a piece

struct Slice {
  const Piece* piece;
  int64_t begin;
  int64_t end;
};

#if defined(__x86_64__)
// Older compilers cannot ask for this one by name. That the system saves the registers follows from AVX2.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

enum Isa { kBest = 0, kPlain = 1, kAvx2 = 2, kAvx512 = 3 };

SliceFunction find(int isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  SliceFunction avx512 = has_avx512 ? slice_avx512() : nullptr;
  SliceFunction avx2 = has_avx2 ? slice_avx2() : nullptr;
#else
  SliceFunction avx512 = nullptr;
  SliceFunction avx2 = nullptr;
#endif
  if (isa == kAvx512) return avx512;
  if (isa == kAvx2) return avx2;
  if (isa == kPlain) return slice_plain();
  if (isa != kBest) return nullptr;
  return avx512 != nullptr ? avx512 : (avx2 != nullptr ? avx2 : slice_plain());
}

}  // namespace
}  // namespace lowtide

extern "C" {

__attribute__((visibility("default"))) int64_t lowtide_piece_bytes() { return sizeof(lowtide::Piece); }

// Of the sources that this was built from: a library that was left behind by older ones is not used.
__attribute__((visibility("default"))) const char* lowtide_source_hash() { return LOWTIDE_SOURCE_HASH; }

// Whether the update can run with this instruction set here.
__attribute__((visibility("default"))) int lowtide_has_isa(int isa) { return lowtide::find(isa) != nullptr; }

// Updates all pieces in place. Returns 0, or 1 where the instruction set is not there. What is written depends neither on
// the number of threads nor on the cut into slices.
__attribute__((visibility("default"))) int lowtide_update(const lowtide::Piece* pieces, int64_t num_pieces,
                                                          int num_threads, int isa) {
  using namespace lowtide;
  const SliceFunction update = find(isa);
  if (update == nullptr) return 1;
  std::vector<Slice> slices;
  std::vector<size_t> tasks;  // the first slice of each: small pieces are handed out together
  int64_t in_task = kSlice;
  for (int64_t p = 0; p < num_pieces; ++p) {
    const int64_t total = pieces[p].num_elements;
    for (int64_t begin = 0; begin < total; begin += kSlice) {
      const int64_t end = begin + kSlice < total ? begin + kSlice : total;
      if (in_task + (end - begin) > kSlice) {
        tasks.push_back(slices.size());
        in_task = 0;
      }
      in_task += end - begin;
      slices.push_back({pieces + p, begin, end});
    }
  }
  const int64_t num_tasks = static_cast<int64_t>(tasks.size());
  tasks.push_back(slices.size());
  run_tasks(num_threads, num_tasks, [&](int64_t number) {
    const size_t index = static_cast<size_t>(number);
    for (size_t s = tasks[index]; s < tasks[index + 1]; ++s) update(*slices[s].piece, slices[s].begin, slices[s].end);
  });
  return 0;
}
}
