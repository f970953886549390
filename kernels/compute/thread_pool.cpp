#include "compute/thread_pool.h"

#include "compute/cpu.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kstep {
namespace {

// Iterations of spin_wait before a waiting thread sleeps: about 20 us, the gap between two regions of one op.
constexpr int kSpins = 500;
constexpr int kMaxWorkers = 255;

struct Job {
  TaskFunction function;
  void* context;
  std::size_t num_tasks;
  int max_workers;
  std::atomic<std::size_t> next_task{0};

  void work() {
    for (;;) {
      const std::size_t task = next_task.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks) return;
      function(context, task);
    }
  }
};

class ThreadPool {
 public:
  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_stopping_ = true;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void run(Job& job) {
    std::unique_lock<std::mutex> running(run_mutex_, std::try_to_lock);
    if (!running.owns_lock()) {  // nested or concurrent: the pool is busy
      job.work();
      return;
    }
    ensure_workers(job.max_workers);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      num_joined_ = 0;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job.work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = nullptr;  // a worker that wakes up late finds nothing and touches no stack of ours
    }
    wait_until_idle();
  }

 private:
  void ensure_workers(int count) {
    while (static_cast<int>(workers_.size()) < count) {
      workers_.emplace_back([this] { serve(); });
      pthread_setname_np(workers_.back().native_handle(), "kstep-cpu");
    }
  }

  void wait_until_idle() {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (num_active_.load(std::memory_order_acquire) == 0) return;
      spin_wait();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return num_active_.load(std::memory_order_acquire) == 0; });
  }

  void serve() {
    std::uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spin) spin_wait();
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
      seen = generation_.load(std::memory_order_relaxed);
      if (is_stopping_) return;
      if (job_ == nullptr || num_joined_ >= job_->max_workers) continue;
      Job* job = job_;
      ++num_joined_;
      num_active_.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      job->work();
      lock.lock();
      if (num_active_.fetch_sub(1, std::memory_order_release) == 1) idle_.notify_one();
    }
  }

  std::mutex run_mutex_;  // held by the one caller that owns the workers
  std::mutex mutex_;      // guards job_, num_joined_, is_stopping_ and the sleeping of both sides
  std::condition_variable wake_, idle_;
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<int> num_active_{0};
  Job* job_ = nullptr;
  int num_joined_ = 0;
  bool is_stopping_ = false;
  std::vector<std::thread> workers_;
};

std::unique_ptr<ThreadPool>& pool() {
  static std::unique_ptr<ThreadPool> instance = [] {
    // Threads do not survive fork, and the locks may have been held: the child forgets the old pool and starts another.
    pthread_atfork(nullptr, nullptr, [] {
      (void)pool().release();
      pool() = std::make_unique<ThreadPool>();
    });
    return std::make_unique<ThreadPool>();
  }();
  return instance;
}

}  // namespace

void run_tasks(int num_threads, std::size_t num_tasks, TaskFunction function, void* context) {
  Job job{function, context, num_tasks, num_threads - 1 < kMaxWorkers ? num_threads - 1 : kMaxWorkers};
  pool()->run(job);
}

}  // namespace kstep
