// ThrottledEnv: another Env behind which no drive is faster than stated.
//
// Purpose: bounds what a store asks of a drive that others use too, and lets a fast drive stand for a slow one.
// Model: each folder given has a clock. A request of N bytes below it takes N / bytes_per_s of that clock,
// reads and writes alike, one after the other, and is not handed back before its turn is over. Other folders are
// not held up, except that held requests count against an engine's depth, as those of a slow drive do.
// What does not pass an engine (headers, manifests, footers) is not bounded.
// Ownership: the Env behind it must outlive it; engines must not. Thread rule: as Env.
#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "storage/env.h"

namespace kstep {

// When the next request of one folder may be over.
class DriveClock {
 public:
  using Time = std::chrono::steady_clock::time_point;

  DriveClock(std::string folder, std::uint64_t bytes_per_s) : prefix_(std::move(folder) + "/"), bytes_per_s_(bytes_per_s) {}
  bool covers(const std::string& path) const { return path.compare(0, prefix_.size(), prefix_) == 0; }
  // Takes the next turn, which begins now or when the last one ends; returns its end.
  Time take(std::uint64_t num_bytes);

 private:
  const std::string prefix_;
  const std::uint64_t bytes_per_s_;
  std::mutex mutex_;
  Time free_at_{};
};

class ThrottledEnv : public Env {
 public:
  // `bytes_per_s` by folder; 0: unbounded.
  ThrottledEnv(Env* inner, const std::vector<std::string>& folders, const std::vector<std::uint64_t>& bytes_per_s);

  Status open(const std::string& path, OpenMode mode, bool direct, std::unique_ptr<File>* out) override {
    return inner_->open(path, mode, direct, out);
  }
  Status make_dir(const std::string& path) override { return inner_->make_dir(path); }
  Status remove_file(const std::string& path) override { return inner_->remove_file(path); }
  Status remove_dir(const std::string& path) override { return inner_->remove_dir(path); }
  Status rename(const std::string& from, const std::string& to) override { return inner_->rename(from, to); }
  Status link(const std::string& from, const std::string& to) override { return inner_->link(from, to); }
  Status list(const std::string& path, std::vector<std::string>* names) override { return inner_->list(path, names); }
  Status sync_dir(const std::string& path) override { return inner_->sync_dir(path); }
  bool exists(const std::string& path) override { return inner_->exists(path); }
  Status file_size(const std::string& path, std::uint64_t* out) override { return inner_->file_size(path, out); }
  Status free_bytes(const std::string& path, std::uint64_t* out) override { return inner_->free_bytes(path, out); }
  Status direct_alignment(const std::string& path, std::uint32_t* out) override { return inner_->direct_alignment(path, out); }
  Status lock(const std::string& path, std::unique_ptr<FileLock>* out) override { return inner_->lock(path, out); }
  Status new_engine(IoBackend backend, std::uint32_t depth, std::unique_ptr<IoEngine>* out) override;
  std::uint64_t max_open_files() override { return inner_->max_open_files(); }

 private:
  Env* inner_;
  std::vector<std::unique_ptr<DriveClock>> clocks_;
};

}  // namespace kstep
