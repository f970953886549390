// The caller's side of TieredRows: tickets, queues, waiting.
#include "tier/tiered_rows.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include <pthread.h>

#include "tier/tiered_internal.h"

namespace kstep {
namespace {

constexpr std::size_t kMaxTables = 1u << 16;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TieredRows::TieredRows(std::vector<TableSpec> tables) : tables_(std::move(tables)), prefetched_(tables_.size()) {}

Status TieredRows::make(TieredOptions options, std::unique_ptr<TieredRows>* out) {
  const std::vector<TableSpec> tables = options.store.tables;
  if (tables.size() > kMaxTables || options.cache_bytes.size() != tables.size()) {
    return Status::invalid("tiered rows", "got " + std::to_string(options.cache_bytes.size()) + " cache sizes for " + std::to_string(tables.size()) +
                                              " tables; expected one each, for at most 65536 tables");
  }
  std::unique_ptr<TieredRows> rows(new TieredRows(tables));
  rows->prefetch_depth_ = options.prefetch_depth;
  rows->max_lookahead_ = std::max(options.max_lookahead, options.prefetch_depth + 1);
  KSTEP_RETURN_IF_ERROR(RowStore::open(std::move(options.store), &rows->store_));
  rows->store_->set_awaited(&rows->is_caller_waiting_);
  std::map<std::uint32_t, std::uint64_t> bytes_of_payload;
  for (std::size_t t = 0; t < tables.size(); ++t) bytes_of_payload[tables[t].schema.payload_bytes()] += options.cache_bytes[t];
  std::map<std::uint32_t, CacheClass*> class_of_payload;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const std::uint32_t payload_bytes = tables[t].schema.payload_bytes();
    CacheClass*& cache_class = class_of_payload[payload_bytes];
    if (cache_class == nullptr) {
      std::unique_ptr<RowCache> cache;
      KSTEP_RETURN_IF_ERROR(RowCache::make(bytes_of_payload[payload_bytes], tables[t].schema.stride_bytes(), &cache));
      rows->classes_.push_back(std::make_unique<CacheClass>(std::move(cache)));
      cache_class = rows->classes_.back().get();
      cache_class->payload_bytes = payload_bytes;
      cache_class->record_bytes = rows->store_->table(t)->log->layout().record_bytes;
    }
    rows->class_of_table_.push_back(cache_class);
    rows->counters_.push_back(std::make_unique<TableCounters>());
  }
  TieredRows* self = rows.get();
  rows->thread_ = std::thread([self] { self->io_loop(); });
  pthread_setname_np(rows->thread_.native_handle(), "kstep-tier-io");
  *out = std::move(rows);
  return {};
}

TieredRows::~TieredRows() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_ready_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Status TieredRows::check_rows(std::uint32_t table, const std::uint64_t* rows, std::size_t num_rows) const {
  if (table >= tables_.size()) {
    return Status::invalid("tiered rows", "table " + std::to_string(table) + " of " + std::to_string(tables_.size()));
  }
  // Rows are ascending, so the last one bounds them all.
  if (num_rows > 0 && rows[num_rows - 1] >= tables_[table].num_rows) {
    return Status::invalid("table '" + tables_[table].name + "'", "row " + std::to_string(rows[num_rows - 1]) + " of " +
                                                                      std::to_string(tables_[table].num_rows) + " rows");
  }
  return {};
}

TieredRows::Job* TieredRows::take_job(std::size_t num_rows) {
  if (idle_jobs_.empty()) {
    jobs_.push_back(std::make_unique<Job>());
    jobs_.back()->index = static_cast<std::uint32_t>(jobs_.size() - 1);
    idle_jobs_.push_back(jobs_.back().get());
  }
  Job* job = idle_jobs_.back();
  idle_jobs_.pop_back();
  job->reserve(num_rows);
  job->state = Job::State::Queued;
  job->is_demanded = job->is_cancelled = job->is_dirty = false;
  job->num_scanned = 0;
  job->batch = 0;
  job->mode = PinMode::Read;
  ++job->generation;
  return job;
}

// The earliest unused prefetch of exactly these rows. Those before it were skipped by the caller.
TieredRows::Job* TieredRows::match(std::uint32_t table, const std::uint64_t* rows, std::size_t num_rows) {
  std::deque<Job*>& candidates = prefetched_[table];
  const auto found = std::find_if(candidates.begin(), candidates.end(), [&](const Job* job) {
    return job->rows.size() == num_rows && std::memcmp(job->rows.data(), rows, num_rows * sizeof(rows[0])) == 0;
  });
  if (found == candidates.end()) return nullptr;
  Job* job = *found;
  for (auto it = candidates.begin(); it != found; ++it) cancel(*it);
  candidates.erase(candidates.begin(), found + 1);
  return job;
}

void TieredRows::cancel(Job* job) {
  job->is_cancelled = true;
  if (job->state == Job::State::Ready) released_.push_back(job);  // the others are picked up by the I/O thread
}

Status TieredRows::pin(std::uint32_t table, const std::uint64_t* unique_rows, std::size_t num_rows, PinMode mode,
                       std::byte** payload_out, PinTicket* ticket) {
  *ticket = kNoTicket;
  KSTEP_RETURN_IF_ERROR(check_rows(table, unique_rows, num_rows));
  std::unique_lock<std::mutex> lock(mutex_);
  Job* job = match(table, unique_rows, num_rows);
  ++(job != nullptr ? counters_[table]->prefetched_pins : counters_[table]->unprefetched_pins);
  if (job == nullptr) {
    job = take_job(num_rows);
    job->table = table;
    job->rows.assign(unique_rows, unique_rows + num_rows);
    if (num_rows == 0) {
      job->slots.clear();
      job->payloads.clear();
      job->state = Job::State::Ready;
    } else {
      urgent_.push_back(job);
    }
  } else {
    current_batch_ = std::max(current_batch_, job->batch);
    if (job->state == Job::State::Queued) {
      queue_.erase(std::find(queue_.begin(), queue_.end(), job));
      urgent_.push_back(job);
    }
  }
  job->is_demanded = true;
  work_ready_.notify_one();
  if (job->state == Job::State::Queued) {
    waiting_since_ = std::chrono::steady_clock::now();
    is_caller_waiting_ = true;
    job_done_.wait(lock, [job] { return job->state == Job::State::Ready || job->state == Job::State::Failed; });
    is_caller_waiting_ = false;
    counters_[table]->stall_s += seconds_since(waiting_since_);
  }
  last_handover_ = std::chrono::steady_clock::now();
  if (job->state == Job::State::Failed) {
    Status status = job->status;
    job->state = Job::State::Idle;
    idle_jobs_.push_back(job);
    return status;
  }
  job->state = Job::State::Active;
  job->mode = mode;
  if (mode == PinMode::Update) ++num_update_tickets_;
  std::copy(job->payloads.begin(), job->payloads.end(), payload_out);
  *ticket = (PinTicket{job->generation} << 32) | (job->index + 1);
  return {};
}

Status TieredRows::unpin(PinTicket ticket, bool dirty) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t index = (ticket & UINT32_MAX) - 1;
  Job* job = ticket != kNoTicket && index < jobs_.size() ? jobs_[index].get() : nullptr;
  if (job == nullptr || job->state != Job::State::Active || job->generation != ticket >> 32) {
    return Status::invalid("unpin", "ticket " + std::to_string(ticket) + " is not open");
  }
  if (dirty && job->mode == PinMode::Read) return Status::invalid("unpin", "rows that were pinned for reading are said to be dirty");
  if (job->mode == PinMode::Update) --num_update_tickets_;
  job->is_dirty = dirty;
  released_.push_back(job);
  job->state = Job::State::Ready;
  work_ready_.notify_one();
  return {};
}

Status TieredRows::prefetch(const std::vector<TableRows>& batch) {
  for (const TableRows& item : batch) KSTEP_RETURN_IF_ERROR(check_rows(item.table, item.rows, item.num_rows));
  std::lock_guard<std::mutex> lock(mutex_);
  if (last_batch_ - current_batch_ >= max_lookahead_) {
    ++num_dropped_hints_;
    return {};
  }
  ++last_batch_;
  for (const TableRows& item : batch) {
    if (item.num_rows == 0) continue;
    Job* job = take_job(item.num_rows);
    job->table = item.table;
    job->batch = last_batch_;
    job->rows.assign(item.rows, item.rows + item.num_rows);
    queue_.push_back(job);
    unannounced_.push_back(job);
    prefetched_[item.table].push_back(job);
  }
  work_ready_.notify_one();
  return {};
}

void TieredRows::cancel_prefetch() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (std::deque<Job*>& jobs : prefetched_) {
    for (Job* job : jobs) cancel(job);
    jobs.clear();
  }
  current_batch_ = last_batch_;
  work_ready_.notify_one();
}

Status TieredRows::run_on_io_thread(const std::function<Status()>& work) const {
  std::unique_lock<std::mutex> lock(mutex_);
  job_done_.wait(lock, [this] { return command_ == nullptr; });
  command_ = &work;
  work_ready_.notify_one();
  job_done_.wait(lock, [&] { return command_ != &work; });
  return command_status_;
}

Status TieredRows::flush() {
  return run_on_io_thread([this] {
    KSTEP_RETURN_IF_ERROR(flush_dirty());
    return store_->flush();
  });
}

Status TieredRows::snapshot(const std::string& name, const std::string& metadata) {
  return run_on_io_thread([&] {
    KSTEP_RETURN_IF_ERROR(flush_dirty());
    return store_->snapshot(name, metadata);
  });
}

Status TieredRows::remove_snapshot(const std::string& name) {
  return run_on_io_thread([&] { return store_->remove_snapshot(name); });
}

std::vector<std::string> TieredRows::snapshots() const {
  std::vector<std::string> names;
  Status status = run_on_io_thread([&] {
    names = store_->snapshots();
    return Status();
  });
  return status.ok() ? names : std::vector<std::string>();
}

SpaceUsage TieredRows::usage() const {
  SpaceUsage usage;
  Status status = run_on_io_thread([&] {
    usage = store_->usage();
    return Status();
  });
  return status.ok() ? usage : SpaceUsage();
}

std::vector<SegmentInfo> TieredRows::segment_map() const {
  std::vector<SegmentInfo> map;
  Status status = run_on_io_thread([&] {
    map = store_->segment_map();
    return Status();
  });
  return status.ok() ? map : std::vector<SegmentInfo>();
}

std::uint64_t TieredRows::cache_memory_bytes() const {
  std::uint64_t bytes = 0;
  Status status = run_on_io_thread([&] {
    for (const auto& cache_class : classes_) bytes += cache_class->cache->memory_bytes();
    return Status();
  });
  return status.ok() ? bytes : 0;
}

std::vector<std::map<std::string, double>> TieredRows::counters() const {
  std::vector<std::map<std::string, double>> result;
  Status status = run_on_io_thread([&] {
    result = collect_counters();
    return Status();
  });
  if (!status.ok()) result.clear();
  return result;
}

std::uint64_t TieredRows::num_rows_read(std::uint32_t table) const {
  return counters_[table]->misses_rows.load(std::memory_order_relaxed);
}

std::vector<std::map<std::string, double>> TieredRows::collect_counters() const {
  std::vector<std::map<std::string, double>> result;
  const std::map<std::string, double> whole = store_->counters();
  std::map<const CacheClass*, double> share_of_optimum;  // replays a long trace: once for each, and with nobody locked out
  for (const auto& cache_class : classes_) share_of_optimum[cache_class.get()] = cache_class->clairvoyant.share_of_optimum();
  std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const TableCounters& counters = *counters_[t];
    const TableState& table = *store_->table(t);
    const CacheClass& cache_class = *class_of_table_[t];
    auto as_double = [](std::uint64_t value) { return static_cast<double>(value); };
    const std::uint64_t misses_rows = counters.misses_rows.load(std::memory_order_relaxed);
    const double accesses = as_double(counters.hits_rows + misses_rows + counters.first_touches_rows);
    std::map<std::string, double> item = whole;
    item["hits_rows"] = as_double(counters.hits_rows);
    item["misses_rows"] = as_double(misses_rows);
    item["first_touches_rows"] = as_double(counters.first_touches_rows);
    item["hit_ratio"] = accesses == 0 ? 0.0 : as_double(counters.hits_rows) / accesses;
    item["clairvoyant_ratio"] = share_of_optimum.at(&cache_class);
    item["evicted_rows"] = as_double(counters.evicted_rows);
    item["overflow_rows"] = as_double(counters.overflow_rows);
    item["stall_s"] = counters.stall_s;
    item["prefetched_pins_count"] = as_double(counters.prefetched_pins);
    item["unprefetched_pins_count"] = as_double(counters.unprefetched_pins);
    item["materialised_rows"] = as_double(table.index.num_materialised());
    item["index_bytes"] = as_double(table.index.memory_bytes());
    item["read_bytes"] = as_double(table.io.bytes_read);
    item["written_bytes"] = as_double(table.io.bytes_written);
    item["read_rows"] = as_double(table.io.rows_read);
    item["written_rows"] = as_double(table.io.rows_written);
    item["cache_slots_count"] = as_double(cache_class.cache->capacity());
    item["cleaner_stall_s"] = cleaner_stall_s_;
    item["dropped_hints_count"] = as_double(num_dropped_hints_);
    item["failed_prefetches_count"] = as_double(num_failed_prefetches_);
    result.push_back(std::move(item));
  }
  return result;
}

}  // namespace kstep
