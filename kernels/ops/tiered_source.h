// TieredStore: the torch class behind `TieredTables` in Python; rows in a DRAM cache over a row store.
//
// Purpose: opens a TieredRows, hands its rows to one RowGroup through `source()`, and offers what belongs to the store and
// not to a training step: flush, snapshots, space, counters, close.
// Ownership: TieredStore and the source share one TieredRows, which lives until close() or until both are gone.
// Threads: every call locks; a training step in one thread and a snapshot in another wait for each other.
#pragma once

#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/row_group.h"
#include "tier/tiered_rows.h"

namespace kstep {

using IntDict = c10::Dict<std::string, int64_t>;

// A TieredRows that can be closed under its users, who get an error from then on.
struct SharedTieredRows {
  std::mutex mutex;
  std::vector<TableSpec> tables;
  std::string where;                 // first path, for messages
  std::unique_ptr<TieredRows> rows;  // null once closed
  std::size_t num_open_tickets = 0;

  Status checked(TieredRows** out) const;
};

class TieredStore : public torch::CustomClassHolder {
 public:
  explicit TieredStore(std::shared_ptr<SharedTieredRows> shared) : shared_(std::move(shared)) {}

  // For one RowGroup; throws when called again.
  c10::intrusive_ptr<RowSourceHolder> source();
  void flush();
  void snapshot(const std::string& name, const std::string& metadata);
  void remove_snapshot(const std::string& name);
  StringList snapshots() const;
  void cancel_prefetch();
  // Brings up the rows of a batch and marks them as changed, as a training step does, without computing anything: what is
  // left of a step when compute is free. `unique_rows` and `table_offsets` as dedup gives them.
  void replay(const at::Tensor& unique_rows, const at::Tensor& table_offsets);
  // Bytes by name, as SpaceUsage has them, and `total_bytes`.
  IntDict usage() const;
  // One dictionary per segment, with the members of SegmentInfo.
  std::vector<IntDict> segment_map() const;
  std::vector<FloatDict> counters() const;
  std::string io_backend() const;
  int64_t cache_memory_bytes() const;
  // Writes nothing: what no snapshot holds is gone. Throws while a lookup or an update is running. Closing twice is fine.
  void close();

 private:
  std::shared_ptr<SharedTieredRows> shared_;
  bool has_source_ = false;
};

// Adds TieredStore and the tools for snapshots (snapshot_tools.cpp) to the library.
void register_tiered(torch::Library& library);
void register_snapshot_tools(torch::Library& library);

StoreOptions store_options(const StringList& paths, std::vector<TableSpec> tables, const std::string& io_backend,
                           const IntDict& options);

}  // namespace kstep
