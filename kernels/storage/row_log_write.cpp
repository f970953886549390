// The writing half of RowLog: streams, write buffers, sealing.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "storage/row_log.h"

namespace kstep {
namespace {

constexpr std::uint64_t kWriteBufferBytes = 1u << 20;
constexpr std::size_t kBuffersInFlight = 5;        // beside one filling buffer per stream
constexpr std::uint64_t kMinSegmentBytes = 256u << 10;
constexpr std::uint64_t kLiveShareOfSegment = 32;  // a segment is at most 1/32 of the live bytes

std::string segment_name(std::uint64_t id) {
  char name[24];
  std::snprintf(name, sizeof(name), "seg-%016llx", static_cast<unsigned long long>(id));
  return name;
}

}  // namespace

// A piece of an open segment's file, filled in memory and written in one request. It stays readable
// until the write succeeded.
struct RowLog::WriteBuffer {
  enum class State : std::uint8_t { Idle, Filling, InFlight, Failed };
  explicit WriteBuffer(std::size_t num_bytes) : memory(num_bytes) {}
  State state = State::Idle;
  RowLog* log = nullptr;
  AlignedBuffer memory;
  std::uint32_t ordinal = 0;
  std::uint64_t file_offset = 0;
  std::uint32_t num_bytes = 0;  // once submitted
  IoRequest request;
};

struct RowLog::OpenSegment {
  std::uint32_t ordinal = 0;
  std::uint32_t max_records = 0;
  WriteBuffer* current = nullptr;
  FooterBuilder footer;
};

RowLog::RowLog(StoreContext* context, RecordLayout layout, std::uint64_t segment_bytes)
    : context_(context), layout_(layout), segment_bytes_(segment_bytes) {}

RowLog::~RowLog() {
  // The kernel must not write from freed buffers.
  while (context_->writes != nullptr && context_->writes->num_in_flight() > 0) {
    if (!reap_writes(1).ok()) break;
  }
}

std::string RowLog::folder(std::uint32_t path) const {
  return context_->roots[path] + "/log-" + std::to_string(layout_.record_bytes);
}

std::string RowLog::segment_path(const Segment& segment) const {
  return folder(segment.path) + "/" + segment_name(segment.id) +
         (segment.state == Segment::State::Open ? ".open" : ".seg");
}

Status RowLog::append(TableState* table, std::uint64_t row, const std::byte* payload) {
  const Stream stream = stream_for(table->index.find(row));
  KSTEP_RETURN_IF_ERROR(ensure_room(stream));
  const RecordTail tail{row, table->spec.record_table_id(), context_->epoch};
  write_record(layout_, payload, tail, place(stream));
  commit(stream, table, tail);
  ++table->io.rows_written;
  table->io.bytes_written += layout_.record_bytes;
  appended_bytes_ += layout_.record_bytes;
  return {};
}

Status RowLog::append_copy(TableState* table, const RecordTail& tail, const std::byte* record) {
  KSTEP_RETURN_IF_ERROR(ensure_room(Stream::Cold));
  std::memcpy(place(Stream::Cold), record, layout_.record_bytes);
  commit(Stream::Cold, table, tail);
  context_->bytes_cleaned_written += layout_.record_bytes;
  return {};
}

// Rows whose earlier version was written recently are rewritten soon; keeping them together makes
// whole segments die young, which spares the cleaner the rest.
Stream RowLog::stream_for(std::uint32_t earlier_slot) const {
  if (earlier_slot == kNoSlot) return Stream::Warm;
  const Segment& segment = segments_[ordinal_of(earlier_slot)];
  if (segment.state == Segment::State::Open) return Stream::Hot;
  const std::uint32_t age = context_->epoch - segment.sealed_epoch;
  return age < context_->epoch / 8 ? Stream::Hot : Stream::Warm;
}

// Small stores get small segments, so that the few open and half-dead ones stay within the space bound.
std::uint32_t RowLog::target_units() const {
  const std::uint64_t wanted = std::max(kMinSegmentBytes, live_unit_bytes() / kLiveShareOfSegment);
  const std::uint64_t units = std::min(wanted, segment_bytes_) / layout_.unit_bytes;
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(units, 1, layout_.max_units));
}

Status RowLog::take_ordinal(std::uint32_t* out) {
  if (!free_ordinals_.empty()) {
    *out = free_ordinals_.back();
    free_ordinals_.pop_back();
    return {};
  }
  const std::uint64_t end_slot = (std::uint64_t{segments_.size()} + 1) * layout_.slots_per_segment();
  if (end_slot >= kNoSlot) {
    return Status::full(folder(0), "the index addresses " + std::to_string(kNoSlot) +
                                       " records per log; use more ranks or larger segments");
  }
  *out = static_cast<std::uint32_t>(segments_.size());
  segments_.emplace_back();
  return {};
}

std::uint32_t RowLog::next_path() const {
  const auto& weights = context_->path_weights;
  const std::uint64_t segment_bytes = std::uint64_t{target_units()} * layout_.unit_bytes;
  std::vector<std::uint64_t> bytes = context_->path_bytes;
  for (const auto& open : open_) {  // what the open segments will come to hold
    if (open != nullptr) bytes[segments_[open->ordinal].path] += segment_bytes - std::min(segment_bytes, segments_[open->ordinal].file_bytes);
  }
  std::size_t best = weights.size();
  double least_fill = 0;
  for (std::size_t path = 0; path < weights.size(); ++path) {
    if (weights[path] <= 0) continue;
    const double fill = static_cast<double>(bytes[path] + segment_bytes) / weights[path];
    if (best == weights.size() || fill < least_fill) {
      best = path;
      least_fill = fill;
    }
  }
  return static_cast<std::uint32_t>(best);
}

void RowLog::count_written(const Segment& segment, std::uint64_t bytes) {
  context_->bytes_written += bytes;
  context_->path_bytes_written[segment.path] += bytes;
}

Status RowLog::open_segment(Stream stream) {
  std::uint32_t ordinal = 0;
  KSTEP_RETURN_IF_ERROR(take_ordinal(&ordinal));
  Segment segment;
  segment.state = Segment::State::Open;
  segment.stream = stream;
  segment.id = context_->next_segment_id;
  segment.path = next_path();

  auto open = std::make_unique<OpenSegment>();
  open->ordinal = ordinal;
  open->max_records = target_units() * layout_.records_per_unit;
  File* file = nullptr;
  Status status = context_->files.open(segment.id, segment_path(segment), OpenMode::Create, context_->use_direct_io, &file);
  if (status.ok()) {
    context_->files.release(segment.id);
    status = take_buffer(open.get(), 0);
    if (!status.ok()) {
      context_->files.close(segment.id);
      Status removed = context_->env->remove_file(segment_path(segment));
      if (!removed.ok()) status.detail += "; and then " + removed.message();
    }
  }
  if (!status.ok()) {
    free_ordinals_.push_back(ordinal);
    return status;
  }
  ++context_->next_segment_id;
  segments_[ordinal] = segment;
  SegmentHeader header;
  header.store_id = context_->store_id;
  header.segment_id = segment.id;
  header.layout = layout_;
  header.stream = static_cast<std::uint32_t>(stream);
  encode_header(header, open->current->memory.data());
  add_file_bytes(&segments_[ordinal], kSegmentHeaderBytes);
  open_[static_cast<std::size_t>(stream)] = std::move(open);
  return {};
}

// After it: the stream's open segment has a current buffer with room for one more record.
Status RowLog::ensure_room(Stream stream) {
  std::unique_ptr<OpenSegment>& open = open_[static_cast<std::size_t>(stream)];
  if (open != nullptr && segments_[open->ordinal].num_records == open->max_records) KSTEP_RETURN_IF_ERROR(seal(stream));
  if (open == nullptr) KSTEP_RETURN_IF_ERROR(open_segment(stream));
  const Segment& segment = segments_[open->ordinal];
  if (segment.num_records % layout_.records_per_unit != 0) return {};
  const std::uint64_t offset = layout_.offset_of(segment.num_records);
  if (open->current != nullptr) {
    if (offset - open->current->file_offset + layout_.unit_bytes <= open->current->memory.size()) return {};
    KSTEP_RETURN_IF_ERROR(submit_buffer(open.get()));
  }
  return take_buffer(open.get(), offset);
}

std::byte* RowLog::place(Stream stream) {
  OpenSegment& open = *open_[static_cast<std::size_t>(stream)];
  return open.current->memory.data() + (layout_.offset_of(segments_[open.ordinal].num_records) - open.current->file_offset);
}

void RowLog::commit(Stream stream, TableState* table, const RecordTail& tail) {
  OpenSegment& open = *open_[static_cast<std::size_t>(stream)];
  Segment& segment = segments_[open.ordinal];
  const std::uint32_t record = segment.num_records;
  if (record % layout_.records_per_unit == 0) add_file_bytes(&segment, layout_.unit_bytes);
  ++segment.num_records;
  if (segment.num_records % layout_.records_per_unit == 0) {  // zero the rest of a finished unit
    const std::uint32_t used = layout_.records_per_unit * layout_.record_bytes;
    const std::uint64_t unit_start = layout_.offset_of(record - (layout_.records_per_unit - 1));
    std::memset(open.current->memory.data() + (unit_start - open.current->file_offset) + used, 0, layout_.unit_bytes - used);
  }
  open.footer.add(tail);
  const std::uint32_t earlier = table->index.exchange(tail.row_id, first_slot(open.ordinal) + record);
  ++segment.num_live;
  if (earlier == kNoSlot) {
    ++num_live_;
    return;
  }
  const std::uint32_t earlier_ordinal = ordinal_of(earlier);
  Segment& earlier_segment = segments_[earlier_ordinal];
  if (--earlier_segment.num_live == 0 && earlier_segment.state == Segment::State::Sealed) {
    empty_segments_.push_back(earlier_ordinal);
  }
}

Status RowLog::take_buffer(OpenSegment* open, std::uint64_t file_offset) {
  WriteBuffer* chosen = nullptr;
  while (chosen == nullptr) {
    bool has_in_flight = false;
    for (const auto& buffer : buffers_) {
      if (buffer->state == WriteBuffer::State::Idle) chosen = buffer.get();
      has_in_flight |= buffer->state == WriteBuffer::State::InFlight;
    }
    if (chosen != nullptr) break;
    if (buffers_.size() < kNumStreams + kBuffersInFlight) {
      const std::uint64_t unit = layout_.unit_bytes;
      const std::uint64_t units = std::clamp<std::uint64_t>(kWriteBufferBytes / unit, 1, layout_.max_units);
      buffers_.push_back(std::make_unique<WriteBuffer>(kSegmentHeaderBytes + units * unit));
      buffers_.back()->log = this;
    } else if (has_in_flight) {
      KSTEP_RETURN_IF_ERROR(reap_writes(1));
    } else {
      KSTEP_RETURN_IF_ERROR(retry_failed_writes());
    }
  }
  chosen->state = WriteBuffer::State::Filling;
  chosen->ordinal = open->ordinal;
  chosen->file_offset = file_offset;
  open->current = chosen;
  return {};
}

// Starts writing the full units of the current buffer. REQUIRES: the last record completes its unit.
Status RowLog::submit_buffer(OpenSegment* open) {
  while (context_->writes->num_in_flight() >= context_->writes->depth()) KSTEP_RETURN_IF_ERROR(reap_writes(1));
  WriteBuffer* buffer = open->current;
  const Segment& segment = segments_[open->ordinal];
  const std::uint64_t end =
      kSegmentHeaderBytes + std::uint64_t{layout_.units_for(segment.num_records)} * layout_.unit_bytes;
  File* file = nullptr;
  Status status = acquire(segment, &file);
  while (status.kind == StatusKind::Full && context_->writes->num_in_flight() > 0) {
    KSTEP_RETURN_IF_ERROR(reap_writes(1));
    status = acquire(segment, &file);
  }
  KSTEP_RETURN_IF_ERROR(status);
  buffer->num_bytes = static_cast<std::uint32_t>(end - buffer->file_offset);
  buffer->state = WriteBuffer::State::InFlight;
  open->current = nullptr;
  buffer->request = {};
  buffer->request.is_write = true;
  buffer->request.file = file;
  buffer->request.offset = buffer->file_offset;
  buffer->request.buffer = buffer->memory.data();
  buffer->request.num_bytes = buffer->num_bytes;
  buffer->request.tag = reinterpret_cast<std::uint64_t>(buffer);
  return context_->writes->submit(&buffer->request);
}

Status RowLog::reap_writes(std::size_t min_done) {
  std::array<IoRequest*, 16> done{};
  std::size_t num_done = 0;
  KSTEP_RETURN_IF_ERROR(context_->writes->reap(min_done, done.size(), done.data(), &num_done));
  for (std::size_t i = 0; i < num_done; ++i) {
    auto* buffer = reinterpret_cast<WriteBuffer*>(done[i]->tag);  // perhaps another log's
    const bool is_whole = done[i]->result == std::int64_t{buffer->num_bytes};
    buffer->state = is_whole ? WriteBuffer::State::Idle : WriteBuffer::State::Failed;
    if (is_whole) count_written(buffer->log->segments_[buffer->ordinal], buffer->num_bytes);
    buffer->log->release(buffer->log->segments_[buffer->ordinal]);
  }
  return {};
}

Status RowLog::retry_failed_writes() {
  for (const auto& buffer : buffers_) {
    if (buffer->state != WriteBuffer::State::Failed) continue;
    const Segment& segment = segments_[buffer->ordinal];
    File* file = nullptr;
    KSTEP_RETURN_IF_ERROR(acquire(segment, &file));
    Status status = file->write_at(buffer->file_offset, buffer->memory.data(), buffer->num_bytes);
    if (status.kind == StatusKind::NoSpace && context_->removed_files.drain()) {
      status = file->write_at(buffer->file_offset, buffer->memory.data(), buffer->num_bytes);
    }
    release(segment);
    if (status.kind == StatusKind::NoSpace) {
      std::uint64_t free_bytes = 0;
      if (context_->env->free_bytes(folder(segment.path), &free_bytes).ok()) {
        status.detail += "; " + std::to_string(buffer->num_bytes) + " bytes are needed, " + std::to_string(free_bytes) + " are free";
      }
      status.detail += "; delete snapshots or other files, then repeat";
    }
    KSTEP_RETURN_IF_ERROR(status);
    count_written(segment, buffer->num_bytes);
    buffer->state = WriteBuffer::State::Idle;
  }
  return {};
}

Status RowLog::seal(Stream stream) {
  std::unique_ptr<OpenSegment>& open = open_[static_cast<std::size_t>(stream)];
  Segment& segment = segments_[open->ordinal];
  const std::uint32_t num_units = layout_.units_for(segment.num_records);
  if (open->current != nullptr) {
    const std::uint64_t used_end = segment.num_records == 0 ? kSegmentHeaderBytes
                                                            : layout_.offset_of(segment.num_records - 1) + layout_.record_bytes;
    const std::uint64_t end = kSegmentHeaderBytes + std::uint64_t{num_units} * layout_.unit_bytes;
    std::memset(open->current->memory.data() + (used_end - open->current->file_offset), 0, end - used_end);
    KSTEP_RETURN_IF_ERROR(submit_buffer(open.get()));
  }
  // A partly filled last unit must not be appended to once it was submitted.
  open->max_records = segment.num_records;
  auto is_waiting = [&](WriteBuffer::State state) {
    return std::any_of(buffers_.begin(), buffers_.end(), [&](const auto& b) { return b->ordinal == open->ordinal && b->state == state; });
  };
  while (is_waiting(WriteBuffer::State::InFlight)) KSTEP_RETURN_IF_ERROR(reap_writes(1));
  KSTEP_RETURN_IF_ERROR(retry_failed_writes());

  SegmentTrailer trailer;
  const AlignedBuffer footer = open->footer.finish(segment.id, segment.num_records, num_units, &trailer);
  File* file = nullptr;
  KSTEP_RETURN_IF_ERROR(acquire(segment, &file));
  Status status = file->write_at(layout_.offset_of(0) + std::uint64_t{num_units} * layout_.unit_bytes, footer.data(), footer.size());
  release(segment);
  KSTEP_RETURN_IF_ERROR(status);
  const std::string open_path = segment_path(segment);
  segment.state = Segment::State::Sealed;
  status = context_->env->rename(open_path, segment_path(segment));
  if (!status.ok()) {
    segment.state = Segment::State::Open;
    return status;
  }
  context_->files.close(segment.id);  // the handle may write; readers open their own
  count_written(segment, footer.size());
  add_file_bytes(&segment, static_cast<std::int64_t>(footer.size()));
  segment.trailer_crc = trailer.trailer_crc;
  segment.sealed_epoch = context_->epoch;
  if (segment.num_live == 0) empty_segments_.push_back(open->ordinal);
  open.reset();
  return {};
}

Status RowLog::seal_all() {
  for (std::size_t s = 0; s < kNumStreams; ++s) {
    if (open_[s] != nullptr) KSTEP_RETURN_IF_ERROR(seal(static_cast<Stream>(s)));
  }
  return {};
}

Status RowLog::sync_all() {
  for (Segment& segment : segments_) {
    if (segment.state != Segment::State::Sealed || segment.is_synced) continue;
    File* file = nullptr;
    KSTEP_RETURN_IF_ERROR(acquire(segment, &file));
    Status status = file->sync();
    release(segment);
    if (!status.ok()) {
      status.detail += "; close the store and reopen it from its last snapshot";
      context_->poison = status;
      return status;
    }
    segment.is_synced = true;
  }
  return {};
}

Status RowLog::remove_segment(std::uint32_t ordinal) {
  Segment& segment = segments_[ordinal];
  const std::string path = segment_path(segment);
  // With an open handle removing it is quick, and the handle's close, which is not, can be left to another thread.
  std::unique_ptr<File> file = context_->files.take(segment.id);
  if (file == nullptr && !context_->env->open(path, OpenMode::Read, false, &file).ok()) file = nullptr;
  KSTEP_RETURN_IF_ERROR(context_->env->remove_file(path));
  if (file != nullptr) context_->removed_files.close(std::move(file));
  add_file_bytes(&segment, -static_cast<std::int64_t>(segment.file_bytes));
  segment = Segment();
  free_ordinals_.push_back(ordinal);
  return {};
}

void RowLog::add_file_bytes(Segment* segment, std::int64_t bytes) {
  const auto delta = static_cast<std::uint64_t>(bytes);  // wraps, and so subtracts
  segment->file_bytes += delta;
  context_->path_bytes[segment->path] += delta;
  if (segment->num_holders > 0) {
    context_->held_bytes += delta;
  } else {
    context_->unheld_bytes += delta;
    unheld_bytes_ += delta;
  }
}

void RowLog::add_holder(Segment* segment) {
  if (segment->num_holders++ > 0) return;
  context_->unheld_bytes -= segment->file_bytes;
  unheld_bytes_ -= segment->file_bytes;
  context_->held_bytes += segment->file_bytes;
}

void RowLog::remove_holder(Segment* segment) {
  if (--segment->num_holders > 0) return;
  context_->held_bytes -= segment->file_bytes;
  context_->unheld_bytes += segment->file_bytes;
  unheld_bytes_ += segment->file_bytes;
}

Segment* RowLog::find_segment(std::uint64_t id) {
  for (Segment& segment : segments_) {
    if (segment.state != Segment::State::Free && segment.id == id) return &segment;
  }
  return nullptr;
}

std::map<std::uint64_t, Segment*> RowLog::segments_by_id() {
  std::map<std::uint64_t, Segment*> map;
  for (Segment& segment : segments_) {
    if (segment.state != Segment::State::Free) map[segment.id] = &segment;
  }
  return map;
}

std::uint64_t RowLog::open_footer_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& open : open_) bytes += open == nullptr ? 0 : open->footer.entries_bytes() + kPageBytes;
  return bytes;
}

// The newest bytes of an open segment are in memory until their write succeeded.
const std::byte* RowLog::find_in_memory(std::uint32_t ordinal, std::uint64_t offset) const {
  if (segments_[ordinal].state != Segment::State::Open) return nullptr;
  for (const auto& buffer : buffers_) {
    if (buffer->state == WriteBuffer::State::Idle || buffer->ordinal != ordinal || offset < buffer->file_offset) continue;
    const bool is_filling = buffer->state == WriteBuffer::State::Filling;
    if (is_filling || offset < buffer->file_offset + buffer->num_bytes) {
      return buffer->memory.data() + (offset - buffer->file_offset);
    }
  }
  return nullptr;
}

}  // namespace kstep
