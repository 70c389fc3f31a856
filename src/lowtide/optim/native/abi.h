// What crosses the border to Python: one struct for each piece, and the functions of update.cpp and threads.cpp.
//
// The order and sizes of the fields are repeated in host_pieces.py; `lowtide_piece_bytes` guards against a drift.
#pragma once

#include <cstdint>

namespace lowtide {

constexpr int kBlock = 128;  // elements of a tile, and those that share a scale in the 8-bit format
constexpr int kMaxStates = 3;

enum class Rule : int32_t { kAdam = 0, kSgd = 1, kLion = 2 };

// Where the fp32 value of a weight is kept, and what is written back.
enum class WeightFormat : int32_t {
  kFloat = 0,
  kBfloatNearest = 1,
  kHalfNearest = 2,
  kBfloatStochastic = 3,
  kBfloatExact = 4,   // extra: int16 remainders
  kBfloatMaster = 5,  // extra: fp32 masters
  kHalfMaster = 6,    // extra: fp32 masters
};

enum class GradientFormat : int32_t { kFloat = 0, kBfloat = 1, kHalf = 2 };

enum class StateFormat : int32_t { kFloat = 0, kBfloat = 1, kBlocks = 2 };

enum Flags : int32_t {
  kAmsgrad = 1,
  kNesterov = 2,
  kFirstStep = 4,  // SGD: the gradient becomes the momentum, and what is in the buffer is not read
};

// Computed in double by the caller, as torch does, and rounded once.
struct Constants {
  float gradient_factor;  // unscaling, clipping and the sign of `maximize` in one
  float weight_factor;  // decoupled decay: 1 - lr * weight_decay
  float gradient_decay;  // decay that is added to the gradient
  float first_rate;  // Adam, Lion: 1 - beta1
  float first_keep;  // SGD: momentum
  float second_rate;  // Adam: 1 - beta2; SGD: 1 - dampening; Lion: 1 - beta2
  float second_keep;  // Adam: beta2
  float correction;  // Adam: sqrt(1 - beta2 ^ step)
  float epsilon;
  float step_size;  // Adam: lr / (1 - beta1 ^ step); others: lr
};

struct Piece {
  void* weight;
  const void* gradient;
  void* extra;
  void* state[kMaxStates];
  float* scale[kMaxStates];
  int64_t num_elements;
  uint32_t key;
  uint32_t first_element;  // the lower 32 bits: the hash sees no more
  Rule rule;
  WeightFormat weight_format;
  GradientFormat gradient_format;
  StateFormat state_format;
  int32_t num_states;
  int32_t flags;
  Constants constants;
};

// Updates the elements from `begin` (a multiple of kBlock) up to `end` of a piece.
using SliceFunction = void (*)(const Piece& piece, int64_t begin, int64_t end);

// One for each instruction set; null where the compiler has not made it.
SliceFunction slice_plain();
SliceFunction slice_avx2();
SliceFunction slice_avx512();

}  // namespace lowtide
