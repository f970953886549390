#include "cache/clairvoyant.h"

#include <algorithm>
#include <queue>
#include <unordered_map>

namespace kstep {
namespace {

constexpr std::size_t kMinSamples = 256;  // before the first replay, and between two
constexpr std::size_t kNever = SIZE_MAX;

}  // namespace

void ClairvoyantEstimator::add(std::uint64_t key, bool is_hit) {
  ++num_new_;
  if (samples_.size() < kMaxSamples) {
    samples_.push_back({key, is_hit});
    return;
  }
  samples_[next_] = {key, is_hit};
  next_ = (next_ + 1) % kMaxSamples;
}

double ClairvoyantEstimator::share_of_optimum() {
  if (num_new_ < std::max(kMinSamples, samples_.size() / 8)) return share_;
  share_ = replay();
  num_new_ = 0;
  return share_;
}

double ClairvoyantEstimator::replay() const {
  const std::size_t n = samples_.size();
  const std::size_t capacity = num_slots_ / kSampling;
  if (capacity == 0) return 0.0;
  auto at = [&](std::size_t i) -> const Sample& { return samples_[(next_ + i) % n]; };
  std::vector<std::size_t> next_use(n);
  std::unordered_map<std::uint64_t, std::size_t> seen;
  for (std::size_t i = n; i-- > 0;) {
    const auto it = seen.find(at(i).key);
    next_use[i] = it == seen.end() ? kNever : it->second;
    seen[at(i).key] = i;
  }
  std::unordered_map<std::uint64_t, std::size_t> cached;  // key -> its next use
  std::priority_queue<std::pair<std::size_t, std::uint64_t>> furthest;
  std::size_t hits = 0;
  std::size_t best_hits = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t key = at(i).key;
    const bool is_cached = cached.count(key) > 0;
    if (i >= n / 2) {
      hits += at(i).is_hit;
      best_hits += is_cached;
    }
    if (!is_cached && cached.size() >= capacity) {
      while (true) {  // entries whose next use has passed are stale
        const auto top = furthest.top();
        furthest.pop();
        const auto it = cached.find(top.second);
        if (it == cached.end() || it->second != top.first) continue;
        cached.erase(it);
        break;
      }
    }
    cached[key] = next_use[i];
    furthest.emplace(next_use[i], key);
  }
  return best_hits == 0 ? 0.0 : std::min(1.0, static_cast<double>(hits) / static_cast<double>(best_hits));
}

}  // namespace kstep
