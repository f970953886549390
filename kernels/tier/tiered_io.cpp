// The I/O thread of TieredRows: rounds of finding room, reading, appending and cleaning.
#include <algorithm>
#include <chrono>

#include "compute/initial_values.h"
#include "tier/tiered_internal.h"

namespace kstep {
namespace {

constexpr std::size_t kMaxMissesInRound = 8192;   // bounds how long an urgent pin waits for a running round
constexpr std::uint64_t kRowsPerAppendBatch = 2048;
// Overflow memory is kept while it is used again and again, and given back after so many rounds without.
constexpr std::uint32_t kRoundsBeforeDrop = 256;
// A caller that takes the rows of one table after the other is back sooner than this; it would wait for a piece of cleaning between two of them.
constexpr std::chrono::microseconds kBackSoon{500};
constexpr std::size_t kEntryAhead = 16;           // rows looked up ahead, in two stages
constexpr std::size_t kStateAhead = 8;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

// Counts what a call cleaned while a caller waited. One that came in the middle waited for the rest only, so a count is for one
// stretch of cleaning: one over several would take a wait after all of them for a wait for them.
class TieredRows::StallCount {
 public:
  explicit StallCount(TieredRows* rows) : rows_(rows), cleaned_before_(rows->store_->seconds_cleaning_alone()) {}
  ~StallCount() {
    const double cleaned_s = rows_->store_->seconds_cleaning_alone() - cleaned_before_;
    std::lock_guard<std::mutex> lock(rows_->mutex_);
    if (rows_->is_caller_waiting_) rows_->cleaner_stall_s_ += std::min(cleaned_s, seconds_since(rows_->waiting_since_));
  }
  StallCount(const StallCount&) = delete;
  StallCount& operator=(const StallCount&) = delete;

 private:
  TieredRows* rows_;
  double cleaned_before_;
};

void TieredRows::io_loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (stopping_) return;
    const bool has_round = choose_round() && command_ == nullptr;
    const bool is_idle = !has_round && released_.empty() && unannounced_.empty() && command_ == nullptr;
    if (is_idle && !may_clean_) {
      work_ready_.wait(lock);
      continue;
    }
    if (is_idle && !is_caller_away(&lock)) continue;
    releasing_.swap(released_);
    announcing_.swap(unannounced_);
    const std::function<Status()>* command = command_;
    round_batch_ = current_batch_;
    lock.unlock();

    process_releases();
    announce_new();
    if (command != nullptr) {
      const Status status = (*command)();
      std::lock_guard<std::mutex> guard(mutex_);
      command_status_ = status;
      command_ = nullptr;
      job_done_.notify_all();
    } else if (has_round) {
      run_round();
      may_clean_ = true;
    } else if (is_idle) {
      const StallCount count(this);
      const Status status = store_->clean_when_idle(&may_clean_);
      if (!status.ok()) {
        background_status_ = status;
        may_clean_ = false;
      }
    }
    lock.lock();
    for (Job* job : releasing_) {
      job->state = Job::State::Idle;
      idle_jobs_.push_back(job);
    }
    releasing_.clear();
  }
}

// Fills round_ with what is worth working on now: what callers wait for, and with it the prefetches of the
// same or earlier batches, so that the drive's queue stays full; else the prefetches within the depth.
// Called under the mutex.
bool TieredRows::choose_round() {
  round_.clear();
  for (auto it = queue_.begin(); it != queue_.end();) {
    if ((*it)->is_cancelled) {
      released_.push_back(*it);
      it = queue_.erase(it);
    } else {
      ++it;
    }
  }
  std::uint32_t last_batch = current_batch_ + prefetch_depth_;
  if (!urgent_.empty()) {
    round_.assign(urgent_.begin(), urgent_.end());
    last_batch = std::min(last_batch, current_batch_);
  }
  for (Job* job : queue_) {
    if (job->batch > last_batch) break;
    round_.push_back(job);
  }
  if (urgent_.empty() && is_stalled_) round_.clear();  // nothing was unpinned since
  for (Job* job : round_) job->may_overflow = job->is_demanded;
  return !round_.empty();
}

void TieredRows::process_releases() {
  for (Job* job : releasing_) {
    if (job->is_dirty) {
      RowCache& cache = *class_of_table_[job->table]->cache;
      for (const std::uint32_t slot : job->slots) cache.set_dirty(slot, true);
    }
    unpin_slots(job);
    is_stalled_ = false;
  }
}

void TieredRows::unpin_slots(Job* job) {
  CacheClass& cache_class = *class_of_table_[job->table];
  for (std::size_t i = 0; i < job->num_scanned; ++i) {
    const std::uint32_t slot = job->slots[i];
    cache_class.cache->unpin(slot);
    if (cache_class.cache->is_overflow(slot) && cache_class.cache->num_pins(slot) == 0) cache_class.idle_overflow.push_back(slot);
  }
  job->num_scanned = 0;
}

void TieredRows::announce_new() {
  for (Job* job : announcing_) {
    RowCache& cache = *class_of_table_[job->table]->cache;
    const std::size_t n = job->rows.size();
    for (std::size_t i = 0; i < n; ++i) {
      if (i + kEntryAhead < n) cache.prefetch_entry(cache_key(job->table, job->rows[i + kEntryAhead]));
      if (i + kStateAhead < n) cache.prefetch_state(cache_key(job->table, job->rows[i + kStateAhead]));
      const std::uint64_t key = cache_key(job->table, job->rows[i]);
      cache.note_announced(key, job->batch);
      const std::uint32_t slot = cache.find(key);
      if (slot != kNoCacheSlot) cache.announce(slot, job->batch);
    }
  }
  announcing_.clear();
}

void TieredRows::run_round() {
  num_misses_ = 0;
  Job* failed_job = nullptr;
  Status scan_status;
  if (round_[0]->may_overflow && !background_status_.ok()) {  // there is a caller to tell
    std::swap(scan_status, background_status_);
    // Damage stays damage; another failure of the cleaner may have passed.
    const StallCount count(this);
    if (scan_status.kind != StatusKind::Corruption) scan_status = store_->clean_when_idle(&may_clean_);
  }
  if (scan_status.ok()) scan_status = drain_overflow();
  std::size_t num_jobs = 0;
  if (!scan_status.ok()) {
    failed_job = round_[0];
    num_jobs = 1;
  }
  while (failed_job == nullptr && num_jobs < round_.size()) {
    Job* job = round_[num_jobs++];
    const Scan result = scan(job, &scan_status);
    if (result == Scan::Failed) failed_job = job;
    if (result == Scan::Stalled) is_stalled_ = true;
    if (result == Scan::Stalled || result == Scan::RoundFull) break;
  }
  round_.resize(num_jobs);
  const Status read_status = read_misses();
  finish_round(read_status, failed_job, scan_status);

  // The caller runs again by now; what follows is paid for only if it comes back too soon.
  if (is_batch_open_) {
    std::unique_lock<std::mutex> lock(mutex_);
    is_caller_away(&lock);
  }
  Status status = close_batch();
  if (status.ok()) status = drain_overflow();
  if (!status.ok()) background_status_ = status;
  drop_overflow(kRoundsBeforeDrop);
}

// Waits until the caller has been gone for so long that it must be computing. False if there is something to do before.
bool TieredRows::is_caller_away(std::unique_lock<std::mutex>* lock) {
  auto has_work = [this] { return stopping_ || command_ != nullptr || !urgent_.empty() || !released_.empty() || !unannounced_.empty(); };
  return !work_ready_.wait_until(*lock, last_handover_ + kBackSoon, has_work);
}

// Finds, or makes, a pinned slot for each row of the job that has none yet.
TieredRows::Scan TieredRows::scan(Job* job, Status* status) {
  CacheClass& cache_class = *class_of_table_[job->table];
  RowCache& cache = *cache_class.cache;
  TableCounters& counters = *counters_[job->table];
  TableState* table = store_->table(job->table);
  const std::size_t n = job->rows.size();
  job->slots.resize(n);
  job->payloads.resize(n);
  for (; job->num_scanned < n; ++job->num_scanned) {
    const std::size_t i = job->num_scanned;
    if (i + kEntryAhead < n) cache.prefetch_entry(cache_key(job->table, job->rows[i + kEntryAhead]));
    if (i + kStateAhead < n) cache.prefetch_state(cache_key(job->table, job->rows[i + kStateAhead]));
    const std::uint64_t row = job->rows[i];
    const std::uint64_t key = cache_key(job->table, row);
    std::uint32_t slot = cache.find(key);
    cache_class.clairvoyant.record(key, slot != kNoCacheSlot);
    if (slot != kNoCacheSlot) {
      cache.count_use(slot);
      ++counters.hits_rows;
    } else {
      if (num_misses_ >= kMaxMissesInRound) return Scan::RoundFull;
      const Scan room = find_room(job, &cache_class, &slot, status);
      if (room != Scan::Done) return room;
      cache.insert(slot, key);
      cache.announce(slot, cache.announced_batch(key));
      if (table->index.find(row) == kNoSlot) {
        fill_initial_row(table->spec, row, cache.payload(slot));
        ++counters.first_touches_rows;
      } else {
        cache_class.misses.push_back({kNoSlot, table, row, cache.payload(slot)});
        cache_class.miss_slots.push_back(slot);
        ++num_misses_;
        counters.misses_rows.fetch_add(1, std::memory_order_relaxed);
      }
    }
    cache.pin(slot);
    cache.announce(slot, job->batch);
    job->slots[i] = slot;
    job->payloads[i] = cache.payload(slot);
  }
  return Scan::Done;
}

// A slot without key, by taking a free one, evicting, or, for a job that is waited for, overflowing.
TieredRows::Scan TieredRows::find_room(Job* job, CacheClass* cache_class, std::uint32_t* slot, Status* status) {
  RowCache& cache = *cache_class->cache;
  *slot = cache.take_free();
  if (*slot != kNoCacheSlot) return Scan::Done;
  *slot = cache.choose_victim(round_batch_);
  if (*slot != kNoCacheSlot) {
    if (cache.is_dirty(*slot)) {
      *status = append_slot(cache_class, *slot);
      if (!status->ok()) return Scan::Failed;  // the victim stays, dirty
    }
    ++counters_[table_of_key(cache.key(*slot))]->evicted_rows;
    cache.erase(*slot);
    return Scan::Done;
  }
  if (!job->may_overflow) return Scan::Stalled;
  *slot = cache.take_overflow(status);
  ++counters_[job->table]->overflow_rows;
  cache_class->num_calm_rounds = 0;
  return status->ok() ? Scan::Done : Scan::Failed;
}

Status TieredRows::append_slot(CacheClass* cache_class, std::uint32_t slot) {
  if (is_batch_open_ && batch_bytes_left_ < cache_class->record_bytes) KSTEP_RETURN_IF_ERROR(close_batch());
  if (!is_batch_open_) {
    const std::uint64_t num_bytes = kRowsPerAppendBatch * cache_class->record_bytes;
    const StallCount count(this);
    KSTEP_RETURN_IF_ERROR(store_->begin_batch(num_bytes));
    is_batch_open_ = true;
    batch_bytes_left_ = num_bytes;
  }
  const std::uint64_t key = cache_class->cache->key(slot);
  KSTEP_RETURN_IF_ERROR(store_->append(store_->table(table_of_key(key)), row_of_key(key), cache_class->cache->payload(slot)));
  batch_bytes_left_ -= cache_class->record_bytes;
  cache_class->cache->set_dirty(slot, false);
  return {};
}

Status TieredRows::close_batch() {
  if (!is_batch_open_) return {};
  is_batch_open_ = false;
  const StallCount count(this);
  return store_->end_batch();
}

Status TieredRows::read_misses() {
  const StallCount count(this);
  Status status;
  for (const auto& cache_class : classes_) {
    // An earlier class's failure does not spoil this one's slots: they are forgotten together.
    if (status.ok()) status = store_->read(cache_class->misses.data(), cache_class->misses.size());
  }
  return status;
}

// Slots whose payload never arrived must not be found again. REQUIRES: unpinned.
void TieredRows::forget_misses() {
  for (const auto& cache_class : classes_) {
    for (const std::uint32_t slot : cache_class->miss_slots) {
      cache_class->cache->erase(slot);
      cache_class->cache->release(slot);
    }
    // unpin_slots queued the overflow ones for emptying; they are empty now.
    auto& idle = cache_class->idle_overflow;
    idle.erase(std::remove_if(idle.begin(), idle.end(), [&](std::uint32_t slot) { return !cache_class->cache->is_used(slot); }), idle.end());
  }
}

void TieredRows::finish_round(const Status& read_status, Job* failed_job, const Status& scan_status) {
  if (!read_status.ok()) {
    for (Job* job : round_) unpin_slots(job);
    forget_misses();
  } else if (failed_job != nullptr) {
    unpin_slots(failed_job);
  }
  for (const auto& cache_class : classes_) {
    cache_class->misses.clear();
    cache_class->miss_slots.clear();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (Job* job : round_) {
    const bool is_failed = !read_status.ok() || job == failed_job;
    if (!is_failed && job->num_scanned < job->rows.size()) continue;  // goes on in a later round
    urgent_.erase(std::remove(urgent_.begin(), urgent_.end(), job), urgent_.end());
    queue_.erase(std::remove(queue_.begin(), queue_.end(), job), queue_.end());
    if (job->is_demanded) {
      is_caller_waiting_ = false;  // it has what it came for, even if it is not awake yet
      last_handover_ = std::chrono::steady_clock::now();
    }
    if (!is_failed) {
      job->state = Job::State::Ready;
      if (job->is_cancelled) released_.push_back(job);
    } else if (job->is_demanded) {
      job->status = read_status.ok() ? scan_status : read_status;
      job->state = Job::State::Failed;
    } else {
      // Only a hint failed. The pin that needs these rows tries again and reports what it meets.
      ++num_failed_prefetches_;
      auto& unused = prefetched_[job->table];
      unused.erase(std::remove(unused.begin(), unused.end(), job), unused.end());
      job->state = Job::State::Idle;
      idle_jobs_.push_back(job);
    }
  }
  job_done_.notify_all();
}

// Empties overflow slots that nobody uses any more. On failure the rest stays, dirty, and is tried again
// at the start of the next round, whose pin then reports the failure.
Status TieredRows::drain_overflow() {
  Status status;
  for (const auto& cache_class : classes_) {
    RowCache& cache = *cache_class->cache;
    auto& waiting = cache_class->waiting_overflow;
    waiting.clear();
    for (const std::uint32_t slot : cache_class->idle_overflow) {
      if (!cache.is_used(slot) || cache.num_pins(slot) > 0) continue;  // emptied already, or in use again
      if (status.ok() && cache.is_dirty(slot)) status = append_slot(cache_class.get(), slot);
      if (!status.ok()) {
        waiting.push_back(slot);
        continue;
      }
      cache.erase(slot);
      cache.release(slot);
    }
    cache_class->idle_overflow.swap(waiting);
    if (cache.num_overflow() > 0) cache_class->num_calm_rounds = 0;
  }
  return status;
}

// Gives overflow memory back that `min_calm_rounds` rounds did without.
void TieredRows::drop_overflow(std::uint32_t min_calm_rounds) {
  for (const auto& cache_class : classes_) {
    RowCache& cache = *cache_class->cache;
    const bool is_calm = cache.num_overflow() == 0 && ++cache_class->num_calm_rounds >= min_calm_rounds;
    if (is_calm && cache.holds_overflow_memory()) cache.drop_overflow();
  }
}

Status TieredRows::flush_dirty() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (num_update_tickets_ > 0) {
      return Status::busy("flush", std::to_string(num_update_tickets_) + " tickets for update are open; unpin them first");
    }
  }
  if (!background_status_.ok()) {
    Status status = background_status_;
    background_status_ = Status();
    return status;
  }
  for (const auto& cache_class : classes_) {
    Status status;
    cache_class->cache->for_each([&](std::uint32_t slot) {
      if (status.ok() && cache_class->cache->is_dirty(slot)) status = append_slot(cache_class.get(), slot);
    });
    KSTEP_RETURN_IF_ERROR(status);
  }
  KSTEP_RETURN_IF_ERROR(close_batch());
  KSTEP_RETURN_IF_ERROR(drain_overflow());
  drop_overflow(0);
  return {};
}

}  // namespace kstep
