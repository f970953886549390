// compact_snapshot: writes a snapshot anew without its stale records.
//
// Purpose: gives space back that the cleaner may not touch, because a snapshot holds the segments.
#pragma once

#include <cstdint>
#include <string>

#include "storage/row_store.h"

namespace kstep {

struct CompactReport {
  std::uint64_t num_rows = 0;
  std::uint64_t bytes_before = 0;  // segments of the old snapshot
  std::uint64_t bytes_after = 0;   // segments of the new one
};

// Copies the newest version of every row of snapshot `from` into new segments and commits them as snapshot `into`, with
// the same metadata. `from` stays; both fit on the drive for a while. `options` has the paths; its tables are ignored.
// Takes the store's locks: fails with Busy while another process trains on it.
Status compact_snapshot(StoreOptions options, const std::string& from, const std::string& into, CompactReport* report);

}  // namespace kstep
