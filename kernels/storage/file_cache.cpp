#include "storage/file_cache.h"

namespace kstep {

File* FileCache::find(std::uint64_t key) {
  auto it = entries_.find(key);
  if (it == entries_.end()) return nullptr;
  ++it->second.num_pins;
  it->second.last_use = ++clock_;
  return it->second.file.get();
}

Status FileCache::open(std::uint64_t key, const std::string& path, OpenMode mode, bool direct, File** out) {
  if (entries_.size() >= max_open_files_) {
    auto oldest = entries_.end();
    for (auto it = entries_.begin(); it != entries_.end(); ++it) {
      const bool is_older = oldest == entries_.end() || it->second.last_use < oldest->second.last_use;
      if (it->second.num_pins == 0 && is_older) oldest = it;
    }
    if (oldest == entries_.end()) {
      return Status::full("open " + path, "all " + std::to_string(max_open_files_) + " file handles are in use");
    }
    entries_.erase(oldest);
  }
  Entry entry;
  KSTEP_RETURN_IF_ERROR(env_->open(path, mode, direct, &entry.file));
  entry.num_pins = 1;
  entry.last_use = ++clock_;
  *out = entry.file.get();
  entries_[key] = std::move(entry);
  return {};
}

void FileCache::release(std::uint64_t key) {
  const auto it = entries_.find(key);
  if (--it->second.num_pins == 0 && it->second.is_leaving) entries_.erase(it);
}

void FileCache::close(std::uint64_t key) { take(key); }

std::unique_ptr<File> FileCache::take(std::uint64_t key) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return nullptr;
  if (it->second.num_pins > 0) {
    it->second.is_leaving = true;
    return nullptr;
  }
  std::unique_ptr<File> file = std::move(it->second.file);
  entries_.erase(it);
  return file;
}

}  // namespace kstep
