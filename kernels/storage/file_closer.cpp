#include "storage/file_closer.h"

#include <pthread.h>

#include <system_error>

namespace kstep {

FileCloser::~FileCloser() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void FileCloser::close(std::unique_ptr<File> file) {
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error&) {
      return;  // no more threads: `file` is closed here, which only takes longer
    }
    pthread_setname_np(thread_.native_handle(), "kstep-closer");
  }
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return files_.size() < kMaxFiles; });
  files_.push_back(std::move(file));
  changed_.notify_all();
}

bool FileCloser::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool had_files = !files_.empty();
  changed_.wait(lock, [this] { return files_.empty(); });
  return had_files;
}

void FileCloser::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !files_.empty(); });
    if (files_.empty()) return;
    std::unique_ptr<File> file = std::move(files_.front());
    lock.unlock();
    file.reset();
    lock.lock();
    files_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace kstep
