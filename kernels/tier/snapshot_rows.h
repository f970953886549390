// SnapshotRows: a RowSource over a committed snapshot, read-only.
//
// Purpose: evaluation without an optimizer, a lock or a single write, also while another process trains on the same store.
// Rows without a record show their initial values. There is no cache of its own: the page cache keeps what is read often.
// Ownership and threads: as RowSource says.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "storage/snapshot_reader.h"
#include "tier/row_source.h"

namespace kstep {

class SnapshotRows final : public RowSource {
 public:
  // `reader` may be shared with others, who hold `mutex` while they use it.
  SnapshotRows(std::shared_ptr<SnapshotReader> reader, std::shared_ptr<std::mutex> mutex);

  const std::vector<TableSpec>& tables() const override { return reader_->manifest().tables; }
  // PinMode::Update is refused.
  Status pin(std::uint32_t table, const std::uint64_t* unique_rows, std::size_t num_rows, PinMode mode,
             std::byte** payload_out, PinTicket* ticket) override;
  Status unpin(PinTicket ticket, bool dirty) override;
  Status prefetch(const std::vector<TableRows>& batch) override;
  std::vector<std::map<std::string, double>> counters() const override;

 private:
  struct Ticket {
    AlignedBuffer payloads;
    bool is_open = false;
  };
  struct Counters {
    double misses_rows = 0;
    double first_touches_rows = 0;
  };

  std::shared_ptr<SnapshotReader> reader_;
  std::shared_ptr<std::mutex> mutex_;
  std::vector<Ticket> tickets_;
  std::vector<Counters> counters_;  // by table
  std::vector<ReadRow> reads_;
};

// Reads the payloads of rows of a table into memory `stride_bytes` apart; initial values for rows without a record.
// `reads` is scratch. *num_untouched counts the latter.
Status read_payloads(SnapshotReader* reader, TableState* table, const std::uint64_t* rows, std::size_t num_rows,
                     std::size_t stride_bytes, std::byte* out, std::vector<ReadRow>* reads, std::size_t* num_untouched);

}  // namespace kstep
