// ClairvoyantEstimator: what share of the best possible hits the cache reaches.
//
// Purpose: Belady's rule (evict what is used furthest in the future) needs the future, so it is run
// afterwards over a recorded trace. One key in 64, chosen by hash, is recorded, and the rule is run with
// 1/64 of the slots: spatial sampling keeps reuse distances in proportion. A replay of a full ring takes tens of
// milliseconds, so the share is kept and replayed only once the trace has grown by an eighth of what is held.
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
  // Lacks up to max(256, an eighth) of the samples, the newest: cheap enough to be asked for at every log line.
  double share_of_optimum();

 private:
  static constexpr std::size_t kMaxSamples = 1u << 18;
  struct Sample {
    std::uint64_t key;
    bool is_hit;
  };

  void add(std::uint64_t key, bool is_hit);
  double replay() const;

  std::uint32_t num_slots_;
  std::vector<Sample> samples_;  // a ring once full
  std::size_t next_ = 0;
  std::size_t num_new_ = 0;  // samples since the last replay
  double share_ = 0;         // what it found
};

}  // namespace kstep
