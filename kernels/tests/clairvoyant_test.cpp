// ClairvoyantEstimator: the share it finds, and that it is found anew only after many new samples.
#include "cache/clairvoyant.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace kstep {
namespace {

TEST(Clairvoyant, IsOneForTheOptimumAndLessForWorse) {
  ClairvoyantEstimator estimator(64 * 100);
  std::mt19937_64 rng(1);
  for (int i = 0; i < 400000; ++i) estimator.record(rng() % 12800, i % 4 == 0);  // 200 sampled keys, 100 slots
  const double share = estimator.share_of_optimum();
  EXPECT_GT(share, 0.25);
  EXPECT_LT(share, 0.5);
}

// Keys of the one in 64 that are recorded, told by an estimator that has seen one key alone.
std::vector<std::uint64_t> sampled_keys(std::size_t num_keys) {
  std::vector<std::uint64_t> keys;
  for (std::uint64_t key = 0; keys.size() < num_keys; ++key) {
    ClairvoyantEstimator alone(ClairvoyantEstimator::kSampling);
    for (int i = 0; i < 512; ++i) alone.record(key, true);
    if (alone.share_of_optimum() > 0) keys.push_back(key);
  }
  return keys;
}

TEST(Clairvoyant, ReplaysOnlyOnceTheTraceHasGrownByAnEighthAndByEnough) {
  struct Access {
    std::uint64_t key;
    bool is_hit;
  };
  constexpr std::size_t kNumSlots = 64 * 50;
  const std::vector<std::uint64_t> keys = sampled_keys(100);
  std::mt19937_64 rng(2);
  std::vector<Access> trace;
  for (std::size_t i = 0; i < 12000; ++i) {
    trace.push_back({keys[rng() % keys.size()], rng() % 12000 < i});  // hits become ever more frequent
  }
  ClairvoyantEstimator kept(kNumSlots);
  std::size_t num_recorded = 0;
  auto record_up_to = [&](std::size_t n) {
    for (; num_recorded < n; ++num_recorded) kept.record(trace[num_recorded].key, trace[num_recorded].is_hit);
  };
  auto found_afresh = [&] {
    ClairvoyantEstimator afresh(kNumSlots);
    for (std::size_t i = 0; i < num_recorded; ++i) afresh.record(trace[i].key, trace[i].is_hit);
    return afresh.share_of_optimum();
  };

  record_up_to(255);
  EXPECT_EQ(kept.share_of_optimum(), 0.0);
  record_up_to(256);
  double last = kept.share_of_optimum();
  EXPECT_GT(last, 0.0);
  EXPECT_EQ(last, found_afresh());
  const std::vector<std::pair<std::size_t, std::size_t>> waits = {{511, 512}, {767, 8192}, {9300, 9400}};
  for (const auto& [num_before, num_after] : waits) {
    record_up_to(num_before);
    ASSERT_NE(last, found_afresh()) << num_before << " samples: a replay would not show";
    EXPECT_EQ(kept.share_of_optimum(), last) << num_before << " samples: a replay too early";
    record_up_to(num_after);
    last = kept.share_of_optimum();
    EXPECT_EQ(last, found_afresh()) << num_after << " samples: no replay";
  }
}

}  // namespace
}  // namespace kstep
