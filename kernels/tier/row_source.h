// RowSource: where the compute kernels get the DRAM addresses of rows.
//
// One RowSource serves one group of tables. `DramRows` keeps every row in DRAM; `TieredRows` keeps a cache in DRAM and
// the rest in the row log. The kernels see only an array of payload addresses, so the two cannot give different bits.
//
// Ownership: the RowSource owns the memory behind every address it hands out. An address is valid from the `pin` that
// returned it to the `unpin` of that ticket.
// Threads: calls on one RowSource are serialised by the caller (the op unit holds one mutex per group). Between `pin`
// and `unpin` the caller's threads read the pinned payloads, and under `PinMode::Update` write them, each row from one
// thread at a time. Several tickets may be open at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/schema.h"
#include "common/status.h"

namespace kstep {

enum class PinMode {
  Read,     // the caller only reads. A never-touched row is shown with its initial values and stays never-touched.
  Update,   // the caller will write every row of the call. A never-touched row is materialised first.
};

// Names the rows of one successful `pin` until they are unpinned. Zero is never a valid ticket.
using PinTicket = std::uint64_t;
constexpr PinTicket kNoTicket = 0;

// The rows of one table, as `prefetch` takes them.
struct TableRows {
  std::uint32_t table = 0;  // position in `tables()`, not TableSpec::table_id
  const std::uint64_t* rows = nullptr;
  std::size_t num_rows = 0;
};

class RowSource {
 public:
  RowSource() = default;
  RowSource(const RowSource&) = delete;
  RowSource& operator=(const RowSource&) = delete;
  virtual ~RowSource() = default;

  // The tables of the group. `table` in the calls below is a position in this vector.
  virtual const std::vector<TableSpec>& tables() const = 0;

  // Makes `num_rows` rows of `table` addressable: payload_out[i] is the payload of unique_rows[i], laid out as
  // tables()[table].schema says and at least 16-byte aligned.
  // REQUIRES: unique_rows strictly ascending, each below TableSpec::num_rows; payload_out has num_rows elements.
  // On error nothing is pinned, nothing is materialised and *ticket is kNoTicket. num_rows == 0 is allowed.
  virtual Status pin(std::uint32_t table, const std::uint64_t* unique_rows, std::size_t num_rows,
                                   PinMode mode, std::byte** payload_out, PinTicket* ticket) = 0;

  // Releases the rows of a ticket. `dirty` (only after PinMode::Update): every row of the ticket was written.
  // An unknown ticket is an InvalidArgument.
  virtual Status unpin(PinTicket ticket, bool dirty) = 0;

  // Says which rows the next batches will pin. Only a hint: it never changes a result.
  // REQUIRES: rows of each element strictly ascending.
  virtual Status prefetch(const std::vector<TableRows>& batch) = 0;

  // Writes down everything that is dirty in DRAM; durable when it returns. A source that lives in DRAM only has nothing
  // to do.
  virtual Status flush() { return Status(); }

  // Rows that pins of a table had to bring up from a lower tier since the source was made; 0 where there is none. Costs nothing,
  // unlike `counters`.
  virtual std::uint64_t num_rows_read(std::uint32_t /*table*/) const { return 0; }

  // Named counters per table, in the order of tables(). Units are in the names ("hits_rows", "stall_s").
  virtual std::vector<std::map<std::string, double>> counters() const = 0;
};

}  // namespace kstep
