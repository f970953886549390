#include "storage/env_throttled.h"

#include <algorithm>
#include <queue>
#include <thread>
#include <unordered_map>
#include <utility>

namespace kstep {
namespace {

using Time = DriveClock::Time;

// While requests of other folders are under way, a wait for a held one looks up this often.
constexpr std::chrono::microseconds kLongestNap{200};

class ThrottledEngine : public IoEngine {
 public:
  ThrottledEngine(std::unique_ptr<IoEngine> inner, const std::vector<std::unique_ptr<DriveClock>>* clocks)
      : inner_(std::move(inner)), clocks_(clocks), finished_(inner_->depth()) {}

  const char* name() const override { return inner_->name(); }
  std::uint32_t depth() const override { return inner_->depth(); }
  std::uint32_t num_in_flight() const override { return inner_->num_in_flight() + static_cast<std::uint32_t>(held_.size()); }

  Status submit(IoRequest* request) override {
    Time end{};
    for (const auto& clock : *clocks_) {
      if (clock->covers(request->file->path())) end = clock->take(request->num_bytes);
    }
    Status status = inner_->submit(request);
    if (status.ok()) ends_[request] = end;
    return status;
  }

  Status reap(std::size_t min_done, std::size_t max_done, IoRequest** done, std::size_t* num_done) override {
    *num_done = 0;
    while (true) {
      if (inner_->num_in_flight() > 0) {
        const std::size_t have = *num_done + held_.size();
        std::size_t num_finished = 0;
        KSTEP_RETURN_IF_ERROR(inner_->reap(min_done > have ? min_done - have : 0, finished_.size(), finished_.data(), &num_finished));
        for (std::size_t i = 0; i < num_finished; ++i) hold(finished_[i]);
      }
      const Time now = std::chrono::steady_clock::now();
      while (*num_done < max_done && !held_.empty() && held_.top().first <= now) {
        done[(*num_done)++] = held_.top().second;
        held_.pop();
      }
      if (*num_done >= min_done || *num_done == max_done) return {};
      const Time next = held_.top().first;  // something is held: fewer than min_done were done
      std::this_thread::sleep_until(inner_->num_in_flight() > 0 ? std::min(next, now + kLongestNap) : next);
    }
  }

 private:
  void hold(IoRequest* request) {
    const auto found = ends_.find(request);
    held_.emplace(found->second, request);
    ends_.erase(found);
  }

  using Held = std::pair<Time, IoRequest*>;

  std::unique_ptr<IoEngine> inner_;
  const std::vector<std::unique_ptr<DriveClock>>* clocks_;
  std::vector<IoRequest*> finished_;
  std::unordered_map<IoRequest*, Time> ends_;                                   // of requests in the inner engine
  std::priority_queue<Held, std::vector<Held>, std::greater<Held>> held_;       // done by the drive, earliest end first
};

}  // namespace

Time DriveClock::take(std::uint64_t num_bytes) {
  const std::chrono::duration<double> turn(static_cast<double>(num_bytes) / static_cast<double>(bytes_per_s_));
  std::lock_guard<std::mutex> lock(mutex_);
  free_at_ = std::max(free_at_, std::chrono::steady_clock::now()) + std::chrono::duration_cast<Time::duration>(turn);
  return free_at_;
}

ThrottledEnv::ThrottledEnv(Env* inner, const std::vector<std::string>& folders, const std::vector<std::uint64_t>& bytes_per_s)
    : inner_(inner) {
  for (std::size_t i = 0; i < std::min(folders.size(), bytes_per_s.size()); ++i) {
    if (bytes_per_s[i] != 0) clocks_.push_back(std::make_unique<DriveClock>(folders[i], bytes_per_s[i]));
  }
}

Status ThrottledEnv::new_engine(IoBackend backend, std::uint32_t depth, std::unique_ptr<IoEngine>* out) {
  std::unique_ptr<IoEngine> engine;
  KSTEP_RETURN_IF_ERROR(inner_->new_engine(backend, depth, &engine));
  *out = std::make_unique<ThrottledEngine>(std::move(engine), &clocks_);
  return {};
}

}  // namespace kstep
