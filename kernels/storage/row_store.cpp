#include "storage/row_store.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "storage/env_throttled.h"

namespace kstep {
namespace {

constexpr std::size_t kMaxPaths = 16;
constexpr std::uint32_t kMaxTableId = 1u << TableSpec::kTableIdBits;
constexpr std::uint32_t kMaxFirstColumn = 1u << (32 - TableSpec::kTableIdBits);
constexpr std::uint64_t kMaxRows = 1ull << 48;
constexpr std::uint32_t kMaxQueueDepth = 1024;
constexpr std::uint32_t kWriteDepth = 8;
constexpr std::uint32_t kReservedFiles = 40;  // for the rest of the process: sockets, libraries, logs
constexpr double kIdlePressure = 0.25;

std::uint32_t default_open_files(Env* env) {
  const std::uint64_t limit = env->max_open_files();
  const std::uint64_t spare = limit > kReservedFiles ? (limit - kReservedFiles) / 2 : 0;
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(spare, 8, 256));
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string parent_of(const std::string& path) {
  const std::size_t end = path.find_last_not_of('/');
  const std::size_t slash = end == std::string::npos ? std::string::npos : path.rfind('/', end);
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

Env* inner_env(const StoreOptions& options) { return options.env != nullptr ? options.env : &Env::posix(); }

std::unique_ptr<Env> throttled(const StoreOptions& options) {
  const auto& bounds = options.path_bytes_per_s;
  if (std::all_of(bounds.begin(), bounds.end(), [](std::uint64_t bound) { return bound == 0; })) return nullptr;
  return std::make_unique<ThrottledEnv>(inner_env(options), options.paths, bounds);
}

StoreId random_store_id() {
  std::random_device device;
  StoreId id;
  for (unsigned char& byte : id) byte = static_cast<unsigned char>(device());
  return id;
}

}  // namespace

RowStore::RowStore(StoreOptions options)
    : options_(std::move(options)),
      throttled_(throttled(options_)),
      env_(throttled_ != nullptr ? throttled_.get() : inner_env(options_)),
      context_(env_, options_.max_open_files != 0 ? options_.max_open_files : default_open_files(env_)),
      catalog_(env_, options_.paths) {}

RowStore::~RowStore() = default;

Status RowStore::open(StoreOptions options, std::unique_ptr<RowStore>* out) {
  std::unique_ptr<RowStore> store(new RowStore(std::move(options)));
  KSTEP_RETURN_IF_ERROR(store->check_options());
  KSTEP_RETURN_IF_ERROR(store->take_locks());
  KSTEP_RETURN_IF_ERROR(store->check_headers());
  KSTEP_RETURN_IF_ERROR(store->catalog_.recover());
  KSTEP_RETURN_IF_ERROR(store->read_manifests());
  const StoreOptions& opts = store->options_;
  StoreContext& context = store->context_;
  context.roots = opts.paths;
  context.use_direct_io = opts.use_direct_io;
  context.path_bytes.assign(opts.paths.size(), 0);
  context.path_bytes_read.assign(opts.paths.size(), 0);
  context.path_bytes_written.assign(opts.paths.size(), 0);
  context.path_weights = opts.path_weights;
  if (opts.path_weights.empty()) context.path_weights.assign(opts.paths.size(), 1.0);
  for (const std::string& path : opts.paths) {
    std::uint32_t alignment = 0;
    KSTEP_RETURN_IF_ERROR(store->env_->direct_alignment(path, &alignment));
    if (alignment > kPageBytes) context.use_direct_io = false;  // units are laid out in pages
    context.alignments.push_back(std::min(alignment, kPageBytes));
  }
  KSTEP_RETURN_IF_ERROR(store->env_->new_engine(opts.backend, opts.queue_depth, &context.reads));
  KSTEP_RETURN_IF_ERROR(store->env_->new_engine(opts.backend, kWriteDepth, &context.writes));

  const Manifest* restored = nullptr;
  if (!opts.restore_snapshot.empty()) {
    Manifest manifest;
    KSTEP_RETURN_IF_ERROR(store->catalog_.read(opts.restore_snapshot, &manifest));  // says what is wrong with it
    const auto found = store->manifests_.find(opts.restore_snapshot);
    if (found == store->manifests_.end()) {
      return Status::invalid("snapshot '" + opts.restore_snapshot + "'", "is of store " + store_id_text(manifest.store_id) + " on " +
                                                                             std::to_string(manifest.num_paths) + " paths, this store is " +
                                                                             store_id_text(context.store_id) + " on " +
                                                                             std::to_string(opts.paths.size()));
    }
    restored = &found->second;
  }
  KSTEP_RETURN_IF_ERROR(store->make_tables(restored));
  KSTEP_RETURN_IF_ERROR(store->make_live_folders());
  if (restored != nullptr) KSTEP_RETURN_IF_ERROR(store->restore(*restored));
  for (const auto& log : store->logs_) {
    std::unique_ptr<IoEngine> reads;
    KSTEP_RETURN_IF_ERROR(store->env_->new_engine(opts.backend, 1, &reads));
    store->cleaners_.push_back(std::make_unique<Cleaner>(&context, log.get(), opts.space_factor, std::move(reads)));
    store->bytes_before_batch_.push_back(0);
  }
  context.beside_reads = [self = store.get()] { return self->clean_beside_reads(); };
  *out = std::move(store);
  return {};
}

Status RowStore::check_options() const {
  const std::string context = "store options";
  if (options_.paths.empty() || options_.paths.size() > kMaxPaths) {
    return Status::invalid(context, "expected 1 to " + std::to_string(kMaxPaths) + " paths, got " + std::to_string(options_.paths.size()));
  }
  if (std::set<std::string>(options_.paths.begin(), options_.paths.end()).size() != options_.paths.size()) {
    return Status::invalid(context, "a path is given twice");
  }
  const auto& weights = options_.path_weights;
  const bool are_weights = std::all_of(weights.begin(), weights.end(), [](double weight) { return weight >= 0; });
  const bool is_any = std::accumulate(weights.begin(), weights.end(), 0.0) > 0;
  if (!weights.empty() && (weights.size() != options_.paths.size() || !are_weights || !is_any)) {
    return Status::invalid(context, "expected one weight per path, none below 0 and one above");
  }
  if (!options_.path_bytes_per_s.empty() && options_.path_bytes_per_s.size() != options_.paths.size()) {
    return Status::invalid(context, "expected one bound in bytes per second per path");
  }
  if (options_.tables.empty()) return Status::invalid(context, "no tables");
  if (!(options_.space_factor >= 1.1)) {
    return Status::invalid(context, "space_factor must be at least 1.1, got " + std::to_string(options_.space_factor));
  }
  if (options_.queue_depth < 1 || options_.queue_depth > kMaxQueueDepth) {
    return Status::invalid(context, "queue_depth must be 1 to 1024, got " + std::to_string(options_.queue_depth));
  }
  std::set<std::string> names;
  std::set<std::uint32_t> ids;
  for (const TableSpec& table : options_.tables) {
    const std::string table_context = "table '" + table.name + "'";
    if (table.name.empty() || !names.insert(table.name).second) return Status::invalid(table_context, "names must be unique and not empty");
    if (table.table_id >= kMaxTableId || table.first_column >= kMaxFirstColumn || !ids.insert(table.record_table_id()).second) {
      return Status::invalid(table_context, "table_id " + std::to_string(table.table_id) + " with first_column " +
                                                std::to_string(table.first_column) + " must be unique, below 2^20 and 2^12");
    }
    if (table.num_rows == 0 || table.num_rows > kMaxRows) {
      return Status::invalid(table_context, "num_rows must be 1 to 2^48, got " + std::to_string(table.num_rows));
    }
    if (table.schema.fields().empty()) return Status::invalid(table_context, "has no record schema");
  }
  return {};
}

Status RowStore::take_locks() {
  for (const std::string& path : options_.paths) {
    if (!env_->exists(path)) {
      KSTEP_RETURN_IF_ERROR(env_->make_dir(path));
      KSTEP_RETURN_IF_ERROR(env_->sync_dir(parent_of(path)));
    }
    locks_.emplace_back();
    KSTEP_RETURN_IF_ERROR(env_->lock(path + "/LOCK", &locks_.back()));
    KSTEP_RETURN_IF_ERROR(env_->make_dir(path + "/snapshots"));
  }
  return {};
}

// Every path must carry the same store_id, in the order in which the paths were first given.
Status RowStore::check_headers() {
  const auto num_paths = static_cast<std::uint32_t>(options_.paths.size());
  bool has_id = false;
  std::vector<std::uint32_t> missing;
  for (std::uint32_t i = 0; i < num_paths; ++i) {
    const std::string file = options_.paths[i] + "/STORE";
    if (!env_->exists(file)) {
      missing.push_back(i);
      continue;
    }
    std::string text;
    StoreHeader header;
    KSTEP_RETURN_IF_ERROR(env_->read_text(file, &text));
    KSTEP_RETURN_IF_ERROR(StoreHeader::decode(file, text, &header));
    if (header.num_paths != num_paths || header.path_index != i || (has_id && header.store_id != context_.store_id)) {
      return Status::invalid(file, "is path " + std::to_string(header.path_index) + " of " + std::to_string(header.num_paths) + " of store " +
                                       store_id_text(header.store_id) + ", but was given as path " + std::to_string(i) + " of " +
                                       std::to_string(num_paths) + "; give the same paths in the same order");
    }
    context_.store_id = header.store_id;
    has_id = true;
  }
  if (!has_id) context_.store_id = random_store_id();
  for (const std::uint32_t i : missing) {
    const std::string file = options_.paths[i] + "/STORE";
    const std::string temporary = file + ".new";
    if (env_->exists(temporary)) KSTEP_RETURN_IF_ERROR(env_->remove_file(temporary));
    KSTEP_RETURN_IF_ERROR(env_->write_text(temporary, StoreHeader{context_.store_id, i, num_paths}.encode()));
    KSTEP_RETURN_IF_ERROR(env_->rename(temporary, file));
    KSTEP_RETURN_IF_ERROR(env_->sync_dir(options_.paths[i]));
  }
  return {};
}

Status RowStore::read_manifests() {
  std::vector<std::string> names;
  KSTEP_RETURN_IF_ERROR(catalog_.list(&names));
  for (const std::string& name : names) {
    Manifest manifest;
    Status status = catalog_.read(name, &manifest);
    if (!status.ok() || manifest.store_id != context_.store_id || manifest.num_paths != options_.paths.size()) {
      damaged_snapshots_.push_back(name);  // reported; its files stay for whoever repairs it
      continue;
    }
    context_.next_segment_id = std::max(context_.next_segment_id, manifest.next_segment_id);
    hold(manifest);
    manifests_.emplace(name, std::move(manifest));
  }
  return {};
}

RowLog* RowStore::log_for(std::uint32_t payload_bytes) {
  for (const auto& log : logs_) {
    if (log->layout().payload_bytes == payload_bytes) return log.get();
  }
  return nullptr;
}

Status RowStore::make_tables(const Manifest* restored) {
  for (const TableSpec& spec : options_.tables) {
    if (restored != nullptr && restored->find_table(spec.name) != nullptr) {
      KSTEP_RETURN_IF_ERROR(check_same_table(spec, *restored->find_table(spec.name)));
    }
    auto table = std::make_unique<TableState>(spec);
    const std::uint32_t payload_bytes = spec.schema.payload_bytes();
    if (log_for(payload_bytes) == nullptr) {
      RecordLayout layout = RecordLayout::for_payload(payload_bytes, options_.segment_bytes);
      for (const ManifestLog& log : restored != nullptr ? restored->logs : std::vector<ManifestLog>()) {
        if (log.payload_bytes != payload_bytes) continue;
        for (const ManifestSegment& segment : log.segments) layout.max_units = std::max(layout.max_units, layout.units_for(segment.num_records));
      }
      logs_.push_back(std::make_unique<RowLog>(&context_, layout, options_.segment_bytes));
    }
    table->log = log_for(payload_bytes);
    context_.table_of_record_id[spec.record_table_id()] = table.get();
    context_.tables.push_back(std::move(table));
  }
  if (restored == nullptr) return {};
  for (const TableSpec& found : restored->tables) {
    const bool is_wanted = std::any_of(options_.tables.begin(), options_.tables.end(), [&](const TableSpec& t) { return t.name == found.name; });
    if (!is_wanted) {
      return Status::invalid("table '" + found.name + "'", "is in snapshot '" + restored->name + "' but not in this configuration");
    }
  }
  return {};
}

Status RowStore::make_live_folders() {
  for (std::uint32_t path = 0; path < options_.paths.size(); ++path) {
    std::vector<std::string> names;
    KSTEP_RETURN_IF_ERROR(env_->list(options_.paths[path], &names));
    for (const std::string& name : names) {
      if (name.rfind("log-", 0) == 0) KSTEP_RETURN_IF_ERROR(env_->remove_tree(options_.paths[path] + "/" + name));
    }
    for (const auto& log : logs_) KSTEP_RETURN_IF_ERROR(env_->make_dir(log->folder(path)));
  }
  return {};
}

Status RowStore::restore(const Manifest& manifest) {
  context_.epoch = manifest.next_epoch;
  for (const ManifestLog& entry : manifest.logs) {
    RowLog* log = log_for(entry.payload_bytes);
    if (log == nullptr) continue;  // every table is known by now, so this log holds no rows
    LoadedEpochs epochs;
    const std::string log_name = log_folder_name(entry.payload_bytes);
    for (const ManifestSegment& segment : entry.segments) {
      const std::string file = log_name + "/" + segment_file_name(segment.id);
      KSTEP_RETURN_IF_ERROR(env_->link(catalog_.folder(segment.path, manifest.name) + "/" + file, options_.paths[segment.path] + "/" + file));
      KSTEP_RETURN_IF_ERROR(log->load_segment(segment.id, segment.path, segment.file_bytes, segment.trailer_crc, &epochs));
      Segment* loaded = log->find_segment(segment.id);
      for (std::uint32_t i = 0; i < held_.at(segment.id).num_holders; ++i) log->add_holder(loaded);
    }
  }
  return {};
}

Status RowStore::begin_batch(std::uint64_t record_bytes) {
  if (!context_.poison.ok()) return context_.poison;
  if (context_.epoch == UINT32_MAX) return Status::full("append", "2^32 append batches were made; restore into a new store");
  for (const auto& log : logs_) KSTEP_RETURN_IF_ERROR(log->retry_failed_writes());
  KSTEP_RETURN_IF_ERROR(make_room(record_bytes));
  ++context_.epoch;
  for (std::size_t i = 0; i < logs_.size(); ++i) bytes_before_batch_[i] = logs_[i]->appended_bytes();
  return {};
}

// A batch of b record bytes takes at most b/(1-waste) in units, 10 % in footers (never more than 20
// bytes per record), and one unit, header and footer page per stream.
Status RowStore::make_room(std::uint64_t record_bytes) {
  if (options_.quota_bytes == 0) return {};
  std::uint64_t bytes = record_bytes + record_bytes / 3;
  for (const auto& log : logs_) bytes += kNumStreams * (std::uint64_t{log->layout().unit_bytes} + 2 * kPageBytes) + log->open_footer_bytes();
  const std::uint64_t reserve = std::min(options_.segment_bytes, options_.quota_bytes / 8);  // for the cleaner's copies
  bool did_work = true;
  const auto start = std::chrono::steady_clock::now();
  Status status;
  while (usage().total_bytes() + bytes + reserve > options_.quota_bytes && did_work && status.ok()) {
    did_work = false;
    for (std::size_t i = 0; i < cleaners_.size() && status.ok(); ++i) {
      bool did_this = false;
      status = cleaners_[i]->step(&did_this);
      did_work |= did_this;
    }
  }
  seconds_cleaning_ += seconds_since(start);
  KSTEP_RETURN_IF_ERROR(status);
  const std::uint64_t used = usage().total_bytes();
  // Near the quota, space counts as free only when the drive has it back.
  if (used + bytes + reserve + FileCloser::kMaxFiles * options_.segment_bytes > options_.quota_bytes) context_.removed_files.drain();
  if (used + bytes + reserve <= options_.quota_bytes) return {};
  return Status::no_space("store at " + options_.paths[0],
                          "needs " + std::to_string(bytes + reserve) + " bytes more, " + std::to_string(used) + " of the quota of " +
                              std::to_string(options_.quota_bytes) + " are used, " + std::to_string(usage().snapshot_only_bytes) +
                              " of them by older snapshots only; delete snapshots or raise ssd_bytes");
}

Status RowStore::end_batch() {
  const auto start = std::chrono::steady_clock::now();
  Status status;
  for (std::size_t i = 0; i < logs_.size() && status.ok(); ++i) {
    status = cleaners_[i]->after_append(logs_[i]->appended_bytes() - bytes_before_batch_[i]);
  }
  seconds_cleaning_ += seconds_since(start);
  return status;
}

bool RowStore::clean_beside_reads() {
  if (!context_.poison.ok()) return false;
  return std::any_of(cleaners_.begin(), cleaners_.end(), [](const auto& cleaner) { return cleaner->work_beside_reads(); });
}

Status RowStore::read(ReadRow* rows, std::size_t num_rows) {
  return num_rows == 0 ? Status() : rows[0].table->log->read(rows, num_rows);
}

Status RowStore::clean_when_idle(bool* did_work) {
  *did_work = false;
  if (!context_.poison.ok()) return {};
  const auto start = std::chrono::steady_clock::now();
  Status status;
  for (std::size_t i = 0; i < logs_.size() && status.ok() && !*did_work; ++i) {
    if (cleaners_[i]->pressure() > kIdlePressure) status = cleaners_[i]->step(did_work);
  }
  seconds_cleaning_ += seconds_since(start);
  return status;
}

Manifest RowStore::make_manifest(const std::string& name, const std::string& metadata) const {
  Manifest manifest;
  manifest.store_id = context_.store_id;
  manifest.name = name;
  manifest.metadata = metadata;
  manifest.next_segment_id = context_.next_segment_id;
  manifest.next_epoch = context_.epoch;
  manifest.num_paths = static_cast<std::uint32_t>(options_.paths.size());
  manifest.tables = options_.tables;
  for (const auto& log : logs_) {
    manifest.logs.emplace_back();
    ManifestLog& entry = manifest.logs.back();
    entry.payload_bytes = log->layout().payload_bytes;
    entry.unit_bytes = log->layout().unit_bytes;
    entry.records_per_unit = log->layout().records_per_unit;
    for (const Segment& segment : log->segments()) {
      if (segment.state != Segment::State::Sealed || segment.num_live == 0) continue;
      entry.segments.push_back({segment.id, segment.path, segment.num_records, segment.file_bytes, segment.trailer_crc});
    }
  }
  return manifest;
}

Status RowStore::flush() {
  if (!context_.poison.ok()) return context_.poison;
  for (const auto& log : logs_) {
    KSTEP_RETURN_IF_ERROR(log->retry_failed_writes());
    KSTEP_RETURN_IF_ERROR(log->seal_all());
    KSTEP_RETURN_IF_ERROR(log->sync_all());
  }
  return {};
}

Status RowStore::snapshot(const std::string& name, const std::string& metadata) {
  KSTEP_RETURN_IF_ERROR(SnapshotCatalog::check_name(name));
  KSTEP_RETURN_IF_ERROR(flush());
  Manifest manifest = make_manifest(name, metadata);
  bool is_doubtful = false;
  Status status = catalog_.commit(manifest, &is_doubtful);
  if (is_doubtful) context_.poison = status;
  KSTEP_RETURN_IF_ERROR(status);
  hold(manifest);
  manifests_.emplace(name, std::move(manifest));
  return {};
}

Status RowStore::remove_snapshot(const std::string& name) {
  KSTEP_RETURN_IF_ERROR(catalog_.remove(name));
  const auto it = manifests_.find(name);
  if (it == manifests_.end()) {
    damaged_snapshots_.erase(std::remove(damaged_snapshots_.begin(), damaged_snapshots_.end(), name), damaged_snapshots_.end());
    return {};
  }
  unhold(it->second);
  manifests_.erase(it);
  return {};
}

void RowStore::hold(const Manifest& manifest) {
  for (const ManifestLog& entry : manifest.logs) {
    RowLog* log = log_for(entry.payload_bytes);
    std::map<std::uint64_t, Segment*> live = log != nullptr ? log->segments_by_id() : std::map<std::uint64_t, Segment*>();
    for (const ManifestSegment& segment : entry.segments) {
      HeldSegment& held = held_[segment.id];
      ++held.num_holders;
      held.file_bytes = segment.file_bytes;
      const auto it = live.find(segment.id);
      if (it != live.end()) log->add_holder(it->second);
    }
  }
}

void RowStore::unhold(const Manifest& manifest) {
  for (const ManifestLog& entry : manifest.logs) {
    RowLog* log = log_for(entry.payload_bytes);
    std::map<std::uint64_t, Segment*> live = log != nullptr ? log->segments_by_id() : std::map<std::uint64_t, Segment*>();
    for (const ManifestSegment& segment : entry.segments) {
      if (--held_.at(segment.id).num_holders == 0) held_.erase(segment.id);
      const auto it = live.find(segment.id);
      if (it != live.end()) log->remove_holder(it->second);
    }
  }
}

std::vector<std::string> RowStore::snapshots() const {
  std::vector<std::string> names;
  for (const auto& item : manifests_) names.push_back(item.first);
  std::sort(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    const Manifest& x = manifests_.at(a);
    const Manifest& y = manifests_.at(b);
    return std::tie(x.next_segment_id, x.next_epoch, a) < std::tie(y.next_segment_id, y.next_epoch, b);
  });
  return names;
}

SpaceUsage RowStore::usage() const {
  SpaceUsage usage;
  for (const auto& log : logs_) usage.live_unit_bytes += log->live_unit_bytes();
  for (const auto& item : held_) usage.snapshot_bytes += item.second.file_bytes;
  usage.unheld_bytes = context_.unheld_bytes;
  usage.snapshot_only_bytes = usage.snapshot_bytes - context_.held_bytes;
  return usage;
}

std::vector<SegmentInfo> RowStore::segment_map() const {
  std::vector<SegmentInfo> map;
  for (const auto& log : logs_) {
    for (const Segment& s : log->segments()) {
      if (s.state == Segment::State::Free) continue;
      map.push_back({s.id, s.path, log->layout().payload_bytes, s.num_records, s.num_live, s.num_holders, s.file_bytes,
                     s.state == Segment::State::Open, s.stream});
    }
  }
  return map;
}

std::uint64_t RowStore::index_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& table : context_.tables) bytes += table->index.memory_bytes();
  return bytes;
}

std::map<std::string, double> RowStore::counters() const {
  const SpaceUsage space = usage();
  std::uint64_t record_bytes = 0;
  for (const auto& table : context_.tables) record_bytes += table->io.bytes_written;
  const auto samples = static_cast<double>(std::max<std::uint64_t>(context_.num_queue_samples, 1));
  const auto written = static_cast<double>(context_.bytes_written);
  std::map<std::string, double> found = {
      {"device_written_bytes", written},
      {"write_amplification_ratio", record_bytes == 0 ? 0.0 : written / static_cast<double>(record_bytes)},
      {"cleaner_read_bytes", static_cast<double>(context_.bytes_cleaned_read)},
      {"cleaner_written_bytes", static_cast<double>(context_.bytes_cleaned_written)},
      {"cleaner_share_ratio", written == 0 ? 0.0 : static_cast<double>(context_.bytes_cleaned_written) / written},
      {"cleaner_s", seconds_cleaning()},
      {"queue_depth_mean", static_cast<double>(context_.sum_queue_depth) / samples},
      {"live_unit_bytes", static_cast<double>(space.live_unit_bytes)},
      {"unheld_bytes", static_cast<double>(space.unheld_bytes)},
      {"snapshot_bytes", static_cast<double>(space.snapshot_bytes)},
      {"snapshot_only_bytes", static_cast<double>(space.snapshot_only_bytes)},
      {"index_bytes", static_cast<double>(index_bytes())},
      {"open_files_count", static_cast<double>(context_.files.num_open())},
  };
  for (std::size_t path = 0; path < context_.roots.size(); ++path) {
    found["path_read_bytes_" + std::to_string(path)] = static_cast<double>(context_.path_bytes_read[path]);
    found["path_written_bytes_" + std::to_string(path)] = static_cast<double>(context_.path_bytes_written[path]);
  }
  return found;
}

}  // namespace kstep
