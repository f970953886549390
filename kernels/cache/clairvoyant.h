// ClairvoyantEstimator: what share of the best possible hits the cache reaches.
//
// Purpose: Belady's rule (evict what is used furthest in the future) needs the future, so it is run
// afterwards over a recorded trace. One key in 64, chosen by hash, is recorded, and the rule is run with
// 1/64 of the slots: spatial sampling keeps reuse distances in proportion.
// Ownership: a ring of the newest samples. Thread rule: one thread.
#pragma once

#include <cstdint>
#include <vector>

namespace kstep {

class ClairvoyantEstimator {
 public:
  explicit ClairvoyantEstimator(std::uint32_t num_slots) : num_slots_(num_slots) {}

  static constexpr std::uint32_t kSampling = 64;

  void record(std::uint64_t key, bool is_hit) {
    if ((key * 0xA24BAED4963EE407ull >> 58) != 0) return;  // the top 6 bits
    add(key, is_hit);
  }

  // Hits over Belady's hits in the newer half of the samples, at most 1; 0 while there is too little to say.
  double share_of_optimum() const;

 private:
  static constexpr std::size_t kMaxSamples = 1u << 18;
  struct Sample {
    std::uint64_t key;
    bool is_hit;
  };

  void add(std::uint64_t key, bool is_hit);

  std::uint32_t num_slots_;
  std::vector<Sample> samples_;  // a ring once full
  std::size_t next_ = 0;
};

}  // namespace kstep
