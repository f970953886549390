#include "ops/tiered_source.h"

#include <algorithm>

namespace kstep {
namespace {

// The rows of a SharedTieredRows as one RowGroup sees them.
class TieredSource final : public RowSource {
 public:
  explicit TieredSource(std::shared_ptr<SharedTieredRows> shared) : shared_(std::move(shared)) {}

  const std::vector<TableSpec>& tables() const override { return shared_->tables; }

  Status pin(std::uint32_t table, const std::uint64_t* unique_rows, std::size_t num_rows, PinMode mode,
             std::byte** payload_out, PinTicket* ticket) override {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    *ticket = kNoTicket;
    TieredRows* rows = nullptr;
    KSTEP_RETURN_IF_ERROR(shared_->checked(&rows));
    Status status = rows->pin(table, unique_rows, num_rows, mode, payload_out, ticket);
    if (status.ok()) {
      ++shared_->num_open_tickets;
    } else if (table < shared_->tables.size()) {
      status.context = "table '" + shared_->tables[table].name + "' of the row store at " + shared_->where + ": " + status.context;
    }
    return status;
  }

  Status unpin(PinTicket ticket, bool dirty) override {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    TieredRows* rows = nullptr;
    KSTEP_RETURN_IF_ERROR(shared_->checked(&rows));
    Status status = rows->unpin(ticket, dirty);
    if (status.ok()) --shared_->num_open_tickets;
    return status;
  }

  Status prefetch(const std::vector<TableRows>& batch) override {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    TieredRows* rows = nullptr;
    KSTEP_RETURN_IF_ERROR(shared_->checked(&rows));
    return rows->prefetch(batch);
  }

  Status flush() override {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    TieredRows* rows = nullptr;
    KSTEP_RETURN_IF_ERROR(shared_->checked(&rows));
    return rows->flush();
  }

  std::uint64_t num_rows_read(std::uint32_t table) const override {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    return shared_->rows == nullptr ? 0 : shared_->rows->num_rows_read(table);
  }

  std::vector<std::map<std::string, double>> counters() const override {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    if (shared_->rows == nullptr) return std::vector<std::map<std::string, double>>(shared_->tables.size());
    return shared_->rows->counters();
  }

 private:
  std::shared_ptr<SharedTieredRows> shared_;
};

IoBackend parse_backend(const std::string& name) {
  if (name == "auto") return IoBackend::Auto;
  if (name == "uring") return IoBackend::Uring;
  TORCH_CHECK_VALUE(name == "threads", "io_backend '", name, "', expected auto, uring or threads");
  return IoBackend::Threads;
}

c10::intrusive_ptr<TieredStore> open_tiered(const StringList& names, const IntList& table_ids, const IntList& num_rows,
                                            const IntList& dims, const StringList& fields, const StringList& init_kinds,
                                            const std::vector<double>& init_a, const std::vector<double>& init_b,
                                            const IntList& seeds, const IntList& first_columns, const StringList& paths,
                                            const IntList& cache_bytes, const std::string& restore_snapshot,
                                            const std::string& io_backend, const IntDict& options) {
  auto shared = std::make_shared<SharedTieredRows>();
  shared->tables = table_specs(names, table_ids, num_rows, dims, fields, init_kinds, init_a, init_b, seeds, first_columns);
  TORCH_CHECK_VALUE(!paths.empty(), "a row store needs at least one path");
  shared->where = paths.front();
  TieredOptions tiered;
  tiered.store = store_options(paths, shared->tables, io_backend, options);
  tiered.store.restore_snapshot = restore_snapshot;
  for (const int64_t bytes : cache_bytes) {
    TORCH_CHECK_VALUE(bytes >= 0, "cache_bytes ", bytes);
    tiered.cache_bytes.push_back(static_cast<std::uint64_t>(bytes));
  }
  tiered.prefetch_depth = static_cast<std::uint32_t>(options.at("prefetch_depth"));
  tiered.max_lookahead = static_cast<std::uint32_t>(options.at("lookahead"));
  check(TieredRows::make(std::move(tiered), &shared->rows));
  return c10::make_intrusive<TieredStore>(std::move(shared));
}

}  // namespace

Status SharedTieredRows::checked(TieredRows** out) const {
  *out = rows.get();
  return rows != nullptr ? Status() : Status::not_found("row store at " + where, "is closed; open it again to use its rows");
}

StoreOptions store_options(const StringList& paths, std::vector<TableSpec> tables, const std::string& io_backend,
                           const IntDict& options) {
  StoreOptions store;
  store.paths = paths;
  store.tables = std::move(tables);
  store.backend = parse_backend(io_backend);
  store.quota_bytes = static_cast<std::uint64_t>(options.at("quota_bytes"));
  store.segment_bytes = static_cast<std::uint64_t>(options.at("segment_bytes"));
  store.space_factor = static_cast<double>(options.at("space_percent")) / 100.0;
  store.queue_depth = static_cast<std::uint32_t>(options.at("queue_depth"));
  for (std::size_t path = 0; path < paths.size() && options.contains("path_weight_0"); ++path) {
    store.path_weights.push_back(static_cast<double>(options.at("path_weight_" + std::to_string(path))));
  }
  for (std::size_t path = 0; path < paths.size() && options.contains("path_bytes_per_s_0"); ++path) {
    store.path_bytes_per_s.push_back(static_cast<std::uint64_t>(options.at("path_bytes_per_s_" + std::to_string(path))));
  }
  return store;
}

c10::intrusive_ptr<RowSourceHolder> TieredStore::source() {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  TORCH_CHECK_VALUE(!has_source_, "the rows of this store already belong to a row group");
  has_source_ = true;
  auto holder = c10::make_intrusive<RowSourceHolder>();
  holder->source = std::make_unique<TieredSource>(shared_);
  return holder;
}

void TieredStore::flush() {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  TieredRows* rows = nullptr;
  check(shared_->checked(&rows));
  check(rows->flush());
}

void TieredStore::snapshot(const std::string& name, const std::string& metadata) {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  TieredRows* rows = nullptr;
  check(shared_->checked(&rows));
  check(rows->snapshot(name, metadata));
}

void TieredStore::remove_snapshot(const std::string& name) {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  TieredRows* rows = nullptr;
  check(shared_->checked(&rows));
  check(rows->remove_snapshot(name));
}

StringList TieredStore::snapshots() const {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  TieredRows* rows = nullptr;
  check(shared_->checked(&rows));
  return rows->snapshots();
}

void TieredStore::cancel_prefetch() {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  TieredRows* rows = nullptr;
  check(shared_->checked(&rows));
  rows->cancel_prefetch();
}

void TieredStore::replay(const at::Tensor& unique_rows, const at::Tensor& table_offsets) {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  TieredRows* rows = nullptr;
  check(shared_->checked(&rows));
  TORCH_CHECK_TYPE(unique_rows.scalar_type() == at::kLong && table_offsets.scalar_type() == at::kLong, "rows and offsets must be Long");
  TORCH_CHECK_VALUE(unique_rows.is_contiguous() && table_offsets.is_contiguous() &&
                        table_offsets.numel() == static_cast<int64_t>(shared_->tables.size()) + 1,
                    "rows and offsets of another group of tables");
  const auto* ids = reinterpret_cast<const std::uint64_t*>(unique_rows.const_data_ptr<int64_t>());
  const auto* offsets = table_offsets.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(offsets[0] == 0 && offsets[shared_->tables.size()] == unique_rows.numel(), "table_offsets must run from 0 to ",
                    unique_rows.numel());
  TORCH_CHECK_VALUE(std::is_sorted(offsets, offsets + table_offsets.numel()), "table_offsets must not decrease");
  std::vector<std::byte*> payloads(static_cast<std::size_t>(unique_rows.numel()));
  std::vector<PinTicket> tickets(shared_->tables.size(), kNoTicket);
  for (const PinMode mode : {PinMode::Read, PinMode::Update}) {
    Status status;
    for (std::size_t t = 0; t < tickets.size() && status.ok(); ++t) {
      status = rows->pin(static_cast<std::uint32_t>(t), ids + offsets[t], static_cast<std::size_t>(offsets[t + 1] - offsets[t]), mode,
                         payloads.data() + offsets[t], &tickets[t]);
    }
    for (PinTicket& ticket : tickets) {
      if (ticket == kNoTicket) continue;
      const Status unpinned = rows->unpin(ticket, mode == PinMode::Update);
      if (status.ok()) status = unpinned;
      ticket = kNoTicket;
    }
    check(status);
  }
}

IntDict TieredStore::usage() const {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  TieredRows* rows = nullptr;
  check(shared_->checked(&rows));
  const SpaceUsage usage = rows->usage();
  IntDict result;
  result.insert("live_unit_bytes", static_cast<int64_t>(usage.live_unit_bytes));
  result.insert("unheld_bytes", static_cast<int64_t>(usage.unheld_bytes));
  result.insert("snapshot_bytes", static_cast<int64_t>(usage.snapshot_bytes));
  result.insert("snapshot_only_bytes", static_cast<int64_t>(usage.snapshot_only_bytes));
  result.insert("total_bytes", static_cast<int64_t>(usage.total_bytes()));
  return result;
}

std::vector<IntDict> TieredStore::segment_map() const {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  TieredRows* rows = nullptr;
  check(shared_->checked(&rows));
  std::vector<IntDict> result;
  for (const SegmentInfo& segment : rows->segment_map()) {
    IntDict item;
    item.insert("segment_id", static_cast<int64_t>(segment.id));
    item.insert("path", segment.path);
    item.insert("payload_bytes", segment.payload_bytes);
    item.insert("num_records", segment.num_records);
    item.insert("num_live", segment.num_live);
    item.insert("num_holders", segment.num_holders);
    item.insert("file_bytes", static_cast<int64_t>(segment.file_bytes));
    item.insert("is_open", segment.is_open ? 1 : 0);
    result.push_back(item);
  }
  return result;
}

std::vector<FloatDict> TieredStore::counters() const {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  TieredRows* rows = nullptr;
  check(shared_->checked(&rows));
  std::vector<FloatDict> result;
  for (const std::map<std::string, double>& table : rows->counters()) {
    FloatDict dict;
    for (const auto& [name, value] : table) dict.insert(name, value);
    result.push_back(dict);
  }
  return result;
}

std::string TieredStore::io_backend() const {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  TieredRows* rows = nullptr;
  check(shared_->checked(&rows));
  return rows->io_backend();
}

int64_t TieredStore::cache_memory_bytes() const {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  TieredRows* rows = nullptr;
  check(shared_->checked(&rows));
  return static_cast<int64_t>(rows->cache_memory_bytes());
}

void TieredStore::close() {
  std::unique_ptr<TieredRows> closing;
  std::lock_guard<std::mutex> lock(shared_->mutex);
  if (shared_->num_open_tickets > 0) {
    check(Status::busy("row store at " + shared_->where, "a lookup or an update is running; close the store after it"));
  }
  closing.swap(shared_->rows);
}

void register_tiered(torch::Library& library) {
  library.class_<TieredStore>("TieredStore")
      .def_static("open", &open_tiered)
      .def("source", &TieredStore::source)
      .def("flush", &TieredStore::flush)
      .def("snapshot", &TieredStore::snapshot)
      .def("remove_snapshot", &TieredStore::remove_snapshot)
      .def("snapshots", &TieredStore::snapshots)
      .def("cancel_prefetch", &TieredStore::cancel_prefetch)
      .def("replay", &TieredStore::replay)
      .def("usage", &TieredStore::usage)
      .def("segment_map", &TieredStore::segment_map)
      .def("counters", &TieredStore::counters)
      .def("io_backend", &TieredStore::io_backend)
      .def("cache_memory_bytes", &TieredStore::cache_memory_bytes)
      .def("close", &TieredStore::close);
}

}  // namespace kstep
