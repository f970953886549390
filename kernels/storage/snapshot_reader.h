// SnapshotReader: a committed snapshot, read-only, while training goes on.
//
// Purpose: evaluation, export, verification. Needs no lock: a snapshot's files never change. Deleting
// the snapshot while it is being read makes later reads fail with NotFound.
// Ownership: owns its index, files and engine. Thread rule: one thread at a time.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "storage/row_log.h"
#include "storage/snapshot_catalog.h"

namespace kstep {

struct VerifyReport {
  std::uint64_t num_segments = 0;
  std::uint64_t num_records = 0;       // all versions
  std::uint64_t num_live_records = 0;  // newest versions
  std::uint64_t file_bytes = 0;
  std::vector<std::string> failures;   // each says file, offset and what is wrong
};

class SnapshotReader {
 public:
  // Reads the manifest and the footers. `env` null: Env::posix().
  static Status open(Env* env, const std::vector<std::string>& paths, const std::string& name, std::unique_ptr<SnapshotReader>* out);

  const Manifest& manifest() const { return manifest_; }
  // Null when the snapshot has no such table.
  TableState* find_table(const std::string& name);
  // Rows of one log; slots from the table's index. A row that the index does not have was never touched.
  Status read(ReadRow* rows, std::size_t num_rows);
  // Calls visit(row_id, payload) for every materialised row of a table, in file order, checking every record.
  Status for_each_row(TableState* table, const std::function<Status(std::uint64_t, const std::byte*)>& visit);
  // Reads every byte of every segment. Fails only when it cannot go on; damage is listed in the report.
  Status verify(VerifyReport* report);

 private:
  SnapshotReader(Env* env, const std::vector<std::string>& paths);
  // Calls visit(ordinal, record, tail, bytes, is_intact) for every record of a segment.
  template <typename Visit>
  Status scan_segment(RowLog* log, std::uint32_t ordinal, Visit visit);

  SnapshotCatalog catalog_;
  Manifest manifest_;
  StoreContext context_;
  std::vector<std::unique_ptr<RowLog>> logs_;
};

}  // namespace kstep
