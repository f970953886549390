// Snapshot: the torch class with which Python reads, checks, exports and compacts committed snapshots, without a lock.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <set>

#include "cache/row_cache.h"
#include "ops/tiered_source.h"
#include "storage/compact.h"
#include "storage/record.h"
#include "tier/snapshot_rows.h"

namespace kstep {
namespace {

using VerifyResult = std::tuple<IntDict, StringList>;

class Snapshot : public torch::CustomClassHolder {
 public:
  Snapshot(std::shared_ptr<SnapshotReader> reader) : reader_(std::move(reader)), mutex_(std::make_shared<std::mutex>()) {}

  static c10::intrusive_ptr<Snapshot> open(const StringList& paths, const std::string& name) {
    std::unique_ptr<SnapshotReader> reader;
    check(SnapshotReader::open(nullptr, paths, name, &reader));
    return c10::make_intrusive<Snapshot>(std::shared_ptr<SnapshotReader>(std::move(reader)));
  }

  // Committed snapshots of a store; their manifests may still be damaged.
  static StringList names(const StringList& paths) {
    StringList result;
    check(SnapshotCatalog(&Env::posix(), paths).list(&result));
    return result;
  }

  // Names of snapshots that can be read, newest last.
  static StringList names_by_age(const StringList& paths) {
    SnapshotCatalog catalog(&Env::posix(), paths);
    StringList found;
    check(catalog.list(&found));
    std::vector<std::tuple<std::uint64_t, std::uint32_t, std::string>> by_age;
    for (const std::string& name : found) {
      Manifest manifest;
      if (catalog.read(name, &manifest).ok()) by_age.emplace_back(manifest.next_segment_id, manifest.next_epoch, name);
    }
    std::sort(by_age.begin(), by_age.end());
    StringList result;
    for (const auto& item : by_age) result.push_back(std::get<2>(item));
    return result;
  }

  // The checked header of one path: its place among the paths of the store.
  static IntDict header(const std::string& path) {
    std::string text;
    StoreHeader header;
    check(Env::posix().read_text(path + "/STORE", &text));
    check(StoreHeader::decode(path + "/STORE", text, &header));
    IntDict result;
    result.insert("path_index", header.path_index);
    result.insert("num_paths", header.num_paths);
    return result;
  }

  static IntDict compact(const StringList& paths, const std::string& from, const std::string& into, const std::string& io_backend,
                         const IntDict& options) {
    CompactReport report;
    check(compact_snapshot(store_options(paths, {}, io_backend, options), from, into, &report));
    IntDict result;
    result.insert("num_rows", static_cast<int64_t>(report.num_rows));
    result.insert("bytes_before", static_cast<int64_t>(report.bytes_before));
    result.insert("bytes_after", static_cast<int64_t>(report.bytes_after));
    return result;
  }

  // Takes the store's locks, so that no training run counts on the snapshot.
  static void remove(const StringList& paths, const std::string& name) {
    std::vector<std::unique_ptr<FileLock>> locks(paths.size());
    for (std::size_t i = 0; i < paths.size(); ++i) check(Env::posix().lock(paths[i] + "/LOCK", &locks[i]));
    check(SnapshotCatalog(&Env::posix(), paths).remove(name));
  }

  // How rows of one payload size lie in DRAM and on the drive.
  static IntDict record_layout(int64_t payload_bytes, int64_t segment_bytes) {
    TORCH_CHECK_VALUE(payload_bytes > 0 && payload_bytes % 4 == 0 && segment_bytes > 0, "payload_bytes ", payload_bytes,
                      ", segment_bytes ", segment_bytes);
    const RecordLayout layout =
        RecordLayout::for_payload(static_cast<std::uint32_t>(payload_bytes), static_cast<std::uint64_t>(segment_bytes));
    RecordSchema schema;
    check(RecordSchema::make({{"weight", DType::F32, static_cast<std::uint32_t>(payload_bytes / 4)}}, &schema));
    IntDict result;
    result.insert("record_bytes", layout.record_bytes);
    result.insert("unit_bytes", layout.unit_bytes);
    result.insert("records_per_unit", layout.records_per_unit);
    result.insert("units_per_segment", layout.max_units);
    result.insert("segment_header_bytes", kSegmentHeaderBytes);
    result.insert("stride_bytes", schema.stride_bytes());
    result.insert("slot_overhead_bytes", static_cast<int64_t>(RowCache::kOverheadBytes));
    return result;
  }

  c10::intrusive_ptr<RowSourceHolder> source() const {
    auto holder = c10::make_intrusive<RowSourceHolder>();
    holder->source = std::make_unique<SnapshotRows>(reader_, mutex_);
    return holder;
  }

  // The manifest's JSON, one line.
  std::string manifest() const {
    const std::string text = reader_->manifest().encode();
    return text.substr(0, text.find('\n'));
  }

  std::vector<IntDict> segments() const {
    std::lock_guard<std::mutex> lock(*mutex_);
    std::vector<IntDict> result;
    std::set<const RowLog*> seen;
    for (const TableSpec& spec : reader_->manifest().tables) {
      const RowLog* log = reader_->find_table(spec.name)->log;
      if (!seen.insert(log).second) continue;
      for (const Segment& segment : log->segments()) {
        IntDict item;
        item.insert("segment_id", static_cast<int64_t>(segment.id));
        item.insert("path", segment.path);
        item.insert("payload_bytes", log->layout().payload_bytes);
        item.insert("num_records", segment.num_records);
        item.insert("num_live", segment.num_live);
        item.insert("num_holders", 1);
        item.insert("file_bytes", static_cast<int64_t>(segment.file_bytes));
        item.insert("is_open", 0);
        result.push_back(item);
      }
    }
    return result;
  }

  // Rows of a table that have a record, and the bytes of the index that finds them.
  IntDict table(const std::string& name) const {
    std::lock_guard<std::mutex> lock(*mutex_);
    const TableState& state = *checked_table(name);
    IntDict result;
    result.insert("materialised_rows", static_cast<int64_t>(state.index.num_materialised()));
    result.insert("index_bytes", static_cast<int64_t>(state.index.memory_bytes()));
    result.insert("payload_bytes", state.spec.schema.payload_bytes());
    return result;
  }

  // Rows in [begin, end) that have a record, ascending.
  at::Tensor materialised_rows(const std::string& name, int64_t begin, int64_t end) const {
    std::lock_guard<std::mutex> lock(*mutex_);
    const TableState& state = *checked_table(name);
    TORCH_CHECK_VALUE(begin >= 0 && begin <= end && end <= static_cast<int64_t>(state.spec.num_rows), "rows ", begin, " to ", end,
                      " of table '", name, "' of ", state.spec.num_rows, " rows");
    std::vector<int64_t> rows;
    for (int64_t row = begin; row < end; ++row) {
      if (state.index.find(static_cast<std::uint64_t>(row)) != kNoSlot) rows.push_back(row);
    }
    at::Tensor result = at::empty({static_cast<int64_t>(rows.size())}, at::kLong);
    std::copy(rows.begin(), rows.end(), result.mutable_data_ptr<int64_t>());
    return result;
  }

  // Payloads of rows, [n, payload_bytes] uint8; initial values for rows without a record.
  at::Tensor read_rows(const std::string& name, const at::Tensor& rows) const {
    TORCH_CHECK_TYPE(rows.scalar_type() == at::kLong, "rows are ", rows.scalar_type(), ", expected Long");
    TORCH_CHECK_VALUE(rows.dim() == 1 && rows.is_contiguous(), "rows must be a contiguous vector");
    std::lock_guard<std::mutex> lock(*mutex_);
    TableState* state = checked_table(name);
    const auto* ids = rows.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < rows.numel(); ++i) {
      TORCH_CHECK_VALUE(ids[i] >= 0 && ids[i] < static_cast<int64_t>(state->spec.num_rows), "row ", ids[i], " of table '", name,
                        "' of ", state->spec.num_rows, " rows");
    }
    const std::size_t payload_bytes = state->spec.schema.payload_bytes();
    at::Tensor result = at::empty({rows.numel(), static_cast<int64_t>(payload_bytes)}, at::kByte);
    std::vector<ReadRow> reads;
    std::size_t num_untouched = 0;
    check(read_payloads(reader_.get(), state, reinterpret_cast<const std::uint64_t*>(ids), static_cast<std::size_t>(rows.numel()),
                        payload_bytes, static_cast<std::byte*>(result.mutable_data_ptr()), &reads, &num_untouched));
    return result;
  }

  VerifyResult verify() const {
    std::lock_guard<std::mutex> lock(*mutex_);
    VerifyReport report;
    check(reader_->verify(&report));
    IntDict counts;
    counts.insert("num_segments", static_cast<int64_t>(report.num_segments));
    counts.insert("num_records", static_cast<int64_t>(report.num_records));
    counts.insert("num_live_records", static_cast<int64_t>(report.num_live_records));
    counts.insert("file_bytes", static_cast<int64_t>(report.file_bytes));
    return {counts, report.failures};
  }

 private:
  TableState* checked_table(const std::string& name) const {
    TableState* state = reader_->find_table(name);
    TORCH_CHECK_VALUE(state != nullptr, "snapshot '", reader_->manifest().name, "' has no table '", name, "'");
    return state;
  }

  std::shared_ptr<SnapshotReader> reader_;
  std::shared_ptr<std::mutex> mutex_;
};

}  // namespace

void register_snapshot_tools(torch::Library& library) {
  library.class_<Snapshot>("Snapshot")
      .def_static("open", &Snapshot::open)
      .def_static("names", &Snapshot::names)
      .def_static("names_by_age", &Snapshot::names_by_age)
      .def_static("header", &Snapshot::header)
      .def_static("compact", &Snapshot::compact)
      .def_static("remove", &Snapshot::remove)
      .def_static("record_layout", &Snapshot::record_layout)
      .def("source", &Snapshot::source)
      .def("manifest", &Snapshot::manifest)
      .def("segments", &Snapshot::segments)
      .def("table", &Snapshot::table)
      .def("materialised_rows", &Snapshot::materialised_rows)
      .def("read_rows", &Snapshot::read_rows)
      .def("verify", &Snapshot::verify);
}

}  // namespace kstep
