#include "storage/cleaner.h"

#include <algorithm>
#include <cstring>

namespace kstep {
namespace {

constexpr std::uint64_t kMinPieceBytes = 128u << 10;  // small stores go in small steps, to stay near their bound
constexpr std::uint64_t kMaxPieceBytes = 1u << 20;
constexpr std::uint64_t kLiveShareOfPiece = 64;
constexpr std::uint32_t kSliceBytes = 96u << 10;  // some 0.15 ms beside reads: less than the drive takes for a queue of them
constexpr double kStartShare = 0.6;   // cleaning starts when this share of the spare space is used,
constexpr double kBoundShare = 0.96;  // and reaches pressure 1 here, leaving room for open segments
constexpr double kGain = 4.0;         // victim bytes read per appended byte at pressure 1
constexpr double kMaxGain = 8.0;
constexpr double kMaxLiveShare = 0.95;            // fuller segments are not worth copying
constexpr std::uint64_t kSmallStoreBytes = 1u << 20;  // open segments of a small store; exempt from the bound

}  // namespace

Cleaner::Cleaner(StoreContext* context, RowLog* log, double space_factor, std::unique_ptr<IoEngine> reads)
    : context_(context), log_(log), space_factor_(space_factor), reads_(std::move(reads)) {}

Cleaner::~Cleaner() {
  while (is_reading_) {  // nobody may write into freed memory
    if (!finish_reading(true).ok()) break;
  }
}

double Cleaner::pressure() const {
  const double live = static_cast<double>(log_->live_unit_bytes() + kSmallStoreBytes);
  const double spare = space_factor_ - 1.0;
  const double used = (static_cast<double>(log_->unheld_bytes()) - live) / (spare * live);
  return (used - kStartShare) / (kBoundShare - kStartShare);
}

std::uint64_t Cleaner::piece_bytes() const {
  return std::clamp(log_->live_unit_bytes() / kLiveShareOfPiece, kMinPieceBytes, kMaxPieceBytes);
}

Status Cleaner::after_append(std::uint64_t appended_bytes) {
  bool did_work = true;
  KSTEP_RETURN_IF_ERROR(remove_empty(&did_work));
  const double gain = std::clamp(kGain * pressure(), 0.0, kMaxGain);
  const auto appended = static_cast<double>(appended_bytes);
  const auto piece = static_cast<double>(piece_bytes());
  const double most = std::max(credit_bytes_, kMaxGain * appended + piece);  // a small batch does not cancel what larger ones earned
  credit_bytes_ = std::min(credit_bytes_ + gain * appended, most);
  auto gives_way = [&] { return context_->is_awaited != nullptr && context_->is_awaited->load(std::memory_order_relaxed) && pressure() < 1; };
  while (credit_bytes_ >= piece && pressure() > 0 && !gives_way()) {
    KSTEP_RETURN_IF_ERROR(step(&did_work));
    if (!did_work) credit_bytes_ = 0;
    credit_bytes_ -= piece;
  }
  return {};
}

Status Cleaner::step(bool* did_work) {
  Status status;
  std::swap(status, told_later_);
  KSTEP_RETURN_IF_ERROR(status);
  KSTEP_RETURN_IF_ERROR(remove_empty(did_work));
  if (*did_work || !find_victim()) return {};
  *did_work = true;
  bool is_loaded = false;
  KSTEP_RETURN_IF_ERROR(load_piece(true, &is_loaded));
  std::uint64_t num_bytes = 0;
  return copy_slice(UINT32_MAX, &num_bytes);
}

bool Cleaner::work_beside_reads() {
  if (!told_later_.ok() || pressure() <= 0 || credit_bytes_ < kSliceBytes || !find_victim()) return false;
  bool is_loaded = false;
  Status status = load_piece(false, &is_loaded);
  std::uint64_t num_bytes = 0;
  if (status.ok() && is_loaded) status = copy_slice(std::max<std::uint32_t>(1, kSliceBytes / log_->layout().record_bytes), &num_bytes);
  credit_bytes_ -= static_cast<double>(num_bytes);
  if (!status.ok() && status.kind != StatusKind::Full) told_later_ = status;  // Full: the reads hold all handles for now
  return num_bytes > 0;
}

Status Cleaner::remove_empty(bool* did_work) {
  *did_work = false;
  std::vector<std::uint32_t>& empty = log_->empty_segments();
  if (empty.empty()) return {};
  const std::uint32_t ordinal = empty.back();
  if (ordinal == ahead_.ordinal) KSTEP_RETURN_IF_ERROR(finish_reading(true));  // its file is about to be closed
  KSTEP_RETURN_IF_ERROR(log_->remove_segment(ordinal));
  empty.pop_back();
  *did_work = true;
  return {};
}

// Benefit over cost with age, after log-structured file systems: space gained x how long it will stay
// gained, over reading the whole segment and writing the live part. Old half-empty segments win over
// young emptier ones, whose rows are about to die anyway.
bool Cleaner::choose_victim() {
  double best_score = 0;
  const std::vector<Segment>& segments = log_->segments();
  for (std::uint32_t ordinal = 0; ordinal < segments.size(); ++ordinal) {
    const Segment& segment = segments[ordinal];
    if (segment.state != Segment::State::Sealed || segment.num_holders > 0 || segment.is_bad || segment.num_live == 0) continue;
    const double live = static_cast<double>(segment.num_live) / segment.num_records;
    if (live > kMaxLiveShare) continue;
    const double age = static_cast<double>(context_->epoch - segment.sealed_epoch) + 1.0;
    const double score = (1.0 - live) * age / (1.0 + live);
    if (score <= best_score) continue;
    best_score = score;
    victim_ = ordinal;
    victim_id_ = segment.id;
  }
  next_unit_ = 0;
  next_record_ = end_record_ = 0;
  return victim_ != kNoSlot;
}

// The one in work, or else the best.
bool Cleaner::find_victim() {
  if (victim_ != kNoSlot) {
    const Segment& segment = log_->segments()[victim_];
    const bool is_stale = segment.state != Segment::State::Sealed || segment.id != victim_id_ || segment.num_live == 0 ||
                          segment.num_holders > 0;
    if (!is_stale) return true;
    victim_ = kNoSlot;
  }
  return choose_victim();
}

// The piece of the victim at next_unit_, not read yet.
Cleaner::Piece Cleaner::next_piece(AlignedBuffer memory) const {
  const RecordLayout& layout = log_->layout();
  const Segment& segment = log_->segments()[victim_];
  const auto most = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, piece_bytes() / layout.unit_bytes));
  Piece piece;
  piece.memory = std::move(memory);
  piece.ordinal = victim_;
  piece.id = segment.id;
  piece.first_unit = next_unit_;
  piece.num_units = std::min(most, layout.units_for(segment.num_records) - next_unit_);
  piece.offset = layout.offset_of(next_unit_ * layout.records_per_unit);
  piece.num_bytes = piece.num_units * layout.unit_bytes;
  if (piece.memory.size() < piece.num_bytes) piece.memory = AlignedBuffer(piece.num_bytes);
  return piece;
}

// Starts to read the piece at next_unit_. It is only a head start: what fails here is tried again when the piece is needed.
Status Cleaner::begin_reading() {
  const Segment& segment = log_->segments()[victim_];
  ahead_ = next_piece(std::move(ahead_.memory));
  request_ = {};
  request_.offset = ahead_.offset;
  request_.num_bytes = ahead_.num_bytes;
  request_.buffer = ahead_.memory.data();
  if (!log_->acquire(segment, &request_.file).ok()) {
    ahead_.ordinal = kNoSlot;
    return {};
  }
  Status status = reads_->submit(&request_);
  if (!status.ok()) {
    log_->release(segment);
    ahead_.ordinal = kNoSlot;
    return status;
  }
  is_reading_ = true;
  return finish_reading(false);  // hands it to the kernel
}

Status Cleaner::finish_reading(bool waits) {
  if (!is_reading_) return {};
  std::size_t num_done = 0;
  IoRequest* done = nullptr;
  KSTEP_RETURN_IF_ERROR(reads_->reap(waits ? 1 : 0, 1, &done, &num_done));
  if (num_done > 0) end_reading();
  return {};
}

void Cleaner::end_reading() {
  is_reading_ = false;
  log_->release(log_->segments()[ahead_.ordinal]);
  if (request_.result != std::int64_t{ahead_.num_bytes}) ahead_.ordinal = kNoSlot;  // read again, which says why
}

// Makes piece_ one with records left, and starts to read the one after it. REQUIRES: a victim. Without waiting, *is_loaded may
// stay false.
Status Cleaner::load_piece(bool waits, bool* is_loaded) {
  *is_loaded = next_record_ < end_record_;
  if (*is_loaded) return {};
  KSTEP_RETURN_IF_ERROR(finish_reading(waits));
  if (is_reading_) return {};
  const RecordLayout& layout = log_->layout();
  const std::uint32_t num_records = log_->segments()[victim_].num_records;
  std::size_t got = ahead_.num_bytes;
  if (ahead_.ordinal == victim_ && ahead_.id == victim_id_ && ahead_.first_unit == next_unit_) {
    std::swap(piece_, ahead_);
  } else if (!waits) {
    return begin_reading();
  } else {
    const Segment& segment = log_->segments()[victim_];
    piece_ = next_piece(std::move(piece_.memory));
    File* file = nullptr;
    KSTEP_RETURN_IF_ERROR(log_->acquire(segment, &file));
    const Status status = file->read_at(piece_.offset, piece_.memory.data(), piece_.num_bytes, &got);
    log_->release(segment);
    KSTEP_RETURN_IF_ERROR(status);
  }
  ahead_.ordinal = kNoSlot;
  context_->bytes_cleaned_read += got;
  next_unit_ = piece_.first_unit + piece_.num_units;
  next_record_ = piece_.first_unit * layout.records_per_unit;
  end_record_ = std::min(num_records, next_unit_ * layout.records_per_unit);
  if (got != piece_.num_bytes) next_record_ = end_record_;  // the file ends early: its rows stay live, see finish_victim
  *is_loaded = true;
  return next_unit_ < layout.units_for(num_records) ? begin_reading() : Status();
}

// Copies what lives among the next records of piece_. *num_bytes: of the records looked at.
Status Cleaner::copy_slice(std::uint32_t max_records, std::uint64_t* num_bytes) {
  const RecordLayout& layout = log_->layout();
  const std::uint32_t first = next_record_;
  const std::uint32_t end = next_record_ + std::min(max_records, end_record_ - next_record_);
  // What a record says of itself, not verified yet; null if no table of this log has such a row.
  auto table_of = [&](std::uint32_t record, RecordTail* tail) {
    const std::byte* bytes = piece_.memory.data() + (layout.offset_of(record) - piece_.offset) + layout.payload_bytes;
    std::memcpy(&tail->row_id, bytes, 8);
    std::memcpy(&tail->table_id, bytes + 8, 4);
    TableState* table = context_->find_table(tail->table_id);
    return table != nullptr && table->log == log_ && tail->row_id < table->spec.num_rows ? table : nullptr;
  };
  for (; next_record_ < end; ++next_record_) {
    RecordTail tail;
    if (next_record_ + kIndexAhead < end_record_) {
      const TableState* ahead = table_of(next_record_ + kIndexAhead, &tail);
      if (ahead != nullptr) ahead->index.prefetch(tail.row_id);
    }
    TableState* table = table_of(next_record_, &tail);
    if (table == nullptr || table->index.find(tail.row_id) != log_->first_slot(victim_) + next_record_) continue;
    const std::byte* bytes = piece_.memory.data() + (layout.offset_of(next_record_) - piece_.offset);
    if (!read_record_tail(layout, bytes, &tail)) continue;  // damaged: num_live stays above zero, see finish_victim
    KSTEP_RETURN_IF_ERROR(log_->append_copy(table, tail, bytes));
  }
  *num_bytes = std::uint64_t{next_record_ - first} * layout.record_bytes;
  const Segment& segment = log_->segments()[victim_];
  const bool is_done = segment.num_live == 0 || (next_record_ == end_record_ && next_unit_ == layout.units_for(segment.num_records));
  return is_done ? finish_victim() : Status();
}

Status Cleaner::finish_victim() {
  const std::uint32_t ordinal = victim_;
  const Segment& segment = log_->segments()[ordinal];
  victim_ = kNoSlot;
  if (segment.num_live == 0) return {};
  const std::uint32_t num_left = segment.num_live;
  log_->mark_bad(ordinal);
  return Status::corruption(log_->segment_path(segment), std::to_string(num_left) +
                                                             " live rows could not be copied while cleaning; restore an earlier snapshot, or check the drive");
}

}  // namespace kstep
