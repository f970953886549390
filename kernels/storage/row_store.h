// RowStore: the durable home of the rows of some tables: logs, index, cleaner, snapshots, quota, lock.
//
// Purpose: what the cache above needs of the SSD tier. One store per rank; it may span several drives.
// Rows enter with append() in batches, are read by read(), and survive a crash only through
// snapshot(). docs/format.md describes the bytes, docs/row_store.md how it works inside.
// Ownership: owns everything below it and the locks of its paths. Thread rule: one thread at a time.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "storage/cleaner.h"
#include "storage/row_log.h"
#include "storage/snapshot_catalog.h"

namespace kstep {

struct StoreOptions {
  // --- what is stored ---
  std::vector<std::string> paths;  // folders of this rank, one per drive; the parents must exist; at most 16
  std::vector<TableSpec> tables;
  std::string restore_snapshot;    // empty: no rows at first (snapshots on the paths are kept)
  // --- bounds ---
  std::uint64_t quota_bytes = 0;              // hard, over all paths and snapshots; 0: none
  double space_factor = 1.5;                  // unheld bytes over units of live rows
  std::uint64_t segment_bytes = 64ull << 20;
  std::uint32_t max_open_files = 0;           // 0: from the process's limit
  // --- speed; never changes a result ---
  IoBackend backend = IoBackend::Auto;
  std::uint32_t queue_depth = 128;
  bool use_direct_io = true;
  std::vector<double> path_weights;           // part of the rows that each path takes, over their sum; empty: equal parts
  std::vector<std::uint64_t> path_bytes_per_s;  // most that is asked of each path, 0: no bound; empty: none has one
  Env* env = nullptr;                         // null: Env::posix()
};

// Where the bytes are.
struct SpaceUsage {
  std::uint64_t live_unit_bytes = 0;      // read units of live rows
  std::uint64_t unheld_bytes = 0;         // live segments that no snapshot holds
  std::uint64_t snapshot_bytes = 0;       // segments that snapshots hold, each once
  std::uint64_t snapshot_only_bytes = 0;  // of these, no longer in the live log
  std::uint64_t total_bytes() const { return unheld_bytes + snapshot_bytes; }
};

// One segment as `inspect` shows it.
struct SegmentInfo {
  std::uint64_t id = 0;
  std::uint32_t path = 0;
  std::uint32_t payload_bytes = 0;
  std::uint32_t num_records = 0;
  std::uint32_t num_live = 0;
  std::uint32_t num_holders = 0;
  std::uint64_t file_bytes = 0;
  bool is_open = false;
  Stream stream = Stream::Warm;
};

class RowStore {
 public:
  // Takes the locks (Busy when another process has them), recovers, and restores the snapshot asked for.
  static Status open(StoreOptions options, std::unique_ptr<RowStore>* out);
  ~RowStore();

  std::size_t num_tables() const { return context_.tables.size(); }
  TableState* table(std::size_t index) { return context_.tables[index].get(); }
  const TableState& table(std::size_t index) const { return *context_.tables[index]; }

  // Starts an append batch and makes room for `record_bytes`: repeats failed writes, cleans if the quota
  // is near. Fails (NoSpace, Io) before anything changed. A row may be appended once per batch.
  Status begin_batch(std::uint64_t record_bytes);
  // On failure the row keeps its earlier version.
  Status append(TableState* table, std::uint64_t row, const std::byte* payload) { return table->log->append(table, row, payload); }
  // Lets the cleaner keep pace with what was appended. While *set_awaited() is true it begins no more, or all when space runs out.
  Status end_batch();
  // REQUIRES: all rows of one log.
  Status read(ReadRow* rows, std::size_t num_rows);
  // One cleaning increment for an idle moment. *did_work is false when there is nothing worth doing.
  Status clean_when_idle(bool* did_work);
  // `is_awaited` tells whether somebody waits for what this thread does next; it must outlive the store.
  void set_awaited(const std::atomic<bool>* is_awaited) { context_.is_awaited = is_awaited; }

  // Seals and syncs what was appended.
  Status flush();
  // Durable when it returns ok. `metadata` is the caller's text, kept in the manifest.
  Status snapshot(const std::string& name, const std::string& metadata);
  Status remove_snapshot(const std::string& name);
  // Newest last; damaged ones are left out and listed by damaged_snapshots().
  std::vector<std::string> snapshots() const;
  const std::vector<std::string>& damaged_snapshots() const { return damaged_snapshots_; }

  SpaceUsage usage() const;
  std::vector<SegmentInfo> segment_map() const;
  // Counters of the whole store, by name with the unit last.
  std::map<std::string, double> counters() const;
  const char* io_backend() const { return context_.reads->name(); }
  std::uint64_t index_bytes() const;
  double seconds_cleaning() const { return seconds_cleaning_ + context_.seconds_beside_reads; }
  // The part of it in which nothing else went on for who waits: not beside reads, unless these were all done before.
  double seconds_cleaning_alone() const { return seconds_cleaning_ + context_.seconds_reads_held_up; }

 private:
  struct HeldSegment {
    std::uint32_t num_holders = 0;
    std::uint64_t file_bytes = 0;
  };

  explicit RowStore(StoreOptions options);
  Status check_options() const;
  Status take_locks();
  Status check_headers();
  Status read_manifests();
  Status make_tables(const Manifest* restored);
  Status make_live_folders();
  Status restore(const Manifest& manifest);
  RowLog* log_for(std::uint32_t payload_bytes);
  Manifest make_manifest(const std::string& name, const std::string& metadata) const;
  void hold(const Manifest& manifest);
  void unhold(const Manifest& manifest);
  Status make_room(std::uint64_t bytes);
  bool clean_beside_reads();

  StoreOptions options_;
  std::unique_ptr<Env> throttled_;  // null without bounds; outlives the engines in context_
  Env* env_;
  StoreContext context_;
  SnapshotCatalog catalog_;
  std::vector<std::unique_ptr<FileLock>> locks_;
  std::vector<std::unique_ptr<RowLog>> logs_;
  std::vector<std::unique_ptr<Cleaner>> cleaners_;  // by log
  std::map<std::string, Manifest> manifests_;       // committed snapshots
  std::vector<std::string> damaged_snapshots_;
  std::map<std::uint64_t, HeldSegment> held_;       // by segment id
  std::vector<std::uint64_t> bytes_before_batch_;   // by log, to pace the cleaner
  double seconds_cleaning_ = 0;
};

}  // namespace kstep
