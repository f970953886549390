// Env: the only door from the row store to the operating system.
//
// Purpose: everything the store asks of a file system goes through this interface, so a test can
// put a medium behind it that loses, tears or refuses bytes. `Env::posix()` is the real one.
// Ownership: an Env outlives every File, FileLock and IoEngine it made. Thread rule: an Env and a
// File may be used from several threads; an IoEngine by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "storage/io_engine.h"

namespace kstep {

enum class OpenMode : std::uint8_t {
  Read,       // must exist
  ReadWrite,  // must exist
  Create,     // must not exist; read and write
};

// An open file. Direct files need offsets, lengths and buffers that are multiples of the alignment.
class File {
 public:
  virtual ~File() = default;

  // Reads up to `num_bytes`; *got is smaller only at the end of the file.
  virtual Status read_at(std::uint64_t offset, void* buffer, std::size_t num_bytes, std::size_t* got) = 0;
  // Writes all bytes or fails.
  virtual Status write_at(std::uint64_t offset, const void* buffer, std::size_t num_bytes) = 0;
  // Makes earlier writes of this file durable.
  virtual Status sync() = 0;
  virtual Status size_bytes(std::uint64_t* out) = 0;
  // The descriptor, or -1 where there is none (then only engines that call read_at/write_at work).
  virtual int descriptor() const = 0;
  virtual bool is_direct() const = 0;
  virtual const std::string& path() const = 0;
};

// Held exclusively while it lives, also against other handles of the same process.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

class Env {
 public:
  virtual ~Env() = default;
  static Env& posix();

  // Opens past the page cache when `direct` and the file system can; File::is_direct() tells.
  virtual Status open(const std::string& path, OpenMode mode, bool direct, std::unique_ptr<File>* out) = 0;
  virtual Status make_dir(const std::string& path) = 0;  // fine when it is there
  virtual Status remove_file(const std::string& path) = 0;
  virtual Status remove_dir(const std::string& path) = 0;  // REQUIRES: empty
  virtual Status rename(const std::string& from, const std::string& to) = 0;
  virtual Status link(const std::string& from, const std::string& to) = 0;
  // Names in a folder, sorted, without "." and "..".
  virtual Status list(const std::string& path, std::vector<std::string>* names) = 0;
  virtual Status sync_dir(const std::string& path) = 0;
  virtual bool exists(const std::string& path) = 0;
  virtual Status file_size(const std::string& path, std::uint64_t* out) = 0;
  virtual Status free_bytes(const std::string& path, std::uint64_t* out) = 0;
  // Smallest offset and length step of direct reads on the file system of folder `path`.
  virtual Status direct_alignment(const std::string& path, std::uint32_t* out) = 0;
  // Fails with Busy when somebody else holds it.
  virtual Status lock(const std::string& path, std::unique_ptr<FileLock>* out) = 0;
  // An engine for files of this Env. Auto probes io_uring and falls back to threads.
  virtual Status new_engine(IoBackend backend, std::uint32_t depth, std::unique_ptr<IoEngine>* out) = 0;
  // How many files this process may still keep open, as far as a limit is known.
  virtual std::uint64_t max_open_files() = 0;

  // Small whole files, through open(). write_text creates, writes and syncs (the folder is not synced).
  Status read_text(const std::string& path, std::string* out);
  Status write_text(const std::string& path, const std::string& text);
  // Removes a folder of files and folders of files; fine when it is absent.
  Status remove_tree(const std::string& path);
};

// Memory for direct I/O: page-aligned, freed on destruction, movable.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::size_t num_bytes);
  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;
  ~AlignedBuffer();
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kstep
