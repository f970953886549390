// The reading half of RowLog: batched verified reads, and loading sealed segments at open.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "storage/row_log.h"

namespace kstep {
namespace {

constexpr std::size_t kManyReads = 32;  // they keep the drive busy for about as long as a slice of cleaning takes

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string record_place(const std::string& path, std::uint64_t offset) {
  return path + " at offset " + std::to_string(offset);
}

}  // namespace

Status RowLog::acquire(const Segment& segment, File** out) {
  *out = context_->files.find(segment.id);
  if (*out != nullptr) return {};
  const OpenMode mode = segment.state == Segment::State::Open ? OpenMode::ReadWrite : OpenMode::Read;
  return context_->files.open(segment.id, segment_path(segment), mode, context_->use_direct_io, out);
}

Status RowLog::check_record(const ReadRow& row, const std::byte* record) const {
  RecordTail tail;
  const bool is_intact = read_record_tail(layout_, record, &tail);
  if (is_intact && tail.row_id == row.row && tail.table_id == row.table->spec.record_table_id()) return {};
  const std::uint32_t ordinal = ordinal_of(row.slot);
  const std::string context = record_place(segment_path(segments_[ordinal]), layout_.offset_of(row.slot - first_slot(ordinal)));
  const std::string wanted = "row " + std::to_string(row.row) + " of table '" + row.table->spec.name + "'";
  if (!is_intact) {
    return Status::corruption(context, "checksum of " + wanted + " does not match; restore an earlier snapshot, or check the drive");
  }
  return Status::corruption(context, "expected " + wanted + ", found row " + std::to_string(tail.row_id) + " of table_id " +
                                         std::to_string(tail.table_id));
}

Status RowLog::read(ReadRow* rows, std::size_t num_rows) {
  order_.clear();
  for (std::size_t i = 0; i < num_rows; ++i) {
    if (i + kIndexAhead < num_rows) rows[i + kIndexAhead].table->index.prefetch(rows[i + kIndexAhead].row);
    rows[i].slot = rows[i].table->index.find(rows[i].row);
    if (rows[i].slot == kNoSlot) {
      return Status::not_found("table '" + rows[i].table->spec.name + "'", "row " + std::to_string(rows[i].row) + " was never written");
    }
    const std::uint32_t ordinal = ordinal_of(rows[i].slot);
    const std::byte* record = find_in_memory(ordinal, layout_.offset_of(rows[i].slot - first_slot(ordinal)));
    ++rows[i].table->io.rows_read;
    if (record == nullptr) {
      order_.push_back(static_cast<std::uint32_t>(i));
      continue;
    }
    KSTEP_RETURN_IF_ERROR(check_record(rows[i], record));
    std::memcpy(rows[i].payload_out, record, layout_.payload_bytes);
  }
  if (order_.empty()) return {};
  // In slot order every segment is visited once, so a few open files suffice, and rows that share a
  // unit come together. Several drives are then read side by side.
  std::sort(order_.begin(), order_.end(), [&](std::uint32_t a, std::uint32_t b) {
    const std::uint32_t path_a = segments_[ordinal_of(rows[a].slot)].path;
    const std::uint32_t path_b = segments_[ordinal_of(rows[b].slot)].path;
    return path_a != path_b ? path_a < path_b : rows[a].slot < rows[b].slot;
  });
  return read_groups(rows, order_);
}

// Starts the read of the next group at *next, and moves *next past it. Leaves *is_started false when
// all file handles are in use.
Status RowLog::start_group(ReadRow* rows, const std::vector<std::uint32_t>& order, std::size_t* next, bool* is_started) {
  *is_started = false;
  const std::uint32_t slot = rows[order[*next]].slot;
  const std::uint32_t ordinal = ordinal_of(slot);
  const Segment& segment = segments_[ordinal];
  File* file = nullptr;
  Status status = acquire(segment, &file);
  if (status.kind == StatusKind::Full) return {};
  KSTEP_RETURN_IF_ERROR(status);

  const std::uint32_t record = slot - first_slot(ordinal);
  const std::uint32_t unit = record / layout_.records_per_unit;
  ReadGroup* group = idle_groups_.back();
  idle_groups_.pop_back();
  group->ordinal = ordinal;
  group->first = *next;
  std::uint32_t last_record = record;
  while (++*next < order.size()) {
    const std::uint32_t other = rows[order[*next]].slot;
    if (ordinal_of(other) != ordinal || (other - first_slot(ordinal)) / layout_.records_per_unit != unit) break;
    last_record = other - first_slot(ordinal);
  }
  group->last = *next;
  const std::uint64_t alignment = file->is_direct() ? context_->alignments[segment.path] : 1;
  const std::uint64_t begin = layout_.offset_of(record) / alignment * alignment;
  const std::uint64_t end = (layout_.offset_of(last_record) + layout_.record_bytes + alignment - 1) / alignment * alignment;
  group->request = {};
  group->request.file = file;
  group->request.offset = begin;
  group->request.num_bytes = static_cast<std::uint32_t>(end - begin);
  group->request.buffer = group->memory.data();
  group->request.tag = reinterpret_cast<std::uint64_t>(group);
  rows[order[group->first]].table->io.bytes_read += group->request.num_bytes;
  context_->path_bytes_read[segment.path] += group->request.num_bytes;
  *is_started = true;
  return context_->reads->submit(&group->request);
}

Status RowLog::finish_group(ReadRow* rows, const std::vector<std::uint32_t>& order, ReadGroup* group) {
  const IoRequest& request = group->request;
  const Segment& segment = segments_[group->ordinal];
  release(segment);
  idle_groups_.push_back(group);
  if (request.result < 0) {
    return Status::io("read " + record_place(segment_path(segment), request.offset),
                      std::strerror(static_cast<int>(-request.result)));
  }
  if (request.result != std::int64_t{request.num_bytes}) {
    return Status::corruption(record_place(segment_path(segment), request.offset),
                              "expected " + std::to_string(request.num_bytes) + " bytes, the file ends after " +
                                  std::to_string(request.result));
  }
  for (std::size_t i = group->first; i < group->last; ++i) {
    const ReadRow& row = rows[order[i]];
    const std::uint64_t offset = layout_.offset_of(row.slot - first_slot(group->ordinal));
    const std::byte* record = group->memory.data() + (offset - request.offset);
    KSTEP_RETURN_IF_ERROR(check_record(row, record));
    std::memcpy(row.payload_out, record, layout_.payload_bytes);
  }
  return {};
}

Status RowLog::read_groups(ReadRow* rows, const std::vector<std::uint32_t>& order) {
  IoEngine& engine = *context_->reads;
  const std::size_t depth = engine.depth();
  if (groups_.empty()) {
    for (std::size_t i = 0; i < depth; ++i) {
      groups_.push_back(std::make_unique<ReadGroup>(layout_.unit_bytes));
      idle_groups_.push_back(groups_.back().get());
    }
    reaped_.resize(depth);
  }
  // One cursor per path over its stretch of the order.
  struct Cursor {
    std::size_t next, end;
  };
  std::array<Cursor, 16> cursors;
  const std::size_t num_paths = std::min(context_->roots.size(), cursors.size());
  std::size_t begin = 0;
  for (std::size_t p = 0; p < num_paths; ++p) {
    std::size_t end = begin;
    while (end < order.size() && segments_[ordinal_of(rows[order[end]].slot)].path <= p) ++end;
    cursors[p] = {begin, p + 1 == num_paths ? order.size() : end};
    begin = end;
  }
  Status failure;
  std::size_t turn = 0;
  while (true) {
    std::size_t num_idle_paths = 0;
    while (failure.ok() && engine.num_in_flight() < depth && num_idle_paths < num_paths) {
      Cursor& cursor = cursors[turn++ % num_paths];
      bool is_started = false;
      if (cursor.next < cursor.end) failure = start_group(rows, order, &cursor.next, &is_started);
      num_idle_paths = is_started ? 0 : num_idle_paths + 1;
    }
    const std::size_t in_flight = engine.num_in_flight();
    if (in_flight == 0) {
      const bool is_done = std::all_of(cursors.begin(), cursors.begin() + static_cast<std::ptrdiff_t>(num_paths),
                                       [](const Cursor& c) { return c.next >= c.end; });
      if (failure.ok() && !is_done) return Status::full("read " + folder(0), "no file handle is free for reading");
      return failure;
    }
    context_->sum_queue_depth += in_flight;
    ++context_->num_queue_samples;
    std::size_t num_done = 0;
    double beside_s = 0;
    if (context_->beside_reads && in_flight >= std::min(kManyReads, depth)) {
      const auto start = std::chrono::steady_clock::now();
      if (context_->beside_reads()) beside_s = seconds_since(start);
    }
    KSTEP_RETURN_IF_ERROR(engine.reap(std::max<std::size_t>(1, in_flight / 4), reaped_.size(), reaped_.data(), &num_done));
    context_->seconds_beside_reads += beside_s;
    if (num_done == in_flight) context_->seconds_reads_held_up += beside_s;  // the drive may have been idle for a part of it
    for (std::size_t i = 0; i < num_done; ++i) {
      Status status = finish_group(rows, order, reinterpret_cast<ReadGroup*>(reaped_[i]->tag));
      if (failure.ok()) failure = status;  // the rest is still waited for: its buffers are in use
    }
  }
}

Status RowLog::load_segment(std::uint64_t id, std::uint32_t path, std::uint64_t expected_file_bytes,
                            std::uint32_t expected_trailer_crc, LoadedEpochs* epochs) {
  std::uint32_t ordinal = 0;
  KSTEP_RETURN_IF_ERROR(take_ordinal(&ordinal));
  Segment& segment = segments_[ordinal];
  segment.state = Segment::State::Sealed;
  segment.id = id;
  segment.path = path;
  segment.is_synced = true;
  const std::string file_path = segment_path(segment);

  std::unique_ptr<File> file;
  KSTEP_RETURN_IF_ERROR(context_->env->open(file_path, OpenMode::Read, false, &file));
  alignas(8) std::byte header_bytes[64];
  std::size_t got = 0;
  KSTEP_RETURN_IF_ERROR(file->read_at(0, header_bytes, sizeof(header_bytes), &got));
  if (got != sizeof(header_bytes)) return Status::corruption(file_path, "the file ends inside its header");
  SegmentHeader header;
  KSTEP_RETURN_IF_ERROR(decode_header(file_path, header_bytes, &header));
  FooterReader footer;
  KSTEP_RETURN_IF_ERROR(footer.open(file.get()));
  const SegmentTrailer& trailer = footer.trailer();
  if (header.store_id != context_->store_id || header.segment_id != id || trailer.segment_id != id) {
    return Status::corruption(file_path, "belongs to store " + store_id_text(header.store_id) + " segment " +
                                             std::to_string(header.segment_id) + ", not to this place");
  }
  if (header.layout.record_bytes != layout_.record_bytes || header.layout.unit_bytes != layout_.unit_bytes ||
      header.layout.records_per_unit != layout_.records_per_unit || trailer.num_records > layout_.slots_per_segment() ||
      trailer.num_units != layout_.units_for(trailer.num_records)) {
    return Status::corruption(file_path, "record layout differs from the manifest's");
  }
  if (footer.file_bytes() != expected_file_bytes || trailer.trailer_crc != expected_trailer_crc) {
    return Status::corruption(file_path, "expected " + std::to_string(expected_file_bytes) + " bytes and the trailer of the manifest, found " +
                                             std::to_string(footer.file_bytes()) + " bytes");
  }
  segment.stream = static_cast<Stream>(std::min<std::uint32_t>(header.stream, kNumStreams - 1));
  segment.num_records = trailer.num_records;
  segment.sealed_epoch = trailer.max_epoch;
  segment.trailer_crc = trailer.trailer_crc;
  add_file_bytes(&segment, static_cast<std::int64_t>(footer.file_bytes()));

  if (epochs->size() <= ordinal) epochs->resize(ordinal + 1);
  (*epochs)[ordinal].resize(trailer.num_records);
  RecordTail tail;
  for (std::uint32_t record = 0; footer.next(&tail); ++record) {
    TableState* table = context_->find_table(tail.table_id);
    if (table == nullptr || table->log != this || tail.row_id >= table->spec.num_rows) {
      return Status::corruption(file_path, "footer names row " + std::to_string(tail.row_id) + " of table_id " +
                                               std::to_string(tail.table_id) + ", which the manifest does not have");
    }
    const std::uint32_t slot = first_slot(ordinal) + record;
    (*epochs)[ordinal][record] = tail.epoch;
    const std::uint32_t earlier = table->index.find(tail.row_id);
    if (earlier != kNoSlot) {
      const std::uint32_t earlier_ordinal = ordinal_of(earlier);
      if ((*epochs)[earlier_ordinal][earlier - first_slot(earlier_ordinal)] >= tail.epoch) continue;
    }
    table->index.exchange(tail.row_id, slot);
    ++segment.num_live;
    if (earlier == kNoSlot) {
      ++num_live_;
    } else {
      --segments_[ordinal_of(earlier)].num_live;
    }
  }
  if (!footer.finished()) return Status::corruption(file_path, "footer entries are malformed");
  return {};
}

}  // namespace kstep
