#include "storage/cleaner.h"

#include <algorithm>
#include <cstring>

namespace kstep {
namespace {

constexpr std::uint64_t kMinPieceBytes = 128u << 10;  // small stores go in small steps, to stay near their bound
constexpr std::uint64_t kMaxPieceBytes = 1u << 20;
constexpr std::uint64_t kLiveShareOfPiece = 64;
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
    if (!finish_reading().ok()) break;
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
  KSTEP_RETURN_IF_ERROR(remove_empty(did_work));
  if (*did_work) return {};
  if (victim_ != kNoSlot) {
    const Segment& segment = log_->segments()[victim_];
    const bool is_stale = segment.state != Segment::State::Sealed || segment.id != victim_id_ || segment.num_live == 0 ||
                          segment.num_holders > 0;
    if (is_stale) victim_ = kNoSlot;
  }
  if (victim_ == kNoSlot && !choose_victim()) return {};
  *did_work = true;
  return clean_piece();
}

Status Cleaner::remove_empty(bool* did_work) {
  *did_work = false;
  std::vector<std::uint32_t>& empty = log_->empty_segments();
  if (empty.empty()) return {};
  const std::uint32_t ordinal = empty.back();
  if (ordinal == ahead_ordinal_) KSTEP_RETURN_IF_ERROR(finish_reading());  // its file is about to be closed
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
  return victim_ != kNoSlot;
}

// Of the piece at next_unit_.
std::uint32_t Cleaner::units_of_piece(const Segment& segment) const {
  const RecordLayout& layout = log_->layout();
  const auto most = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, piece_bytes() / layout.unit_bytes));
  return std::min(most, layout.units_for(segment.num_records) - next_unit_);
}

// Starts to read the piece at next_unit_. It is only a head start: what fails here is tried again when the piece is needed.
Status Cleaner::begin_reading() {
  const RecordLayout& layout = log_->layout();
  const Segment& segment = log_->segments()[victim_];
  ahead_ = {};
  if (!log_->acquire(segment, &ahead_.file).ok()) return {};
  ahead_.offset = layout.offset_of(next_unit_ * layout.records_per_unit);
  ahead_.num_bytes = units_of_piece(segment) * layout.unit_bytes;
  if (piece_.size() < ahead_.num_bytes) piece_ = AlignedBuffer(ahead_.num_bytes);
  ahead_.buffer = piece_.data();
  ahead_ordinal_ = victim_;
  ahead_id_ = segment.id;
  Status status = reads_->submit(&ahead_);
  if (!status.ok()) {
    log_->release(segment);
    return status;
  }
  is_reading_ = true;
  std::size_t num_done = 0;
  IoRequest* done = nullptr;
  KSTEP_RETURN_IF_ERROR(reads_->reap(0, 1, &done, &num_done));  // hands it to the kernel
  if (num_done > 0) end_reading();
  return {};
}

Status Cleaner::finish_reading() {
  if (!is_reading_) return {};
  std::size_t num_done = 0;
  IoRequest* done = nullptr;
  KSTEP_RETURN_IF_ERROR(reads_->reap(1, 1, &done, &num_done));
  end_reading();
  return {};
}

void Cleaner::end_reading() {
  is_reading_ = false;
  log_->release(log_->segments()[ahead_ordinal_]);
  if (ahead_.result != std::int64_t{ahead_.num_bytes}) ahead_ordinal_ = kNoSlot;  // read again, which says why
}

Status Cleaner::read_piece(std::uint64_t offset, std::size_t num_bytes, std::size_t* got) {
  KSTEP_RETURN_IF_ERROR(finish_reading());
  const Segment& segment = log_->segments()[victim_];
  const bool is_ready = ahead_ordinal_ == victim_ && ahead_id_ == segment.id && ahead_.offset == offset && ahead_.num_bytes >= num_bytes;
  ahead_ordinal_ = kNoSlot;  // used up
  *got = num_bytes;
  if (is_ready) return {};
  if (piece_.size() < num_bytes) piece_ = AlignedBuffer(num_bytes);
  File* file = nullptr;
  KSTEP_RETURN_IF_ERROR(log_->acquire(segment, &file));
  const Status status = file->read_at(offset, piece_.data(), num_bytes, got);
  log_->release(segment);
  return status;
}

Status Cleaner::clean_piece() {
  const RecordLayout& layout = log_->layout();
  const Segment& segment = log_->segments()[victim_];
  const std::uint32_t num_units = layout.units_for(segment.num_records);
  const std::uint32_t count = units_of_piece(segment);
  const std::size_t num_bytes = std::size_t{count} * layout.unit_bytes;

  const std::string path = log_->segment_path(segment);
  const std::uint64_t offset = layout.offset_of(next_unit_ * layout.records_per_unit);
  std::size_t got = 0;
  KSTEP_RETURN_IF_ERROR(read_piece(offset, num_bytes, &got));
  context_->bytes_cleaned_read += got;

  const std::uint32_t first_record = next_unit_ * layout.records_per_unit;
  const std::uint32_t end_record = std::min(segment.num_records, (next_unit_ + count) * layout.records_per_unit);
  // What a record says of itself, not verified yet; null if no table of this log has such a row.
  auto table_of = [&](std::uint32_t record, RecordTail* tail) {
    const std::byte* bytes = piece_.data() + (layout.offset_of(record) - offset) + layout.payload_bytes;
    std::memcpy(&tail->row_id, bytes, 8);
    std::memcpy(&tail->table_id, bytes + 8, 4);
    TableState* table = context_->find_table(tail->table_id);
    return table != nullptr && table->log == log_ && tail->row_id < table->spec.num_rows ? table : nullptr;
  };
  for (std::uint32_t record = first_record; got == num_bytes && record < end_record; ++record) {
    RecordTail tail;
    if (record + kIndexAhead < end_record) {
      const TableState* ahead = table_of(record + kIndexAhead, &tail);
      if (ahead != nullptr) ahead->index.prefetch(tail.row_id);
    }
    TableState* table = table_of(record, &tail);
    if (table == nullptr || table->index.find(tail.row_id) != log_->first_slot(victim_) + record) continue;
    const std::byte* bytes = piece_.data() + (layout.offset_of(record) - offset);
    if (!read_record_tail(layout, bytes, &tail)) break;  // damaged: num_live stays above zero, see below
    KSTEP_RETURN_IF_ERROR(log_->append_copy(table, tail, bytes));
  }
  next_unit_ += count;
  // append_copy may have moved the segment table, so look again.
  const Segment& after = log_->segments()[victim_];
  if (next_unit_ < num_units && got == num_bytes && after.num_live > 0) return begin_reading();
  const std::uint32_t num_left = after.num_live;
  const std::uint32_t ordinal = victim_;
  victim_ = kNoSlot;
  if (num_left == 0) return {};
  log_->mark_bad(ordinal);
  return Status::corruption(path, std::to_string(num_left) + " live rows could not be copied while cleaning; restore an earlier snapshot, or check the drive");
}

}  // namespace kstep
