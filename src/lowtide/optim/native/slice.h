// A slice of a piece, tile by tile: read, update, write. Included last by the source file of each instruction set.
//
// Everything is in anonymous namespaces and no templates of the standard library are used: a function that two of these
// files share would be linked once, compiled for whichever instruction set comes first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "abi.h"
#include "codecs.h"
#include "rules.h"

namespace {

using lowtide::GradientFormat;
using lowtide::Piece;
using lowtide::StateFormat;
using lowtide::WeightFormat;

inline int64_t weight_bytes(WeightFormat format) { return format == WeightFormat::kFloat ? 4 : 2; }

inline int64_t extra_bytes(WeightFormat format) {
  if (format == WeightFormat::kBfloatExact) return 2;
  return format == WeightFormat::kBfloatMaster || format == WeightFormat::kHalfMaster ? 4 : 0;
}

inline int64_t gradient_bytes(GradientFormat format) { return format == GradientFormat::kFloat ? 4 : 2; }

inline int64_t state_bytes(StateFormat format) {
  return format == StateFormat::kFloat ? 4 : (format == StateFormat::kBfloat ? 2 : 1);
}

// Where the parts of one tile are stored.
struct Stored {
  char* weight;
  const char* gradient;
  char* extra;
  char* state[lowtide::kMaxStates];
  float* scale[lowtide::kMaxStates];
};

inline Stored stored_at(const Piece& piece, int64_t element) {
  Stored stored{};
  stored.weight = static_cast<char*>(piece.weight) + element * weight_bytes(piece.weight_format);
  stored.gradient = static_cast<const char*>(piece.gradient) + element * gradient_bytes(piece.gradient_format);
  const int64_t extra = extra_bytes(piece.weight_format);
  if (extra != 0) stored.extra = static_cast<char*>(piece.extra) + element * extra;
  for (int s = 0; s < piece.num_states; ++s) {
    stored.state[s] = static_cast<char*>(piece.state[s]) + element * state_bytes(piece.state_format);
    if (piece.state_format == StateFormat::kBlocks) stored.scale[s] = piece.scale[s] + element / kBlock;
  }
  return stored;
}

// Second moments are unsigned: those are Adam's states after the first.
inline bool is_unsigned(const Piece& piece, int state) { return piece.rule == lowtide::Rule::kAdam && state > 0; }

inline void load_weight(const Piece& piece, const Stored& stored, float* buffer, Tile& tile) {
  tile.weight = buffer;
  switch (piece.weight_format) {
    case WeightFormat::kFloat: tile.weight = reinterpret_cast<float*>(stored.weight); break;
    case WeightFormat::kBfloatMaster:
    case WeightFormat::kHalfMaster: tile.weight = reinterpret_cast<float*>(stored.extra); break;
    case WeightFormat::kBfloatNearest:
    case WeightFormat::kBfloatStochastic: load_bfloat(stored.weight, buffer); break;
    case WeightFormat::kHalfNearest: load_half(stored.weight, buffer); break;
    case WeightFormat::kBfloatExact: load_exact(stored.weight, stored.extra, buffer); break;
  }
}

inline void store_weight(const Piece& piece, const Stored& stored, int64_t element, const Tile& tile) {
  switch (piece.weight_format) {
    case WeightFormat::kFloat: break;
    case WeightFormat::kBfloatMaster:
      if (reinterpret_cast<uintptr_t>(stored.weight) % 64 == 0) {
        stream_bfloat(stored.weight, tile.weight);
      } else {
        store_bfloat(stored.weight, tile.weight);
      }
      break;
    case WeightFormat::kBfloatNearest: store_bfloat(stored.weight, tile.weight); break;
    case WeightFormat::kHalfMaster:
    case WeightFormat::kHalfNearest: store_half(stored.weight, tile.weight); break;
    case WeightFormat::kBfloatExact: store_exact(stored.weight, stored.extra, tile.weight); break;
    case WeightFormat::kBfloatStochastic:
      store_stochastic(stored.weight, tile.weight, piece.key, piece.first_element + static_cast<uint32_t>(element));
      break;
  }
}

inline void load_gradient(const Piece& piece, const Stored& stored, float* buffer, Tile& tile) {
  tile.gradient = buffer;
  switch (piece.gradient_format) {
    case GradientFormat::kFloat: tile.gradient = reinterpret_cast<const float*>(stored.gradient); break;
    case GradientFormat::kBfloat: load_bfloat(stored.gradient, buffer); break;
    case GradientFormat::kHalf: load_half(stored.gradient, buffer); break;
  }
}

inline void load_state(const Piece& piece, const Stored& stored, int s, float* buffer, Tile& tile) {
  tile.state[s] = buffer;
  switch (piece.state_format) {
    case StateFormat::kFloat: tile.state[s] = reinterpret_cast<float*>(stored.state[s]); break;
    case StateFormat::kBfloat: load_bfloat(stored.state[s], buffer); break;
    case StateFormat::kBlocks:
      if (is_unsigned(piece, s)) {
        load_unsigned_block(stored.state[s], *stored.scale[s], buffer);
      } else {
        load_signed_block(stored.state[s], *stored.scale[s], buffer);
      }
      break;
  }
}

inline void store_scale(const Piece& piece, const Stored& stored, int s, const Tile& tile) {
  if (piece.state_format == StateFormat::kBlocks) *stored.scale[s] = scale_of(tile.state[s]);
}

inline void store_state(const Piece& piece, const Stored& stored, int s, const Tile& tile) {
  switch (piece.state_format) {
    case StateFormat::kFloat: break;
    case StateFormat::kBfloat: store_bfloat(stored.state[s], tile.state[s]); break;
    case StateFormat::kBlocks:
      if (is_unsigned(piece, s)) {
        store_unsigned_block(stored.state[s], *stored.scale[s], tile.state[s]);
      } else {
        store_signed_block(stored.state[s], *stored.scale[s], tile.state[s]);
      }
      break;
  }
}

struct Buffers {
  alignas(64) float gradient[kBlock];
  alignas(64) float weight[kBlock];
  alignas(64) float state[lowtide::kMaxStates][kBlock];
};

inline void update_tile(const Piece& piece, const Stored& stored, int64_t element, Buffers& buffers) {
  Tile tile{};
  load_gradient(piece, stored, buffers.gradient, tile);
  load_weight(piece, stored, buffers.weight, tile);
  for (int s = 0; s < piece.num_states; ++s) load_state(piece, stored, s, buffers.state[s], tile);
  switch (piece.rule) {
    case lowtide::Rule::kAdam: adam(tile, piece.constants, piece.flags); break;
    case lowtide::Rule::kSgd: sgd(tile, piece.constants, piece.flags, piece.num_states > 0); break;
    case lowtide::Rule::kLion: lion(tile, piece.constants); break;
  }
  // A scale is long in coming, and all codes wait for it: the weights are stored meanwhile.
  for (int s = 0; s < piece.num_states; ++s) store_scale(piece, stored, s, tile);
  store_weight(piece, stored, element, tile);
  for (int s = 0; s < piece.num_states; ++s) store_state(piece, stored, s, tile);
}

// The last tile of a piece may be short. It is worked on in full, in a copy that is filled up with zeros: so there is no
// second version of the arithmetic, and a zero never changes the scale of a block.
void update_short_tile(const Piece& piece, const Stored& stored, int64_t element, int64_t length, Buffers& buffers) {
  alignas(64) char parts[3 + lowtide::kMaxStates][kBlock * 4];
  std::memset(parts, 0, sizeof parts);
  Stored copy = stored;
  const size_t count = static_cast<size_t>(length);
  const size_t weight = count * static_cast<size_t>(weight_bytes(piece.weight_format));
  const size_t gradient = count * static_cast<size_t>(gradient_bytes(piece.gradient_format));
  const size_t extra = count * static_cast<size_t>(extra_bytes(piece.weight_format));
  const size_t state = count * static_cast<size_t>(state_bytes(piece.state_format));
  std::memcpy(parts[0], stored.weight, weight);
  std::memcpy(parts[1], stored.gradient, gradient);
  if (extra != 0) std::memcpy(parts[2], stored.extra, extra);
  for (int s = 0; s < piece.num_states; ++s) std::memcpy(parts[3 + s], stored.state[s], state);
  copy.weight = parts[0];
  copy.gradient = parts[1];
  copy.extra = parts[2];
  for (int s = 0; s < piece.num_states; ++s) copy.state[s] = parts[3 + s];
  update_tile(piece, copy, element, buffers);
  std::memcpy(stored.weight, parts[0], weight);
  if (extra != 0) std::memcpy(stored.extra, parts[2], extra);
  for (int s = 0; s < piece.num_states; ++s) std::memcpy(stored.state[s], parts[3 + s], state);
}

// For as long as it lives, numbers below 1.2e-38 count as zero, and results round to nearest. A moment whose gradient is
// zero shrinks until it is that small and then stays there: in the rows of an embedding that are rarely used, for one. On
// Intel every operation on such a number takes some hundred cycles: 17 to 35 times as long for the whole update, as
// measured. ARM has no such penalty, and keeps them.
class FlushTiny {
 public:
#if defined(__SSE2__)
  FlushTiny() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0u); }
  ~FlushTiny() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

// Prefetching four tiles ahead made no difference on one core, with small pages or large ones.
//
// By itself, so that no arithmetic is moved to before or after the setting above.
__attribute__((noinline)) void update_tiles(const Piece& piece, int64_t begin, int64_t end) {
  Buffers buffers;
  for (int64_t element = begin; element < end; element += kBlock) {
    const Stored stored = stored_at(piece, element);
    if (element + kBlock <= end) {
      update_tile(piece, stored, element, buffers);
    } else {
      update_short_tile(piece, stored, element, end - element, buffers);
    }
  }
}

void update_slice(const Piece& piece, int64_t begin, int64_t end) {
  const FlushTiny flush;
  update_tiles(piece, begin, end);
  Vec::end_streams();
}

}  // namespace
