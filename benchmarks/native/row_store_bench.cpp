// One contender of the row store benchmark, driven line by line over stdin so that contenders can take turns.
//
//   row_store_bench CONTENDER FOLDER NUM_ROWS DIM CACHE_SHARE LOOKUPS IDS SEED
//     CONTENDER: row_store, device_limit, in_place, mmap, rocksdb_32  (raw, and behind the same CLOCK cache)
//                tiered, tiered_lookahead                             (TieredRows; the latter knows 16 batches ahead)
//     IDS: zipf or uniform
//   commands: raw_read | raw_write | batch | describe | quit; each answers with one line of JSON
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <map>
#include <random>

#include "backend.h"
#include "cache/row_cache.h"
#include "tier/tiered_rows.h"

namespace kstep::bench {
namespace {

constexpr double kZipfExponent = 1.05;
constexpr std::size_t kLookAhead = 16;
constexpr std::uint64_t kScatter = 2654435761u;  // a prime: rank -> id is a permutation
constexpr std::size_t kFieldsPerRow = 3;         // weight, m, v

struct Measurement {
  double seconds = 0;
  double cpu_s = 0;
  std::size_t num_rows = 0;
  std::size_t num_misses = 0;
};

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double cpu_s() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

class Ids {
 public:
  Ids(std::uint64_t num_rows, bool is_zipf, std::uint64_t seed) : num_rows_(num_rows), is_zipf_(is_zipf), rng_(seed) {
    if (!is_zipf) return;
    double sum = 0;
    for (std::uint64_t i = 0; i < num_rows; ++i) cumulative_.push_back(sum += std::pow(static_cast<double>(i + 1), -kZipfExponent));
  }
  // Unique rows of `num_lookups` draws, ascending.
  std::vector<std::uint64_t> batch(std::size_t num_lookups) {
    std::vector<std::uint64_t> rows(num_lookups);
    std::uniform_real_distribution<double> uniform;
    for (std::uint64_t& row : rows) {
      if (!is_zipf_) {
        row = rng_() % num_rows_;
        continue;
      }
      const double at = uniform(rng_) * cumulative_.back();
      const auto rank = static_cast<std::uint64_t>(std::lower_bound(cumulative_.begin(), cumulative_.end(), at) - cumulative_.begin());
      row = rank * kScatter % num_rows_;
    }
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    return rows;
  }

 private:
  std::uint64_t num_rows_;
  bool is_zipf_;
  std::mt19937_64 rng_;
  std::vector<double> cumulative_;
};

// The work on a pinned row that stands for an update; checks that it is the right row.
Status touch(std::uint64_t row, std::uint32_t payload_bytes, std::byte* payload) {
  std::uint64_t found = 0;
  std::memcpy(&found, payload, sizeof(found));
  if (found != row) return Status::corruption("benchmark", "expected row " + std::to_string(row) + ", got " + std::to_string(found));
  auto* values = reinterpret_cast<float*>(payload);
  for (std::uint32_t i = 2; i < payload_bytes / sizeof(float); ++i) values[i] += 1.0f;
  return {};
}

class Contender {
 public:
  virtual ~Contender() = default;
  virtual Status load() = 0;
  virtual Status batch(Measurement* out) = 0;
  virtual Status raw(bool is_write, Measurement* out) = 0;
  virtual std::string describe() = 0;
};

// A backend behind the same cache as ours: slots, CLOCK, pins; dirty victims are written and misses read in one go each.
class CachedBackend : public Contender {
 public:
  CachedBackend(std::unique_ptr<Backend> backend, const Shape& shape, std::uint64_t cache_bytes, std::size_t num_lookups, Ids ids)
      : backend_(std::move(backend)), shape_(shape), num_lookups_(num_lookups), ids_(std::move(ids)), cache_bytes_(cache_bytes) {}

  Status load() override {
    KSTEP_RETURN_IF_ERROR(RowCache::make(cache_bytes_, (shape_.payload_bytes + 63) / 64 * 64, &cache_));
    return backend_->load();
  }

  Status batch(Measurement* out) override {
    const std::vector<std::uint64_t> rows = ids_.batch(num_lookups_);
    victims_.resize(rows.size() * shape_.payload_bytes);
    std::vector<std::uint32_t> slots(rows.size());
    std::vector<std::uint64_t> evicted, missing;
    std::vector<std::byte*> evicted_payloads, missing_payloads;
    const double start = now_s(), cpu = cpu_s();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      slots[i] = cache_->find(rows[i]);
      if (slots[i] == kNoCacheSlot) continue;
      cache_->count_use(slots[i]);
      cache_->pin(slots[i]);
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (slots[i] != kNoCacheSlot) continue;
      std::uint32_t slot = cache_->take_free();
      if (slot == kNoCacheSlot) {
        slot = cache_->choose_victim(0);
        if (slot == kNoCacheSlot) return Status::full("benchmark", "the batch does not fit the cache");
        if (cache_->is_dirty(slot)) {
          std::byte* copy = victims_.data() + evicted.size() * shape_.payload_bytes;
          std::memcpy(copy, cache_->payload(slot), shape_.payload_bytes);
          evicted.push_back(cache_->key(slot));
          evicted_payloads.push_back(copy);
        }
        cache_->erase(slot);
      }
      cache_->insert(slot, rows[i]);
      cache_->pin(slot);
      slots[i] = slot;
      missing.push_back(rows[i]);
      missing_payloads.push_back(cache_->payload(slot));
    }
    KSTEP_RETURN_IF_ERROR(backend_->write(evicted, evicted_payloads));
    KSTEP_RETURN_IF_ERROR(backend_->read(missing, missing_payloads));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      KSTEP_RETURN_IF_ERROR(touch(rows[i], shape_.payload_bytes, cache_->payload(slots[i])));
      cache_->set_dirty(slots[i], true);
      cache_->unpin(slots[i]);
    }
    *out = {now_s() - start, cpu_s() - cpu, rows.size(), missing.size()};
    return backend_->drop_page_cache();
  }

  Status raw(bool is_write, Measurement* out) override {
    std::vector<std::uint64_t> rows = raw_ids_.batch(num_lookups_ / 2);
    std::shuffle(rows.begin(), rows.end(), std::mt19937_64(rows.size()));
    victims_.resize(std::max<std::size_t>(victims_.size(), rows.size() * shape_.payload_bytes));
    std::vector<std::byte*> payloads;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      payloads.push_back(victims_.data() + i * shape_.payload_bytes);
      fill_payload(rows[i], shape_.payload_bytes, payloads.back());
    }
    const double start = now_s(), cpu = cpu_s();
    KSTEP_RETURN_IF_ERROR(is_write ? backend_->write(rows, payloads) : backend_->read(rows, payloads));
    *out = {now_s() - start, cpu_s() - cpu, rows.size(), rows.size()};
    return backend_->drop_page_cache();
  }

  std::string describe() override { return backend_->describe(); }

 private:
  std::unique_ptr<Backend> backend_;
  Shape shape_;
  std::size_t num_lookups_;
  Ids ids_;
  Ids raw_ids_{shape_.num_rows, false, 99};
  std::uint64_t cache_bytes_;
  std::unique_ptr<RowCache> cache_;
  std::vector<std::byte> victims_;
};

class Tiered : public Contender {
 public:
  Tiered(const Shape& shape, const std::string& folder, std::uint64_t cache_bytes, std::size_t num_lookups, Ids ids, bool has_lookahead)
      : shape_(shape), num_lookups_(num_lookups), ids_(std::move(ids)), has_lookahead_(has_lookahead) {
    options_.store.paths = {folder};
    TableSpec table;
    table.name = "t";
    table.num_rows = shape.num_rows;
    table.dim = shape.payload_bytes / 4;
    status_ = RecordSchema::make({{"weight", DType::F32, table.dim}}, &table.schema);
    options_.store.tables = {table};
    options_.cache_bytes = {cache_bytes};
    options_.prefetch_depth = 0;  // no overlap: what is measured is the store and the eviction
  }

  Status load() override {
    KSTEP_RETURN_IF_ERROR(status_);
    KSTEP_RETURN_IF_ERROR(TieredRows::make(options_, &rows_));
    constexpr std::uint64_t kChunk = 32768;
    for (std::uint64_t first = 0; first < shape_.num_rows; first += kChunk) {
      std::vector<std::uint64_t> rows;
      for (std::uint64_t row = first; row < std::min(first + kChunk, shape_.num_rows); ++row) rows.push_back(row);
      payloads_.resize(rows.size());
      PinTicket ticket = kNoTicket;
      KSTEP_RETURN_IF_ERROR(rows_->pin(0, rows.data(), rows.size(), PinMode::Update, payloads_.data(), &ticket));
      for (std::size_t i = 0; i < rows.size(); ++i) fill_payload(rows[i], shape_.payload_bytes, payloads_[i]);
      KSTEP_RETURN_IF_ERROR(rows_->unpin(ticket, true));
    }
    return rows_->flush();
  }

  Status batch(Measurement* out) override {
    while (ahead_.size() < (has_lookahead_ ? kLookAhead : 1)) {
      ahead_.push_back(ids_.batch(num_lookups_));
      if (has_lookahead_) KSTEP_RETURN_IF_ERROR(rows_->prefetch({{0, ahead_.back().data(), ahead_.back().size()}}));
    }
    const std::vector<std::uint64_t> rows = std::move(ahead_.front());
    ahead_.pop_front();
    payloads_.resize(rows.size());
    const double start = now_s(), cpu = cpu_s();
    PinTicket ticket = kNoTicket;
    KSTEP_RETURN_IF_ERROR(rows_->pin(0, rows.data(), rows.size(), PinMode::Update, payloads_.data(), &ticket));
    for (std::size_t i = 0; i < rows.size(); ++i) KSTEP_RETURN_IF_ERROR(touch(rows[i], shape_.payload_bytes, payloads_[i]));
    KSTEP_RETURN_IF_ERROR(rows_->unpin(ticket, true));
    const double misses = rows_->counters()[0].at("misses_rows");  // also waits for what the batch left to do
    *out = {now_s() - start, cpu_s() - cpu, rows.size(), static_cast<std::size_t>(misses - misses_before_)};
    misses_before_ = misses;
    return {};
  }

  Status raw(bool, Measurement*) override { return Status::invalid("benchmark", "raw transfers are measured on row_store"); }

  std::string describe() override {
    std::string text = "{\"io_backend\": \"" + std::string(rows_->io_backend()) + "\"";
    const std::map<std::string, double> counters = rows_->counters()[0];
    for (const auto& item : counters) text += ", \"" + item.first + "\": " + std::to_string(item.second);
    return text + "}";
  }

 private:
  Shape shape_;
  std::size_t num_lookups_;
  Ids ids_;
  bool has_lookahead_;
  TieredOptions options_;
  Status status_;
  std::unique_ptr<TieredRows> rows_;
  std::deque<std::vector<std::uint64_t>> ahead_;
  std::vector<std::byte*> payloads_;
  double misses_before_ = 0;
};

int fail(const Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return 1;
}

int serve(Contender* contender) {
  const double start = now_s();
  const Status loaded = contender->load();
  if (!loaded.ok()) return fail(loaded);
  std::printf("{\"load_s\": %.3f}\n", now_s() - start);
  std::fflush(stdout);
  std::string command;
  while (std::getline(std::cin, command) && command != "quit") {
    Measurement m;
    Status status;
    if (command == "describe") {
      std::printf("%s\n", contender->describe().c_str());
      std::fflush(stdout);
      continue;
    }
    if (command == "batch") {
      status = contender->batch(&m);
    } else if (command == "raw_read" || command == "raw_write") {
      status = contender->raw(command == "raw_write", &m);
    } else {
      status = Status::invalid("benchmark", "unknown command '" + command + "'");
    }
    if (!status.ok()) return fail(status);
    std::printf("{\"seconds\": %.6f, \"cpu_s\": %.6f, \"rows\": %zu, \"misses\": %zu}\n", m.seconds, m.cpu_s, m.num_rows, m.num_misses);
    std::fflush(stdout);
  }
  return 0;
}

int run(int argc, char** argv) {
  if (argc != 9) return fail(Status::invalid("usage", "row_store_bench CONTENDER FOLDER NUM_ROWS DIM CACHE_SHARE LOOKUPS IDS SEED"));
  const std::string kind = argv[1], folder = argv[2];
  Shape shape;
  shape.num_rows = std::strtoull(argv[3], nullptr, 10);
  shape.payload_bytes = static_cast<std::uint32_t>(std::strtoul(argv[4], nullptr, 10) * sizeof(float) * kFieldsPerRow);
  const auto cache_bytes = static_cast<std::uint64_t>(std::strtod(argv[5], nullptr) * static_cast<double>(shape.num_rows) * shape.payload_bytes);
  const std::size_t num_lookups = std::strtoull(argv[6], nullptr, 10);
  Ids ids(shape.num_rows, std::string(argv[7]) == "zipf", std::strtoull(argv[8], nullptr, 10));
  std::unique_ptr<Contender> contender;
  std::unique_ptr<Backend> backend;
  if (kind == "row_store") backend = make_row_store(shape, folder);
  if (kind == "device_limit") backend = make_device_limit(shape, folder);
  if (kind == "in_place") backend = make_in_place(shape, folder);
  if (kind == "mmap") backend = make_mmap(shape, folder);
  if (kind == "rocksdb_32") backend = make_rocksdb(shape, folder);
  if (backend != nullptr) contender = std::make_unique<CachedBackend>(std::move(backend), shape, cache_bytes, num_lookups, std::move(ids));
  if (kind == "tiered" || kind == "tiered_lookahead") {
    contender = std::make_unique<Tiered>(shape, folder, cache_bytes, num_lookups, std::move(ids), kind == "tiered_lookahead");
  }
  if (contender == nullptr) return fail(Status::not_found("contender '" + kind + "'", "unknown, or not built in"));
  return serve(contender.get());
}

}  // namespace
}  // namespace kstep::bench

int main(int argc, char** argv) { return kstep::bench::run(argc, argv); }
