#include "storage/io_engine.h"

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>

#include "storage/env.h"

namespace kstep {
namespace {

std::int64_t errno_of(const Status& status) {
  if (status.kind == StatusKind::NoSpace) return -ENOSPC;
  return -EIO;
}

class InlineEngine : public IoEngine {
 public:
  explicit InlineEngine(std::uint32_t depth) : depth_(depth) {}
  const char* name() const override { return "inline"; }
  std::uint32_t depth() const override { return depth_; }
  std::uint32_t num_in_flight() const override { return static_cast<std::uint32_t>(done_.size()); }

  Status submit(IoRequest* request) override {
    run_request(request);
    done_.push_back(request);
    return {};
  }

  Status reap(std::size_t, std::size_t max_done, IoRequest** done, std::size_t* num_done) override {
    *num_done = 0;
    while (*num_done < max_done && !done_.empty()) {
      done[(*num_done)++] = done_.front();
      done_.pop_front();
    }
    return {};
  }

 private:
  std::uint32_t depth_;
  std::deque<IoRequest*> done_;
};

class ThreadEngine : public IoEngine {
 public:
  ThreadEngine(std::uint32_t depth, std::uint32_t num_threads) : depth_(depth) {
    for (std::uint32_t i = 0; i < num_threads; ++i) {
      threads_.emplace_back([this] { work(); });
      pthread_setname_np(threads_.back().native_handle(), "kstep-io-pool");
    }
  }

  ~ThreadEngine() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    todo_ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const char* name() const override { return "threads"; }
  std::uint32_t depth() const override { return depth_; }
  std::uint32_t num_in_flight() const override { return num_in_flight_; }

  Status submit(IoRequest* request) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      todo_.push_back(request);
    }
    ++num_in_flight_;
    todo_ready_.notify_one();
    return {};
  }

  Status reap(std::size_t min_done, std::size_t max_done, IoRequest** done, std::size_t* num_done) override {
    std::unique_lock<std::mutex> lock(mutex_);
    done_ready_.wait(lock, [&] { return done_.size() >= min_done; });
    *num_done = 0;
    while (*num_done < max_done && !done_.empty()) {
      done[(*num_done)++] = done_.front();
      done_.pop_front();
    }
    num_in_flight_ -= static_cast<std::uint32_t>(*num_done);
    return {};
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      todo_ready_.wait(lock, [this] { return stopping_ || !todo_.empty(); });
      if (todo_.empty()) return;  // stopping, and nothing left to do
      IoRequest* request = todo_.front();
      todo_.pop_front();
      lock.unlock();
      run_request(request);
      lock.lock();
      done_.push_back(request);
      done_ready_.notify_one();
    }
  }

  const std::uint32_t depth_;
  std::uint32_t num_in_flight_ = 0;  // owner thread only
  std::mutex mutex_;                 // guards the queues and stopping_
  std::condition_variable todo_ready_;
  std::condition_variable done_ready_;
  std::deque<IoRequest*> todo_;  // at most depth_ entries
  std::deque<IoRequest*> done_;  // at most depth_ entries
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

void run_request(IoRequest* request) {
  if (request->is_write) {
    Status status = request->file->write_at(request->offset, request->buffer, request->num_bytes);
    request->result = status.ok() ? std::int64_t{request->num_bytes} : errno_of(status);
    return;
  }
  std::size_t got = 0;
  Status status = request->file->read_at(request->offset, request->buffer, request->num_bytes, &got);
  request->result = status.ok() ? static_cast<std::int64_t>(got) : errno_of(status);
}

std::unique_ptr<IoEngine> make_inline_engine(std::uint32_t depth) { return std::make_unique<InlineEngine>(depth); }

std::unique_ptr<IoEngine> make_thread_engine(std::uint32_t depth, std::uint32_t num_threads) {
  return std::make_unique<ThreadEngine>(depth, num_threads);
}

}  // namespace kstep
