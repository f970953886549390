#include "storage/compact.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "storage/snapshot_reader.h"

namespace kstep {
namespace {

constexpr std::size_t kRowsPerBatch = 2048;

std::uint64_t segment_bytes_of(const Manifest& manifest) {
  std::uint64_t bytes = 0;
  for (const ManifestLog& log : manifest.logs) {
    for (const ManifestSegment& segment : log.segments) bytes += segment.file_bytes;
  }
  return bytes;
}

// In the order of the log, so that the old segments are read from front to back.
std::vector<std::pair<std::uint32_t, std::uint64_t>> rows_by_slot(const RowIndex& index) {
  std::vector<std::pair<std::uint32_t, std::uint64_t>> rows;
  rows.reserve(index.num_materialised());
  index.for_each([&](std::uint64_t row, std::uint32_t slot) { rows.emplace_back(slot, row); });
  std::sort(rows.begin(), rows.end());
  return rows;
}

Status copy_table(SnapshotReader* reader, TableState* from, RowStore* store, TableState* into) {
  const std::size_t payload_bytes = from->spec.schema.payload_bytes();
  const std::vector<std::pair<std::uint32_t, std::uint64_t>> rows = rows_by_slot(from->index);
  AlignedBuffer payloads(kRowsPerBatch * payload_bytes);
  std::vector<ReadRow> reads;
  for (std::size_t begin = 0; begin < rows.size(); begin += kRowsPerBatch) {
    const std::size_t end = std::min(rows.size(), begin + kRowsPerBatch);
    reads.clear();
    for (std::size_t i = begin; i < end; ++i) {
      reads.push_back({rows[i].first, from, rows[i].second, payloads.data() + (i - begin) * payload_bytes});
    }
    KSTEP_RETURN_IF_ERROR(reader->read(reads.data(), reads.size()));
    KSTEP_RETURN_IF_ERROR(store->begin_batch((end - begin) * into->log->layout().record_bytes));
    for (std::size_t i = begin; i < end; ++i) {
      if (i + kIndexAhead < end) into->index.prefetch(rows[i + kIndexAhead].second);
      KSTEP_RETURN_IF_ERROR(store->append(into, rows[i].second, payloads.data() + (i - begin) * payload_bytes));
    }
    KSTEP_RETURN_IF_ERROR(store->end_batch());
  }
  return {};
}

}  // namespace

Status compact_snapshot(StoreOptions options, const std::string& from, const std::string& into, CompactReport* report) {
  *report = CompactReport();
  KSTEP_RETURN_IF_ERROR(SnapshotCatalog::check_name(into));
  const std::vector<std::string> paths = options.paths;
  Env* env = options.env;
  std::unique_ptr<SnapshotReader> reader;
  KSTEP_RETURN_IF_ERROR(SnapshotReader::open(env, paths, from, &reader));
  options.tables = reader->manifest().tables;
  options.restore_snapshot.clear();
  std::unique_ptr<RowStore> store;
  KSTEP_RETURN_IF_ERROR(RowStore::open(std::move(options), &store));
  const std::vector<std::string> names = store->snapshots();
  if (std::find(names.begin(), names.end(), into) != names.end()) {
    return Status::invalid("snapshot '" + into + "'", "exists at " + paths[0] + " already; choose another name for the compacted snapshot");
  }
  for (std::size_t t = 0; t < store->num_tables(); ++t) {
    TableState* found = reader->find_table(store->table(t)->spec.name);
    KSTEP_RETURN_IF_ERROR(copy_table(reader.get(), found, store.get(), store->table(t)));
    report->num_rows += found->index.num_materialised();
  }
  KSTEP_RETURN_IF_ERROR(store->snapshot(into, reader->manifest().metadata));
  std::unique_ptr<SnapshotReader> compacted;
  KSTEP_RETURN_IF_ERROR(SnapshotReader::open(env, paths, into, &compacted));
  report->bytes_before = segment_bytes_of(reader->manifest());
  report->bytes_after = segment_bytes_of(compacted->manifest());
  return {};
}

}  // namespace kstep
