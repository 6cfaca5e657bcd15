#include "route.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "scratch.h"
#include "threads.h"

namespace moeffn {
namespace {

constexpr float kNormFloor = 1e-30f;  // a row of zeros stays zero
constexpr int64_t kParallelScores = 1 << 14;  // below, a region costs more than it saves

struct Ranked {
  float key;
  int32_t id;
};

// NaN and -Inf are read as -1e30, +Inf as 1e30, as moeffn.route does.
float bounded(float l) { return l == l ? std::min(std::max(l, -1e30f), 1e30f) : -1e30f; }

// Whether a goes before b: larger key first, lowest id on ties. Keys are never NaN.
bool before(const Ranked& a, const Ranked& b) { return a.key > b.key || (a.key == b.key && a.id < b.id); }

struct Workspace {
  std::vector<float> logits, scores;
  std::vector<Ranked> best;
};

void route_one(const Router& r, const float* raw, int32_t* experts, float* weights, Workspace& work) {
  const float kLast = -INFINITY;
  std::vector<float>& logits = work.logits;
  std::vector<float>& scores = work.scores;
  std::vector<Ranked>& best = work.best;
  float top = kLast;
  for (int64_t e = 0; e < r.E; ++e) {
    logits[e] = bounded(raw[e]);
    top = std::max(top, logits[e]);
  }
  float total = 0.0f;
  for (int64_t e = 0; e < r.E; ++e) {
    const float l = logits[e];
    if (r.score_selected)
      scores[e] = l;
    else if (r.score == Score::sigmoid)
      scores[e] = 1.0f / (1.0f + std::exp(-l));
    else
      total += scores[e] = std::exp(l - top);
  }
  if (!r.score_selected && r.score == Score::softmax)
    for (int64_t e = 0; e < r.E; ++e) scores[e] /= total;

  // Insertion into the K best so far: E comparisons, few insertions.
  best.clear();
  for (int64_t e = 0; e < r.E; ++e) {
    float key = scores[e] + (r.selection_bias ? r.selection_bias[e] : 0.0f);
    if (!(key == key)) key = kLast;
    const Ranked item{key, static_cast<int32_t>(e)};
    if (static_cast<int64_t>(best.size()) == r.K) {
      if (!before(item, best.back())) continue;
      best.pop_back();
    }
    best.insert(std::upper_bound(best.begin(), best.end(), item, before), item);
  }

  float sum = 0.0f;
  if (r.score_selected && r.score == Score::softmax) {
    float high = kLast;
    for (const Ranked& b : best) high = std::max(high, logits[b.id]);
    for (int64_t k = 0; k < r.K; ++k) {
      sum += weights[k] = std::exp(logits[best[k].id] - high);
    }
    for (int64_t k = 0; k < r.K; ++k) weights[k] /= sum;
  } else {
    for (int64_t k = 0; k < r.K; ++k)
      weights[k] = r.score_selected ? 1.0f / (1.0f + std::exp(-logits[best[k].id])) : scores[best[k].id];
  }
  sum = 0.0f;
  for (int64_t k = 0; k < r.K; ++k) sum += weights[k];
  for (int64_t k = 0; k < r.K; ++k) {
    experts[k] = best[k].id;
    weights[k] = (r.renormalize ? weights[k] / std::max(sum + r.renorm_eps, kNormFloor) : weights[k]) * r.scale;
  }
}

}  // namespace

void logits(const Scores& s, Isa isa) {
  constexpr int64_t kClasses = 16;             // of a task
  constexpr int64_t kSmallScores = 1 << 17;    // multiply-adds that one thread does sooner
  const Kernels* k = pick_kernels(isa, s.x.dtype, s.w.dtype);
  const int64_t tasks = (s.C + kClasses - 1) / kClasses, tile = s.T * (s.D + 32);
  const int64_t threads = s.T * s.D * s.C < kSmallScores ? 1 : std::min<int64_t>(max_threads(), tasks);
  Scratch scratch(static_cast<size_t>(tile * threads) * 4);
  Claims claims(tasks);
  parallel(static_cast<int>(threads), [&](int thread, int) {
    float* mine = reinterpret_cast<float*>(scratch.data()) + thread * tile;
    bool fill = true;
    for (int64_t i = claims.next(); i >= 0; i = claims.next(), fill = false)
      k->logits(s, i * kClasses, std::min(s.C, (i + 1) * kClasses), mine, fill);
  });
}

void route(const Router& r, const float* logits, int64_t T, int32_t* experts, float* weights) {
  if (r.K < 1 || r.K > r.E)
    throw BadArgument("top_k: expected 1 to " + std::to_string(r.E) + " (the experts), got " + std::to_string(r.K));
  constexpr int64_t kTokens = 16;
  const int64_t tasks = (T + kTokens - 1) / kTokens;
  for_each(tasks, T * r.E < kParallelScores ? 1 : max_threads(), [&](int64_t i) {
    Workspace work;
    work.logits.resize(static_cast<size_t>(r.E));
    work.scores.resize(static_cast<size_t>(r.E));
    work.best.reserve(static_cast<size_t>(r.K) + 1);
    for (int64_t t = i * kTokens; t < std::min(T, (i + 1) * kTokens); ++t)
      route_one(r, logits + t * r.E, experts + t * r.K, weights + t * r.K, work);
  });
}

}  // namespace moeffn
