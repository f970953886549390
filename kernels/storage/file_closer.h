// FileCloser: closes files on a thread of its own.
//
// Purpose: the last close of a removed file gives its space back, and where the drive is told of freed blocks at once (ext4 mounted
// with `discard`) it sleeps for that: 22 ms were measured for 64 MiB, at no work for the CPU.
// Ownership: owns the files and the thread, which starts with the first file. Thread rule: one thread at a time.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "storage/env.h"

namespace kstep {

class FileCloser {
 public:
  static constexpr std::size_t kMaxFiles = 3;  // not closed yet, with the one in work

  FileCloser() = default;
  ~FileCloser();  // waits until all are closed
  FileCloser(const FileCloser&) = delete;
  FileCloser& operator=(const FileCloser&) = delete;

  // Waits while there are kMaxFiles.
  void close(std::unique_ptr<File> file);
  // Waits until all are closed. False if there were none.
  bool drain();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<File>> files_;  // the first is in work
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace kstep
