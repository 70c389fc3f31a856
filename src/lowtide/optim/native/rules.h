// The update rules on tiles of fp32 numbers, in the order of operations of torch's own single-tensor implementations.
//
// All instruction sets run the same operations with fma in the same places, and the build forbids the compiler to fuse
// others: so they agree bit for bit.
#pragma once

#include "abi.h"
#include "codecs.h"

namespace {

// One tile. Each pointer leads to a buffer, or into the piece itself where that is stored as fp32.
struct Tile {
  const float* gradient;
  float* weight;
  float* state[lowtide::kMaxStates];
};

inline void adam(const Tile& tile, const lowtide::Constants& constants, int32_t flags) {
  const F gradient_factor = Vec::broadcast(constants.gradient_factor);
  const F weight_factor = Vec::broadcast(constants.weight_factor);
  const F gradient_decay = Vec::broadcast(constants.gradient_decay);
  const F first_rate = Vec::broadcast(constants.first_rate);
  const F first_rest = Vec::broadcast(constants.first_rate - 1.0f);
  const F second_rate = Vec::broadcast(constants.second_rate);
  const F second_keep = Vec::broadcast(constants.second_keep);
  const F correction = Vec::broadcast(constants.correction);
  const F inverse_correction = Vec::broadcast(1.0f / constants.correction);
  const F epsilon = Vec::broadcast(constants.epsilon);
  const F negative_step = Vec::broadcast(-constants.step_size);
  const I magnitude = Vec::ints(0x7fffffffu);
  const bool adds_decay = constants.gradient_decay != 0.0f;
  const bool is_near = constants.first_rate < 0.5f;  // as torch's lerp: from the nearer end
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    F gradient = Vec::mul(Vec::load(tile.gradient + i), gradient_factor);
    F weight = Vec::load(tile.weight + i);
    // Without decay a product with 0 would make NaN of an infinite weight.
    if (adds_decay) gradient = Vec::fma(gradient_decay, weight, gradient);
    weight = Vec::mul(weight, weight_factor);
    F first = Vec::load(tile.state[0] + i);
    const F way = Vec::sub(gradient, first);
    first = is_near ? Vec::fma(first_rate, way, first) : Vec::fma(first_rest, way, gradient);
    Vec::store(tile.state[0] + i, first);
    F second = Vec::mul(Vec::load(tile.state[1] + i), second_keep);
    second = Vec::fma(Vec::mul(second_rate, gradient), gradient, second);
    Vec::store(tile.state[1] + i, second);
    if (flags & lowtide::kAmsgrad) {
      // Magnitudes compare as integers, and NaN is above all.
      const I before = Vec::iand(Vec::bits(Vec::load(tile.state[2] + i)), magnitude);
      second = Vec::from_bits(Vec::imax(before, Vec::iand(Vec::bits(second), magnitude)));
      Vec::store(tile.state[2] + i, second);
    }
    const F root = Vec::sqrt(second);
    const F corrected = divide(root, correction, inverse_correction);
    // The correction is at most 1, so this is the quotient, but for infinity: the remainder of its division is NaN.
    const F denominator = Vec::add(Vec::larger(corrected, root), epsilon);
    Vec::store(tile.weight + i, Vec::add(weight, Vec::div(Vec::mul(negative_step, first), denominator)));
  }
}

inline void sgd(const Tile& tile, const lowtide::Constants& constants, int32_t flags, bool has_momentum) {
  const F gradient_factor = Vec::broadcast(constants.gradient_factor);
  const F gradient_decay = Vec::broadcast(constants.gradient_decay);
  const F momentum = Vec::broadcast(constants.first_keep);
  const F rate = Vec::broadcast(constants.second_rate);
  const F negative_step = Vec::broadcast(-constants.step_size);
  const bool adds_decay = constants.gradient_decay != 0.0f;
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    F gradient = Vec::mul(Vec::load(tile.gradient + i), gradient_factor);
    const F weight = Vec::load(tile.weight + i);
    if (adds_decay) gradient = Vec::fma(gradient_decay, weight, gradient);
    if (has_momentum) {
      F buffer = gradient;
      if (!(flags & lowtide::kFirstStep)) {
        buffer = Vec::fma(rate, gradient, Vec::mul(Vec::load(tile.state[0] + i), momentum));
      }
      Vec::store(tile.state[0] + i, buffer);
      gradient = flags & lowtide::kNesterov ? Vec::fma(momentum, buffer, gradient) : buffer;
    }
    Vec::store(tile.weight + i, Vec::fma(negative_step, gradient, weight));
  }
}

inline void lion(const Tile& tile, const lowtide::Constants& constants) {
  const F gradient_factor = Vec::broadcast(constants.gradient_factor);
  const F weight_factor = Vec::broadcast(constants.weight_factor);
  const F first_rate = Vec::broadcast(constants.first_rate);
  const F first_rest = Vec::broadcast(constants.first_rate - 1.0f);
  const F second_rate = Vec::broadcast(constants.second_rate);
  const F second_rest = Vec::broadcast(constants.second_rate - 1.0f);
  const F step_size = Vec::broadcast(constants.step_size);
  const bool is_first_near = constants.first_rate < 0.5f;
  const bool is_second_near = constants.second_rate < 0.5f;
  for (int i = 0; i < kBlock; i += Vec::kWidth) {
    const F gradient = Vec::mul(Vec::load(tile.gradient + i), gradient_factor);
    const F first = Vec::load(tile.state[0] + i);
    const F way = Vec::sub(gradient, first);
    const F mixed = is_first_near ? Vec::fma(first_rate, way, first) : Vec::fma(first_rest, way, gradient);
    const F weight = Vec::mul(Vec::load(tile.weight + i), weight_factor);
    Vec::store(tile.weight + i, Vec::sub(weight, Vec::signed_size(mixed, step_size)));
    const F kept = is_second_near ? Vec::fma(second_rate, way, first) : Vec::fma(second_rest, way, gradient);
    Vec::store(tile.state[0] + i, kept);
  }
}

}  // namespace
