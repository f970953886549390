// FileCache: a bounded set of open segment files, so the store works with a small `ulimit -n`.
//
// Ownership: owns the files. Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "storage/env.h"

namespace kstep {

class FileCache {
 public:
  FileCache(Env* env, std::uint32_t max_open_files) : env_(env), max_open_files_(max_open_files) {}

  // The open file of `key`, pinned until release(); null when it is not open.
  File* find(std::uint64_t key);
  // Opens a file under `key` and pins it. Closes the least recently used unpinned file when the bound
  // is reached; Full when every file is pinned (release some and try again). REQUIRES: find(key) is null.
  Status open(std::uint64_t key, const std::string& path, OpenMode mode, bool direct, File** out);
  void release(std::uint64_t key);
  // Closes the file of `key` if it is open; one that is pinned, when its last pin goes.
  void close(std::uint64_t key);
  // Gives up the file of `key`. Null when it is not open, or pinned: then it is closed when its last pin goes.
  std::unique_ptr<File> take(std::uint64_t key);

  std::uint32_t max_open_files() const { return max_open_files_; }
  std::size_t num_open() const { return entries_.size(); }

 private:
  struct Entry {
    std::unique_ptr<File> file;
    std::uint32_t num_pins = 0;
    bool is_leaving = false;  // to be closed when its last pin goes
    std::uint64_t last_use = 0;
  };

  Env* env_;
  std::uint32_t max_open_files_;
  std::uint64_t clock_ = 0;
  std::unordered_map<std::uint64_t, Entry> entries_;
};

}  // namespace kstep
