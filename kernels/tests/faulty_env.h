// FaultyEnv: a file system in memory that can lose, tear, refuse and damage bytes, for tests.
//
// Model: every file has the bytes a reader sees and the bytes that are durable; every folder has the
// names seen and the names durable. sync() copies seen to durable. crash() throws away what is not
// durable, or keeps a random part of it: each unsynced 512-byte sector and each unsynced folder for
// itself, as a real medium may.
// Thread rule: any thread (one mutex).
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "storage/env.h"

namespace kstep {

// Turns of a random schedule. The thread sanitizer makes a turn ten to thirty times slower, and a race shows in any of them.
#if defined(__SANITIZE_THREAD__)
constexpr int kScheduleTurns = 20;
#else
constexpr int kScheduleTurns = 150;
#endif

class FaultyEnv : public Env {
 public:
  enum class Op { Read, Write, Sync, SyncDir, Rename, Link, Open };

  FaultyEnv();
  ~FaultyEnv() override;

  // --- faults ---
  // The `nth` next operation of this kind (0 = the next) fails with `kind`; then `repeat` more do.
  void fail(Op op, std::uint64_t nth, StatusKind kind, std::uint64_t repeat = 0);
  void clear_faults();
  // Writes beyond this many bytes in all files fail with NoSpace. 0: no limit.
  void set_capacity_bytes(std::uint64_t bytes);
  // The power fails just before the `nth` next sync takes effect: the run goes on, and crash() returns to that moment.
  void freeze_after_syncs(std::uint64_t nth);
  void shorten_read(std::uint64_t nth);
  void flip_bit_in_read(std::uint64_t nth);
  void set_read_delay_us(std::uint32_t microseconds);
  // From now on a read of at most this many bytes waits until it is let through, one for each let_read(). clear_faults() ends that.
  void hold_reads(std::uint64_t max_bytes = UINT64_MAX);
  std::uint64_t num_held_reads() const;
  void let_read();
  // From now on the last close of a removed file waits, and its bytes stay stored, until let_closes() or clear_faults().
  void hold_closes();
  std::uint64_t num_held_closes() const;
  void let_closes();
  // Power loss. `keep_share` of unsynced sectors and folders survive, chosen by `seed`. Ends a freeze.
  void crash(double keep_share, std::uint64_t seed);
  // Flips one bit of a stored file.
  void damage(const std::string& path, std::uint64_t offset);

  std::uint64_t num_syncs() const { return num_syncs_; }
  std::uint64_t num_ops(Op op) const;
  std::uint64_t stored_bytes();
  // Sorted paths of all files under `path`.
  std::vector<std::string> files_under(const std::string& path);

  // --- Env ---
  Status open(const std::string& path, OpenMode mode, bool direct, std::unique_ptr<File>* out) override;
  Status make_dir(const std::string& path) override;
  Status remove_file(const std::string& path) override;
  Status remove_dir(const std::string& path) override;
  Status rename(const std::string& from, const std::string& to) override;
  Status link(const std::string& from, const std::string& to) override;
  Status list(const std::string& path, std::vector<std::string>* names) override;
  Status sync_dir(const std::string& path) override;
  bool exists(const std::string& path) override;
  Status file_size(const std::string& path, std::uint64_t* out) override;
  Status free_bytes(const std::string& path, std::uint64_t* out) override;
  Status direct_alignment(const std::string& path, std::uint32_t* out) override;
  Status lock(const std::string& path, std::unique_ptr<FileLock>* out) override;
  Status new_engine(IoBackend backend, std::uint32_t depth, std::unique_ptr<IoEngine>* out) override;
  std::uint64_t max_open_files() override { return 64; }

 private:
  struct Node;
  class MemoryFile;
  class MemoryLock;
  using NodePtr = std::shared_ptr<Node>;
  struct Fault {
    std::uint64_t at = 0;
    std::uint64_t until = 0;
    StatusKind kind = StatusKind::Ok;
  };

  NodePtr find(const std::string& path) const;
  Status find_parent(const std::string& path, NodePtr* parent, std::string* name) const;
  Status count(Op op, const std::string& context);
  void crash_node(const NodePtr& node, double keep_share, std::mt19937_64* rng);
  Status read(Node* node, const std::string& path, std::uint64_t offset, void* buffer, std::size_t n, std::size_t* got);
  Status write(Node* node, const std::string& path, std::uint64_t offset, const void* buffer, std::size_t n);
  Status sync(Node* node, const std::string& path);
  bool take_sync();
  void close(const NodePtr& node);
  static bool has_name(const NodePtr& folder, const Node* node);
  NodePtr copy_tree(const NodePtr& node, std::map<Node*, NodePtr>* copies) const;

  mutable std::mutex mutex_;
  NodePtr root_;
  NodePtr frozen_root_;  // the tree when the power failed
  std::map<Op, Fault> faults_;
  std::map<Op, std::uint64_t> num_ops_;
  std::set<std::string> locked_;
  std::uint64_t num_syncs_ = 0;
  std::uint64_t freeze_at_ = UINT64_MAX;
  std::uint64_t short_read_at_ = UINT64_MAX;
  std::uint64_t flip_at_ = UINT64_MAX;
  std::uint64_t capacity_bytes_ = 0;
  std::uint64_t stored_bytes_ = 0;
  std::uint32_t read_delay_us_ = 0;
  std::condition_variable reads_let_;
  std::uint64_t num_reads_let_ = UINT64_MAX, num_held_reads_ = 0, max_held_bytes_ = UINT64_MAX;
  std::condition_variable closes_let_;
  bool closes_are_held_ = false;
  std::uint64_t num_held_closes_ = 0;
};

}  // namespace kstep
