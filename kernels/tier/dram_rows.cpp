#include "tier/dram_rows.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "compute/initial_values.h"
#include "compute/thread_pool.h"

namespace kstep {
namespace {

constexpr std::size_t kRowsPerTask = 64;  // rows filled by one task of the pool: about 20 us
constexpr std::size_t kRowsAhead = 8;  // whose places in the index are fetched
constexpr std::size_t kSlabBytes = 4 * HugeBuffer::kPageBytes;

std::size_t physical_memory_bytes() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

std::uint64_t mix(std::uint64_t row) {
  row ^= row >> 32;
  row *= 0x9E3779B97F4A7C15ull;
  return row ^ (row >> 29);
}

}  // namespace

// Where the materialised rows of one table lie.
class DramRows::Storage {
 public:
  virtual ~Storage() = default;
  // Sets payload_out[i] of each materialised row, and lists the i of the others in *fresh.
  virtual void find(const std::uint64_t* rows, std::size_t num_rows, std::byte** payload_out,
                    std::vector<std::size_t>* fresh) const = 0;
  // Gives each row of `fresh` its place. All or nothing.
  virtual Status add(const std::uint64_t* rows, const std::vector<std::size_t>& fresh, std::byte** payload_out) = 0;
  virtual std::size_t num_materialised() const = 0;
};

class DramRows::DirectStorage final : public Storage {
 public:
  static Status make(const TableSpec& table, std::unique_ptr<Storage>* out) {
    auto storage = std::make_unique<DirectStorage>();
    storage->stride_ = table.schema.stride_bytes();
    KSTEP_RETURN_IF_ERROR(HugeBuffer::make(table.num_rows * storage->stride_, "rows in DRAM", &storage->rows_));
    storage->is_materialised_.assign((table.num_rows + 63) / 64, 0);
    *out = std::move(storage);
    return Status();
  }

  void find(const std::uint64_t* rows, std::size_t num_rows, std::byte** payload_out,
            std::vector<std::size_t>* fresh) const override {
    for (std::size_t i = 0; i < num_rows; ++i) {
      payload_out[i] = rows_.data() + rows[i] * stride_;
      if ((is_materialised_[rows[i] / 64] >> (rows[i] % 64) & 1) == 0) fresh->push_back(i);
    }
  }

  Status add(const std::uint64_t* rows, const std::vector<std::size_t>& fresh, std::byte**) override {
    for (std::size_t i : fresh) is_materialised_[rows[i] / 64] |= 1ull << (rows[i] % 64);
    num_materialised_ += fresh.size();
    return Status();
  }

  std::size_t num_materialised() const override { return num_materialised_; }

 private:
  HugeBuffer rows_;
  std::size_t stride_ = 0, num_materialised_ = 0;
  std::vector<std::uint64_t> is_materialised_;
};

class DramRows::PackedStorage final : public Storage {
 public:
  explicit PackedStorage(const TableSpec& table)
      : stride_(table.schema.stride_bytes()), rows_per_slab_(std::max<std::size_t>(1, kSlabBytes / stride_)) {}

  void find(const std::uint64_t* rows, std::size_t num_rows, std::byte** payload_out,
            std::vector<std::size_t>* fresh) const override {
    for (std::size_t i = 0; i < num_rows; ++i) {
      if (i + kRowsAhead < num_rows && !keys_.empty()) {
        const std::size_t ahead = mix(rows[i + kRowsAhead]) & (keys_.size() - 1);
        __builtin_prefetch(&keys_[ahead]);
        __builtin_prefetch(&slots_[ahead]);
      }
      const std::size_t at = keys_.empty() ? 0 : probe(rows[i]);
      if (keys_.empty() || keys_[at] == kEmpty) {
        fresh->push_back(i);
      } else {
        payload_out[i] = address(slots_[at]);
      }
    }
  }

  Status add(const std::uint64_t* rows, const std::vector<std::size_t>& fresh, std::byte** payload_out) override {
    const std::size_t total = num_rows_ + fresh.size();
    if (total > UINT32_MAX) return Status::full("rows in DRAM", "more than 4294967295 rows of one table are touched");
    while (slabs_.size() * rows_per_slab_ < total) {
      HugeBuffer slab;
      KSTEP_RETURN_IF_ERROR(HugeBuffer::make(rows_per_slab_ * stride_, "rows in DRAM", &slab));
      slabs_.push_back(std::move(slab));
    }
    if (3 * total > 2 * keys_.size()) grow_index(total);
    for (std::size_t i : fresh) {
      insert(rows[i], static_cast<std::uint32_t>(num_rows_));
      payload_out[i] = address(num_rows_++);
    }
    return Status();
  }

  std::size_t num_materialised() const override { return num_rows_; }

 private:
  static constexpr std::uint64_t kEmpty = UINT64_MAX;

  std::byte* address(std::size_t slot) const {
    return slabs_[slot / rows_per_slab_].data() + slot % rows_per_slab_ * stride_;
  }

  std::size_t probe(std::uint64_t row) const {
    std::size_t at = mix(row) & (keys_.size() - 1);
    while (keys_[at] != kEmpty && keys_[at] != row) at = (at + 1) & (keys_.size() - 1);
    return at;
  }

  void insert(std::uint64_t row, std::uint32_t slot) {
    const std::size_t at = probe(row);
    keys_[at] = row;
    slots_[at] = slot;
  }

  void grow_index(std::size_t num_rows) {
    std::size_t capacity = 1024;
    while (capacity < 2 * num_rows) capacity *= 2;
    std::vector<std::uint64_t> old_keys(capacity, kEmpty);
    std::vector<std::uint32_t> old_slots(capacity);
    old_keys.swap(keys_);
    old_slots.swap(slots_);
    for (std::size_t at = 0; at < old_keys.size(); ++at) {
      if (old_keys[at] != kEmpty) insert(old_keys[at], old_slots[at]);
    }
  }

  const std::size_t stride_, rows_per_slab_;
  std::vector<HugeBuffer> slabs_;
  std::size_t num_rows_ = 0;
  std::vector<std::uint64_t> keys_;  // open addressing, a power of two, at most two thirds full
  std::vector<std::uint32_t> slots_;
};

struct DramRows::Ticket {
  bool is_open = false;
  PinMode mode = PinMode::Read;
  std::uint32_t generation = 0;
  HugeBuffer initial_rows;  // never-touched rows shown to a reader; kept for the next use of the ticket
};

DramRows::DramRows(std::vector<TableSpec> tables, int num_threads) : tables_(std::move(tables)), num_threads_(num_threads) {}

DramRows::~DramRows() = default;

Status DramRows::make(std::vector<TableSpec> tables, DramLayout layout, int num_threads, std::unique_ptr<RowSource>* out) {
  std::unique_ptr<DramRows> source(new DramRows(std::move(tables), num_threads));
  double total_bytes = 0;
  for (const TableSpec& table : source->tables_) {
    total_bytes += static_cast<double>(table.num_rows) * table.schema.stride_bytes();
  }
  if (layout == DramLayout::Auto) {
    layout = total_bytes <= 0.75 * static_cast<double>(physical_memory_bytes()) ? DramLayout::Direct : DramLayout::Packed;
  }
  for (const TableSpec& table : source->tables_) {
    std::unique_ptr<Storage> storage;
    if (layout == DramLayout::Direct) {
      KSTEP_RETURN_IF_ERROR(DirectStorage::make(table, &storage));
    } else {
      storage = std::make_unique<PackedStorage>(table);
    }
    source->storage_.push_back(std::move(storage));
  }
  *out = std::move(source);
  return Status();
}

DramRows::Ticket* DramRows::take_ticket(PinTicket* id) {
  std::size_t at = 0;
  while (at < tickets_.size() && tickets_[at]->is_open) ++at;
  if (at == tickets_.size()) tickets_.push_back(std::make_unique<Ticket>());
  Ticket* ticket = tickets_[at].get();
  ticket->is_open = true;
  *id = static_cast<PinTicket>(++ticket->generation) << 32 | (at + 1);
  return ticket;
}

void DramRows::fill_fresh(const TableSpec& table, const std::uint64_t* rows, std::byte* const* payload) {
  const std::size_t num_tasks = (fresh_.size() + kRowsPerTask - 1) / kRowsPerTask;
  parallel_tasks(num_threads_, num_tasks, [&](std::size_t task) {
    const std::size_t end = std::min(fresh_.size(), (task + 1) * kRowsPerTask);
    for (std::size_t k = task * kRowsPerTask; k < end; ++k) fill_initial_row(table, rows[fresh_[k]], payload[fresh_[k]]);
  });
}

Status DramRows::pin(std::uint32_t table, const std::uint64_t* unique_rows, std::size_t num_rows, PinMode mode,
                     std::byte** payload_out, PinTicket* ticket) {
  *ticket = kNoTicket;
  if (table >= tables_.size()) {
    return Status::invalid("pin", "table " + std::to_string(table) + " of " + std::to_string(tables_.size()));
  }
  fresh_.clear();
  storage_[table]->find(unique_rows, num_rows, payload_out, &fresh_);
  PinTicket id = kNoTicket;
  Ticket* opened = take_ticket(&id);
  opened->mode = mode;
  Status status;
  if (!fresh_.empty() && mode == PinMode::Update) {
    status = storage_[table]->add(unique_rows, fresh_, payload_out);
  } else if (!fresh_.empty()) {
    const std::size_t stride = tables_[table].schema.stride_bytes();
    if (opened->initial_rows.size() < fresh_.size() * stride) {
      status = HugeBuffer::make(fresh_.size() * stride * 5 / 4, "initial rows", &opened->initial_rows);
    }
    if (status.ok()) {
      for (std::size_t k = 0; k < fresh_.size(); ++k) payload_out[fresh_[k]] = opened->initial_rows.data() + k * stride;
    }
  }
  if (!status.ok()) {
    opened->is_open = false;
    return status;
  }
  fill_fresh(tables_[table], unique_rows, payload_out);
  *ticket = id;
  return Status();
}

Status DramRows::unpin(PinTicket ticket, bool dirty) {
  const std::size_t at = static_cast<std::size_t>(ticket & 0xFFFFFFFFull) - 1;
  if (ticket == kNoTicket || at >= tickets_.size() || !tickets_[at]->is_open || tickets_[at]->generation != ticket >> 32) {
    return Status::invalid("unpin", "ticket " + std::to_string(ticket) + " is not open");
  }
  if (dirty && tickets_[at]->mode == PinMode::Read) {
    return Status::invalid("unpin", "rows that were pinned for reading are said to be dirty");
  }
  tickets_[at]->is_open = false;
  return Status();
}

Status DramRows::prefetch(const std::vector<TableRows>&) { return Status(); }

std::vector<std::map<std::string, double>> DramRows::counters() const {
  std::vector<std::map<std::string, double>> result;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const double rows = static_cast<double>(storage_[t]->num_materialised());
    result.push_back({{"materialised_rows", rows}, {"materialised_bytes", rows * tables_[t].schema.stride_bytes()}});
  }
  return result;
}

}  // namespace kstep
