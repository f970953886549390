// TieredRows: a RowSource with a row cache in DRAM over a RowStore on SSD.
//
// Purpose: gives the kernels DRAM addresses of rows that mostly live on SSD, with the same bits as if all
// rows were in DRAM, for any cache size, prefetch depth and I/O backend. docs/row_store.md tells how.
// One I/O thread owns caches and store; the caller's thread only queues work and waits for it:
//   prefetch(batch) -> queued jobs -> rows found, read or computed, and pinned -> pin() takes them over ->
//   unpin() -> back to the cache, where they may be evicted (dirty ones are appended to the store).
// Exactness: every update happens in a pinned slot; a row of two batches is one slot, read once.
// A batch larger than the cache gets overflow slots, written down as soon as they are unpinned.
// Failure: a failed read or write fails the pin that needs it, before any update of that batch; the rows
// stay as they were and the call may be repeated.
// Ownership and threads: as RowSource says; the I/O thread is joined in the destructor.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "storage/row_store.h"
#include "tier/row_source.h"

namespace kstep {

struct TieredOptions {
  StoreOptions store;                       // with the tables
  std::vector<std::uint64_t> cache_bytes;   // DRAM per table; tables with equal payload size share theirs. 0 works.
  std::uint32_t prefetch_depth = 2;         // batches read ahead of the one in use
  std::uint32_t max_lookahead = 64;         // batches known ahead at most; later hints are dropped and counted
};

class TieredRows final : public RowSource {
 public:
  static Status make(TieredOptions options, std::unique_ptr<TieredRows>* out);
  ~TieredRows() override;

  const std::vector<TableSpec>& tables() const override { return tables_; }
  Status pin(std::uint32_t table, const std::uint64_t* unique_rows, std::size_t num_rows, PinMode mode,
             std::byte** payload_out, PinTicket* ticket) override;
  Status unpin(PinTicket ticket, bool dirty) override;
  Status prefetch(const std::vector<TableRows>& batch) override;
  // Appends every dirty row and syncs. Busy while a ticket for update is open.
  Status flush() override;
  // Per table: hits_rows, misses_rows, first_touches_rows, stall_s, read_bytes, written_bytes, ...; what belongs
  // to the whole store (write amplification, queue depth, cleaner share, ...) is repeated in every table.
  std::vector<std::map<std::string, double>> counters() const override;
  std::uint64_t num_rows_read(std::uint32_t table) const override;

  // Forgets every queued and unused prefetch; for a caller that changes its mind about the next batches.
  void cancel_prefetch();
  // flush() and a durable named state. `metadata` is the caller's text. Busy while a ticket for update is open.
  Status snapshot(const std::string& name, const std::string& metadata);
  Status remove_snapshot(const std::string& name);
  std::vector<std::string> snapshots() const;
  SpaceUsage usage() const;
  std::vector<SegmentInfo> segment_map() const;
  const char* io_backend() const { return store_->io_backend(); }
  std::uint64_t cache_memory_bytes() const;

 private:
  struct Job;
  struct TableCounters;
  struct CacheClass;
  class StallCount;

  explicit TieredRows(std::vector<TableSpec> tables);

  // --- caller's side (tiered_rows.cpp) ---
  Job* take_job(std::size_t num_rows);
  Job* match(std::uint32_t table, const std::uint64_t* rows, std::size_t num_rows);
  void cancel(Job* job);
  Status check_rows(std::uint32_t table, const std::uint64_t* rows, std::size_t num_rows) const;
  // Runs `work` on the I/O thread, after everything unpinned so far; waits for it.
  Status run_on_io_thread(const std::function<Status()>& work) const;
  std::vector<std::map<std::string, double>> collect_counters() const;

  // --- I/O thread (tiered_io.cpp) ---
  enum class Scan : std::uint8_t { Done, Stalled, RoundFull, Failed };
  void io_loop();
  bool choose_round();
  void run_round();
  bool is_caller_away(std::unique_lock<std::mutex>* lock);
  Scan scan(Job* job, Status* status);
  Scan find_room(Job* job, CacheClass* cache_class, std::uint32_t* slot, Status* status);
  Status append_slot(CacheClass* cache_class, std::uint32_t slot);
  Status close_batch();
  Status read_misses();
  void forget_misses();
  void finish_round(const Status& read_status, Job* failed_job, const Status& scan_status);
  void process_releases();
  void announce_new();
  Status drain_overflow();
  void drop_overflow(std::uint32_t min_calm_rounds);
  void unpin_slots(Job* job);
  Status flush_dirty();

  const std::vector<TableSpec> tables_;
  std::uint32_t prefetch_depth_ = 0;
  std::uint32_t max_lookahead_ = 0;
  std::unique_ptr<RowStore> store_;                   // used by the I/O thread only
  std::vector<std::unique_ptr<CacheClass>> classes_;  // likewise; one per payload size
  std::vector<CacheClass*> class_of_table_;
  std::vector<std::unique_ptr<TableCounters>> counters_;

  mutable std::mutex mutex_;  // guards the next block, and the `state` and flags of every job
  mutable std::condition_variable work_ready_;  // for the I/O thread
  mutable std::condition_variable job_done_;    // for the caller
  std::vector<std::unique_ptr<Job>> jobs_;
  std::vector<Job*> idle_jobs_;
  std::deque<Job*> urgent_;                    // wanted now
  std::deque<Job*> queue_;                     // prefetches, in order
  std::vector<Job*> unannounced_;              // prefetches whose rows the cache does not know of yet
  std::vector<std::deque<Job*>> prefetched_;   // by table: unused prefetches, in order
  std::vector<Job*> released_;                 // unpinned or cancelled
  mutable const std::function<Status()>* command_ = nullptr;
  mutable Status command_status_;
  std::uint32_t last_batch_ = 0;     // newest batch announced
  std::uint32_t current_batch_ = 0;  // newest batch pinned
  std::size_t num_update_tickets_ = 0;
  std::uint64_t num_dropped_hints_ = 0;
  std::uint64_t num_failed_prefetches_ = 0;
  std::atomic<bool> is_caller_waiting_{false};  // written under the mutex; the cleaner looks without it
  std::chrono::steady_clock::time_point waiting_since_;  // of the caller, while it waits
  std::chrono::steady_clock::time_point last_handover_;  // when the caller last got rows
  bool stopping_ = false;

  // Used by the I/O thread only.
  std::vector<Job*> round_;
  std::vector<Job*> releasing_;
  std::vector<Job*> announcing_;
  std::uint32_t round_batch_ = 0;  // current_batch_ when the round began
  std::size_t num_misses_ = 0;     // in this round
  bool is_batch_open_ = false;
  std::uint64_t batch_bytes_left_ = 0;
  bool is_stalled_ = false;        // a prefetch found every slot pinned
  bool may_clean_ = false;         // something was appended since cleaning last found nothing to do
  Status background_status_;       // a failure of idle cleaning, reported by the next round
  double cleaner_stall_s_ = 0;

  std::thread thread_;
};

}  // namespace kstep
