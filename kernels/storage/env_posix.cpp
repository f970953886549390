#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "storage/env.h"

namespace kstep {
namespace {

constexpr std::uint32_t kFallbackAlignment = 4096;
constexpr std::uint32_t kMaxPoolThreads = 32;  // 16 threads reach 3/4 of a virtual NVMe's read limit, 64 all of it

Status from_errno(const std::string& context, int error) {
  const std::string detail = std::strerror(error);
  switch (error) {
    case ENOSPC:
    case EDQUOT: return Status::no_space(context, detail);
    case ENOENT: return Status::not_found(context, detail);
    case EWOULDBLOCK: return Status::busy(context, detail);
    default: return Status::io(context, detail);
  }
}

class PosixFile : public File {
 public:
  PosixFile(std::string path, int fd, bool is_direct) : path_(std::move(path)), fd_(fd), is_direct_(is_direct) {}
  ~PosixFile() override { ::close(fd_); }

  Status read_at(std::uint64_t offset, void* buffer, std::size_t num_bytes, std::size_t* got) override {
    *got = 0;
    while (*got < num_bytes) {
      const ssize_t n = ::pread(fd_, static_cast<char*>(buffer) + *got, num_bytes - *got,
                                static_cast<off_t>(offset + *got));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return from_errno("read " + path_ + " at " + std::to_string(offset), errno);
      if (n == 0) break;
      *got += static_cast<std::size_t>(n);
    }
    return {};
  }

  Status write_at(std::uint64_t offset, const void* buffer, std::size_t num_bytes) override {
    std::size_t done = 0;
    while (done < num_bytes) {
      const ssize_t n = ::pwrite(fd_, static_cast<const char*>(buffer) + done, num_bytes - done,
                                 static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return from_errno("write " + path_ + " at " + std::to_string(offset), errno);
      done += static_cast<std::size_t>(n);
    }
    return {};
  }

  Status sync() override {
    if (::fdatasync(fd_) != 0) return from_errno("sync " + path_, errno);
    return {};
  }

  Status size_bytes(std::uint64_t* out) override {
    struct stat info {};
    if (::fstat(fd_, &info) != 0) return from_errno("stat " + path_, errno);
    *out = static_cast<std::uint64_t>(info.st_size);
    return {};
  }

  int descriptor() const override { return fd_; }
  bool is_direct() const override { return is_direct_; }
  const std::string& path() const override { return path_; }

 private:
  std::string path_;
  int fd_;
  bool is_direct_;
};

class PosixLock : public FileLock {
 public:
  explicit PosixLock(int fd) : fd_(fd) {}
  ~PosixLock() override { ::close(fd_); }  // closing drops the flock

 private:
  int fd_;
};

class PosixEnv : public Env {
 public:
  Status open(const std::string& path, OpenMode mode, bool direct, std::unique_ptr<File>* out) override {
    int flags = O_CLOEXEC | (mode == OpenMode::Read ? O_RDONLY : O_RDWR);
    if (mode == OpenMode::Create) flags |= O_CREAT | O_EXCL;
    int fd = direct ? ::open(path.c_str(), flags | O_DIRECT, 0644) : -1;
    bool is_direct = fd >= 0;
    if (direct && fd < 0 && errno == EINVAL) {
      // The file system has no direct I/O. The attempt may have created the file.
      direct = false;
      flags &= ~O_EXCL;
    }
    if (!direct) fd = ::open(path.c_str(), flags, 0644);
    if (fd < 0) return from_errno("open " + path, errno);
    *out = std::make_unique<PosixFile>(path, fd, is_direct);
    return {};
  }

  Status make_dir(const std::string& path) override {
    if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) return from_errno("make folder " + path, errno);
    return {};
  }
  Status remove_file(const std::string& path) override {
    if (::unlink(path.c_str()) != 0) return from_errno("remove " + path, errno);
    return {};
  }
  Status remove_dir(const std::string& path) override {
    if (::rmdir(path.c_str()) != 0) return from_errno("remove folder " + path, errno);
    return {};
  }
  Status rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) return from_errno("rename " + from + " to " + to, errno);
    return {};
  }
  Status link(const std::string& from, const std::string& to) override {
    if (::link(from.c_str(), to.c_str()) != 0) return from_errno("link " + from + " to " + to, errno);
    return {};
  }

  Status list(const std::string& path, std::vector<std::string>* names) override {
    names->clear();
    DIR* dir = ::opendir(path.c_str());
    if (dir == nullptr) return from_errno("list " + path, errno);
    while (const dirent* entry = ::readdir(dir)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names->push_back(name);
    }
    ::closedir(dir);
    std::sort(names->begin(), names->end());
    return {};
  }

  Status sync_dir(const std::string& path) override {
    const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return from_errno("open folder " + path, errno);
    const int rc = ::fsync(fd);
    const int error = errno;
    ::close(fd);
    if (rc != 0) return from_errno("sync folder " + path, error);
    return {};
  }

  bool exists(const std::string& path) override { return ::access(path.c_str(), F_OK) == 0; }

  Status file_size(const std::string& path, std::uint64_t* out) override {
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) return from_errno("stat " + path, errno);
    *out = static_cast<std::uint64_t>(info.st_size);
    return {};
  }

  Status free_bytes(const std::string& path, std::uint64_t* out) override {
    struct statvfs info {};
    if (::statvfs(path.c_str(), &info) != 0) return from_errno("statvfs " + path, errno);
    *out = std::uint64_t{info.f_bavail} * info.f_frsize;
    return {};
  }

  Status direct_alignment(const std::string& path, std::uint32_t* out) override {
    *out = kFallbackAlignment;
#ifdef STATX_DIOALIGN
    // The answer belongs to a regular file, so ask a short-lived one.
    const std::string probe_path = path + "/.alignment-probe";
    const int fd = ::open(probe_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) return from_errno("open " + probe_path, errno);
    struct statx info {};
    const bool is_known = ::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
                          (info.stx_mask & STATX_DIOALIGN) != 0 && info.stx_dio_offset_align != 0;
    if (is_known) *out = std::max(info.stx_dio_offset_align, info.stx_dio_mem_align);
    ::close(fd);
    ::unlink(probe_path.c_str());
#endif
    return {};
  }

  Status lock(const std::string& path, std::unique_ptr<FileLock>* out) override {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) return from_errno("open " + path, errno);
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      ::close(fd);
      if (error == EWOULDBLOCK) {
        return Status::busy("lock " + path, "another process or handle has this store open; stop it, or use another path");
      }
      return from_errno("lock " + path, error);
    }
    *out = std::make_unique<PosixLock>(fd);
    return {};
  }

  Status new_engine(IoBackend backend, std::uint32_t depth, std::unique_ptr<IoEngine>* out) override {
    if (backend == IoBackend::Auto || backend == IoBackend::Uring) {
      Status status = make_uring_engine(depth, out);
      if (status.ok() || backend == IoBackend::Uring) return status;
    }
    *out = backend == IoBackend::Inline ? make_inline_engine(depth)
                                        : make_thread_engine(depth, std::min(depth, kMaxPoolThreads));
    return {};
  }

  std::uint64_t max_open_files() override {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
      return std::numeric_limits<std::uint32_t>::max();
    }
    return limit.rlim_cur;
  }
};

}  // namespace

Env& Env::posix() {
  static PosixEnv env;
  return env;
}

Status Env::read_text(const std::string& path, std::string* out) {
  std::unique_ptr<File> file;
  KSTEP_RETURN_IF_ERROR(open(path, OpenMode::Read, false, &file));
  std::uint64_t num_bytes = 0;
  KSTEP_RETURN_IF_ERROR(file->size_bytes(&num_bytes));
  out->resize(num_bytes);
  std::size_t got = 0;
  KSTEP_RETURN_IF_ERROR(file->read_at(0, out->data(), num_bytes, &got));
  out->resize(got);
  return {};
}

Status Env::write_text(const std::string& path, const std::string& text) {
  std::unique_ptr<File> file;
  KSTEP_RETURN_IF_ERROR(open(path, OpenMode::Create, false, &file));
  KSTEP_RETURN_IF_ERROR(file->write_at(0, text.data(), text.size()));
  return file->sync();
}

Status Env::remove_tree(const std::string& path) {
  if (!exists(path)) return {};
  std::vector<std::string> names;
  Status listed = list(path, &names);
  if (!listed.ok()) return remove_file(path);  // not a folder
  for (const std::string& name : names) KSTEP_RETURN_IF_ERROR(remove_tree(path + "/" + name));
  return remove_dir(path);
}

AlignedBuffer::AlignedBuffer(std::size_t num_bytes) : size_(num_bytes) {
  constexpr std::size_t kPage = 4096;
  const std::size_t rounded = (num_bytes + kPage - 1) / kPage * kPage;
  data_ = static_cast<std::byte*>(std::aligned_alloc(kPage, rounded == 0 ? kPage : rounded));
  if (data_ == nullptr) std::abort();  // as operator new would
}

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept : data_(other.data_), size_(other.size_) {
  other.data_ = nullptr;
  other.size_ = 0;
}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

AlignedBuffer::~AlignedBuffer() { std::free(data_); }

}  // namespace kstep
