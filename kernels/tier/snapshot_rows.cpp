#include "tier/snapshot_rows.h"

#include <algorithm>

#include "compute/initial_values.h"

namespace kstep {

Status read_payloads(SnapshotReader* reader, TableState* table, const std::uint64_t* rows, std::size_t num_rows,
                     std::size_t stride_bytes, std::byte* out, std::vector<ReadRow>* reads, std::size_t* num_untouched) {
  reads->clear();
  for (std::size_t i = 0; i < num_rows; ++i) {
    std::byte* payload = out + i * stride_bytes;
    const std::uint32_t slot = table->index.find(rows[i]);
    if (slot == kNoSlot) {
      fill_initial_row(table->spec, rows[i], payload);
    } else {
      reads->push_back({slot, table, rows[i], payload});
    }
  }
  *num_untouched = num_rows - reads->size();
  return reader->read(reads->data(), reads->size());
}

SnapshotRows::SnapshotRows(std::shared_ptr<SnapshotReader> reader, std::shared_ptr<std::mutex> mutex)
    : reader_(std::move(reader)), mutex_(std::move(mutex)), counters_(tables().size()) {}

Status SnapshotRows::pin(std::uint32_t table, const std::uint64_t* unique_rows, std::size_t num_rows, PinMode mode,
                         std::byte** payload_out, PinTicket* ticket) {
  *ticket = kNoTicket;
  const std::string where = "snapshot '" + reader_->manifest().name + "'";
  if (mode == PinMode::Update) return Status::invalid(where, "is read-only; open the store for training to update rows");
  if (table >= tables().size()) return Status::invalid(where, "table " + std::to_string(table) + " of " + std::to_string(tables().size()));
  const TableSpec& spec = tables()[table];
  if (num_rows > 0 && unique_rows[num_rows - 1] >= spec.num_rows) {
    return Status::invalid("table '" + spec.name + "'", "row " + std::to_string(unique_rows[num_rows - 1]) + " of " +
                                                            std::to_string(spec.num_rows) + " rows");
  }
  auto free = std::find_if(tickets_.begin(), tickets_.end(), [](const Ticket& t) { return !t.is_open; });
  if (free == tickets_.end()) free = tickets_.emplace(tickets_.end());
  const std::size_t stride_bytes = spec.schema.stride_bytes();
  if (free->payloads.size() < num_rows * stride_bytes) free->payloads = AlignedBuffer(num_rows * stride_bytes);
  std::size_t num_untouched = 0;
  {
    std::lock_guard<std::mutex> lock(*mutex_);
    KSTEP_RETURN_IF_ERROR(read_payloads(reader_.get(), reader_->find_table(spec.name), unique_rows, num_rows, stride_bytes,
                                        free->payloads.data(), &reads_, &num_untouched));
  }
  counters_[table].misses_rows += static_cast<double>(num_rows - num_untouched);
  counters_[table].first_touches_rows += static_cast<double>(num_untouched);
  for (std::size_t i = 0; i < num_rows; ++i) payload_out[i] = free->payloads.data() + i * stride_bytes;
  free->is_open = true;
  *ticket = static_cast<PinTicket>(free - tickets_.begin()) + 1;
  return {};
}

Status SnapshotRows::unpin(PinTicket ticket, bool dirty) {
  if (ticket == kNoTicket || ticket > tickets_.size() || !tickets_[ticket - 1].is_open || dirty) {
    return Status::invalid("unpin", "ticket " + std::to_string(ticket) + " is not open, or rows of a snapshot are said to be dirty");
  }
  tickets_[ticket - 1].is_open = false;
  return {};
}

Status SnapshotRows::prefetch(const std::vector<TableRows>& /*batch*/) { return {}; }

std::vector<std::map<std::string, double>> SnapshotRows::counters() const {
  std::vector<std::map<std::string, double>> result;
  for (const Counters& table : counters_) {
    result.push_back({{"misses_rows", table.misses_rows}, {"first_touches_rows", table.first_touches_rows}});
  }
  return result;
}

}  // namespace kstep
