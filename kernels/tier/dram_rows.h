// DramRows: a RowSource that keeps every row in DRAM.
//
// Two layouts per group, with the same results:
//   Direct: row r lies at base + r * stride of one reservation per table; a bit per row says whether it is materialised.
//           No index, the fastest. Memory is taken in 2 MiB pages, so scattered rows may take the whole table's bytes.
//   Packed: rows lie one after the other in slabs in the order of their first update, found through a hash index of 12
//           bytes a slot. Memory follows the touched rows, for tables that would not fit.
//   Auto:   Direct if all tables together fit in three quarters of the machine's memory, else Packed.
// Ownership and threads: as RowSource says.
#pragma once

#include <memory>
#include <vector>

#include "tier/huge_buffer.h"
#include "tier/row_source.h"

namespace kstep {

enum class DramLayout : int { Auto = 0, Direct = 1, Packed = 2 };

class DramRows final : public RowSource {
 public:
  // `num_threads` (>= 1) share the filling of rows on their first touch.
  static Status make(std::vector<TableSpec> tables, DramLayout layout, int num_threads, std::unique_ptr<RowSource>* out);
  ~DramRows() override;

  const std::vector<TableSpec>& tables() const override { return tables_; }
  Status pin(std::uint32_t table, const std::uint64_t* unique_rows, std::size_t num_rows, PinMode mode,
             std::byte** payload_out, PinTicket* ticket) override;
  Status unpin(PinTicket ticket, bool dirty) override;
  Status prefetch(const std::vector<TableRows>& batch) override;
  std::vector<std::map<std::string, double>> counters() const override;

 private:
  class Storage;
  class DirectStorage;
  class PackedStorage;
  struct Ticket;

  DramRows(std::vector<TableSpec> tables, int num_threads);
  Ticket* take_ticket(PinTicket* id);
  void fill_fresh(const TableSpec& table, const std::uint64_t* rows, std::byte* const* payload);

  const std::vector<TableSpec> tables_;
  const int num_threads_;
  std::vector<std::unique_ptr<Storage>> storage_;  // one per table
  std::vector<std::unique_ptr<Ticket>> tickets_;
  std::vector<std::size_t> fresh_;  // scratch: which rows of the running pin are not materialised
};

}  // namespace kstep
