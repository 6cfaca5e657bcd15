#pragma once
#include <cstdint>

#include "cpu.h"
#include "problem.h"

namespace moeffn {

enum class Score : int { softmax = 0, sigmoid = 1 };

struct Router {
  int64_t E = 0, K = 1;
  Score score = Score::softmax;
  bool score_selected = false;      // top-k of the logits, then score those; else score all, then top-k
  bool renormalize = false;
  float renorm_eps = 0.0f;          // added to the sum
  float scale = 1.0f;
  const float* selection_bias = nullptr;  // (E,): added to what is ranked, never to the weights
};

// x · wᵀ + b: what the router of few tokens ranks.
void logits(const Scores& s, Isa isa);

// logits (T, E) -> experts (T, K) distinct ids in [0, E), weights (T, K). Ties go to the lowest id; NaN ranks last.
void route(const Router& r, const float* logits, int64_t T, int32_t* experts, float* weights);

}  // namespace moeffn
