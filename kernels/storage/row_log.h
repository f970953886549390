// RowLog: the append-only log of all rows with one payload size.
//
// Purpose: append newest versions of rows to open segments, read rows by their index slot, keep
// count of what is live, and hand sealed segments to snapshots. The bytes are docs/format.md.
// Ownership: segments' bookkeeping and write buffers; tables, files, engines belong to the StoreContext.
// Thread rule: one thread at a time for everything under one StoreContext.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/schema.h"
#include "storage/file_cache.h"
#include "storage/file_closer.h"
#include "storage/row_index.h"
#include "storage/segment_format.h"

namespace kstep {

class RowLog;

// What the drive did for one table.
struct TableIo {
  std::uint64_t rows_read = 0;
  std::uint64_t rows_written = 0;
  std::uint64_t bytes_read = 0;     // device reads started for this table's rows
  std::uint64_t bytes_written = 0;  // records, without padding, footers and cleaning
};

struct TableState {
  TableState(TableSpec s) : spec(std::move(s)), index(spec.num_rows) {}
  TableSpec spec;
  RowIndex index;
  RowLog* log = nullptr;
  TableIo io;
};

// What the parts of one store share.
struct StoreContext {
  StoreContext(Env* e, std::uint32_t max_open_files) : env(e), files(e, max_open_files) {}

  Env* env;
  std::vector<std::string> roots;  // folders holding log-*; one per path
  std::vector<std::uint32_t> alignments;
  bool use_direct_io = true;
  StoreId store_id{};
  FileCache files;
  FileCloser removed_files;
  std::unique_ptr<IoEngine> reads;
  std::unique_ptr<IoEngine> writes;
  std::vector<std::unique_ptr<TableState>> tables;        // in the order given
  std::unordered_map<std::uint32_t, TableState*> table_of_record_id;  // by TableSpec::record_table_id
  std::uint64_t next_segment_id = 1;
  std::uint32_t epoch = 0;                                // of the current append batch
  std::vector<std::uint64_t> path_bytes;                  // live bytes per path, for striping
  std::vector<double> path_weights;                       // what part of them each path should have; not all 0
  std::vector<std::uint64_t> path_bytes_read;             // by rows asked for
  std::vector<std::uint64_t> path_bytes_written;          // all segment bytes
  std::uint64_t unheld_bytes = 0;                         // live segments that no snapshot holds
  std::uint64_t held_bytes = 0;                           // live segments that a snapshot holds too
  std::uint64_t bytes_written = 0;                        // all segment bytes, with padding and cleaning
  std::uint64_t bytes_cleaned_read = 0;                   // read by the cleaner
  std::uint64_t bytes_cleaned_written = 0;                // records copied by the cleaner
  std::uint64_t sum_queue_depth = 0;                      // over num_queue_samples
  std::uint64_t num_queue_samples = 0;
  const std::atomic<bool>* is_awaited = nullptr;          // whether somebody waits for this thread's next read; null: nobody ever
  // Called while the drive is busy with many reads of rows: does a little that waits for nothing, removes no segment and frees no
  // ordinal; false if it had nothing to do. Rows may move under it. Empty: nothing to do, ever.
  std::function<bool()> beside_reads;
  double seconds_beside_reads = 0;                        // spent in it
  double seconds_reads_held_up = 0;                       // the part of them by whose end no read was on its way any more
  Status poison;                                          // a failed sync: refuse all later writes

  TableState* find_table(std::uint32_t record_table_id) const {
    const auto found = table_of_record_id.find(record_table_id);
    return found == table_of_record_id.end() ? nullptr : found->second;
  }
};

// A row wanted from the log. Where it lies is looked up by read() itself: any append or cleaning in between may move it.
struct ReadRow {
  std::uint32_t slot = kNoSlot;  // set by read(), whatever it was
  TableState* table = nullptr;
  std::uint64_t row = 0;
  std::byte* payload_out = nullptr;
};

// Epochs of the records loaded so far, by segment ordinal and record; needed only while opening.
using LoadedEpochs = std::vector<std::vector<std::uint32_t>>;

enum class Stream : std::uint8_t { Hot = 0, Warm = 1, Cold = 2 };
constexpr std::size_t kNumStreams = 3;

struct Segment {
  enum class State : std::uint8_t { Free, Open, Sealed };
  State state = State::Free;
  Stream stream = Stream::Warm;
  bool is_synced = false;
  bool is_bad = false;          // the cleaner found damage in it; kept as it is
  std::uint32_t path = 0;
  std::uint32_t num_records = 0;
  std::uint32_t num_live = 0;
  std::uint32_t num_holders = 0;  // snapshots that hold it
  std::uint32_t sealed_epoch = 0;
  std::uint32_t trailer_crc = 0;
  std::uint64_t id = 0;
  std::uint64_t file_bytes = 0;
};

class RowLog {
 public:
  RowLog(StoreContext* context, RecordLayout layout, std::uint64_t segment_bytes);
  ~RowLog();
  RowLog(const RowLog&) = delete;
  RowLog& operator=(const RowLog&) = delete;

  const RecordLayout& layout() const { return layout_; }
  std::string folder(std::uint32_t path) const;
  std::string segment_path(const Segment& segment) const;
  const std::vector<Segment>& segments() const { return segments_; }
  std::uint64_t num_live() const { return num_live_; }
  std::uint64_t live_unit_bytes() const { return std::uint64_t{layout_.units_for(num_live_)} * layout_.unit_bytes; }
  std::uint64_t unheld_bytes() const { return unheld_bytes_; }

  // --- row_log_write.cpp -------------------------------------------------------------------------
  // Appends a version of a row under the context's epoch and points the index at it. On failure the
  // row keeps its earlier version, and the call may be repeated.
  Status append(TableState* table, std::uint64_t row, const std::byte* payload);
  // Appends a copy of a record (the cleaner's append). REQUIRES: the record is live.
  Status append_copy(TableState* table, const RecordTail& tail, const std::byte* record);
  // Repeats writes that failed. Every append does this first; ok when nothing is waiting.
  Status retry_failed_writes();
  // Finishes every open segment and makes it immutable.
  Status seal_all();
  // fdatasync of every sealed segment not yet synced. A failure poisons the context.
  Status sync_all();
  // Drops the live link of a sealed segment. REQUIRES: num_live == 0.
  Status remove_segment(std::uint32_t ordinal);

  // --- row_log_read.cpp --------------------------------------------------------------------------
  // Copies payloads of `num_rows` rows, in any order, verifying each record's checksum and identity.
  // REQUIRES: every row is in the index. On failure the outputs are unspecified.
  Status read(ReadRow* rows, std::size_t num_rows);
  // Registers a sealed segment file found under the roots and adds its records to the indexes
  // ("newest epoch wins"). `epochs` carries epochs between the calls of one load.
  Status load_segment(std::uint64_t id, std::uint32_t path, std::uint64_t expected_file_bytes,
                      std::uint32_t expected_trailer_crc, LoadedEpochs* epochs);
  // Opens (or finds open) a segment's file and pins it under file_key(). Full when handles run out.
  Status acquire(const Segment& segment, File** out);
  void release(const Segment& segment) { context_->files.release(segment.id); }

  std::uint32_t ordinal_of(std::uint32_t slot) const { return slot / layout_.slots_per_segment(); }
  std::uint32_t first_slot(std::uint32_t ordinal) const { return ordinal * layout_.slots_per_segment(); }
  // Sealed segments without live records, waiting for remove_segment().
  std::vector<std::uint32_t>& empty_segments() { return empty_segments_; }
  // A snapshot began or ceased to hold a segment.
  void add_holder(Segment* segment);
  void remove_holder(Segment* segment);
  Segment* find_segment(std::uint64_t id);
  std::map<std::uint64_t, Segment*> segments_by_id();
  // Record bytes appended so far, the cleaner's copies not counted.
  std::uint64_t appended_bytes() const { return appended_bytes_; }
  // Footers that the open segments still have to write.
  std::uint64_t open_footer_bytes() const;
  void mark_bad(std::uint32_t ordinal) { segments_[ordinal].is_bad = true; }
  // Space counts of an existing segment change by `bytes` (negative: shrink).
  void add_file_bytes(Segment* segment, std::int64_t bytes);

 private:
  struct WriteBuffer;
  struct OpenSegment;

  Status take_ordinal(std::uint32_t* out);
  Status open_segment(Stream stream);
  Status ensure_room(Stream stream);
  Status take_buffer(OpenSegment* open, std::uint64_t file_offset);
  Status submit_buffer(OpenSegment* open);
  Status seal(Stream stream);
  Status reap_writes(std::size_t min_done);
  std::byte* place(Stream stream);
  void commit(Stream stream, TableState* table, const RecordTail& tail);
  Stream stream_for(std::uint32_t earlier_slot) const;
  std::uint32_t target_units() const;
  // The path that the next segment belongs on, so that bytes come to lie by weight.
  std::uint32_t next_path() const;
  void count_written(const Segment& segment, std::uint64_t bytes);
  const std::byte* find_in_memory(std::uint32_t ordinal, std::uint64_t offset) const;
  Status check_record(const ReadRow& row, const std::byte* record) const;

  // One device read: a window of one segment that covers one or more wanted records of a unit.
  struct ReadGroup {
    explicit ReadGroup(std::size_t num_bytes) : memory(num_bytes) {}
    AlignedBuffer memory;
    std::uint32_t ordinal = 0;
    std::size_t first = 0;  // range of positions in the read order
    std::size_t last = 0;
    IoRequest request;
  };
  Status start_group(ReadRow* rows, const std::vector<std::uint32_t>& order, std::size_t* next, bool* is_started);
  Status read_groups(ReadRow* rows, const std::vector<std::uint32_t>& order);
  Status finish_group(ReadRow* rows, const std::vector<std::uint32_t>& order, ReadGroup* group);

  StoreContext* context_;
  const RecordLayout layout_;
  const std::uint64_t segment_bytes_;
  std::vector<Segment> segments_;  // by ordinal
  std::vector<std::uint32_t> free_ordinals_;
  std::vector<std::uint32_t> empty_segments_;
  std::array<std::unique_ptr<OpenSegment>, kNumStreams> open_;
  std::vector<std::unique_ptr<WriteBuffer>> buffers_;
  std::uint64_t num_live_ = 0;
  std::uint64_t unheld_bytes_ = 0;
  std::uint64_t appended_bytes_ = 0;

  // Scratch of read(), kept so that the steady state allocates nothing.
  std::vector<std::uint32_t> order_;
  std::vector<std::unique_ptr<ReadGroup>> groups_;
  std::vector<ReadGroup*> idle_groups_;
  std::vector<IoRequest*> reaped_;
};

}  // namespace kstep
