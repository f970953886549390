#include "storage/segment_format.h"

#include <algorithm>
#include <cstdio>

namespace kstep {
namespace {

constexpr char kHeaderMagic[] = "KSTEPSEG";
constexpr char kTrailerMagic[] = "KSTEPEND";
constexpr std::uint32_t kTrailerBytes = 64;
constexpr std::uint32_t kCheckedBytes = 60;  // of header and trailer; their crc32c follows

template <typename T>
void put(std::byte* out, std::size_t offset, T value) {
  std::memcpy(out + offset, &value, sizeof(T));
}

template <typename T>
T get(const std::byte* in, std::size_t offset) {
  T value;
  std::memcpy(&value, in + offset, sizeof(T));
  return value;
}

void put_varint(std::string* out, std::uint64_t value) {
  while (value >= 0x80) {
    out->push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

bool get_varint(const unsigned char* bytes, std::size_t end, std::size_t* at, std::uint64_t* out) {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    if (*at >= end) return false;
    const unsigned char byte = bytes[(*at)++];
    value |= std::uint64_t{byte & 0x7fu} << shift;
    if ((byte & 0x80) == 0) {
      *out = value;
      return true;
    }
  }
  return false;
}

std::string number(std::uint64_t value) { return std::to_string(value); }

}  // namespace

std::string store_id_text(const StoreId& id) {
  std::string text;
  for (const unsigned char byte : id) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", byte);
    text += digits;
  }
  return text;
}

bool store_id_from_text(const std::string& text, StoreId* out) {
  if (text.size() != 2 * out->size() || text.find_first_not_of("0123456789abcdef") != std::string::npos) return false;
  for (std::size_t i = 0; i < out->size(); ++i) {
    (*out)[i] = static_cast<unsigned char>(std::stoul(text.substr(2 * i, 2), nullptr, 16));
  }
  return true;
}

void encode_header(const SegmentHeader& header, std::byte* out) {
  std::memset(out, 0, kSegmentHeaderBytes);
  std::memcpy(out, kHeaderMagic, 8);
  put(out, 8, kFormatVersion);
  put(out, 12, kSegmentHeaderBytes);
  std::memcpy(out + 16, header.store_id.data(), header.store_id.size());
  put(out, 32, header.segment_id);
  put(out, 40, header.layout.payload_bytes);
  put(out, 44, header.layout.record_bytes);
  put(out, 48, header.layout.unit_bytes);
  put(out, 52, header.layout.records_per_unit);
  put(out, 56, header.stream);
  put(out, 60, crc32c(out, kCheckedBytes));
}

Status decode_header(const std::string& path, const std::byte* bytes, SegmentHeader* out) {
  if (std::memcmp(bytes, kHeaderMagic, 8) != 0) return Status::corruption(path, "no segment header at offset 0");
  if (get<std::uint32_t>(bytes, 60) != crc32c(bytes, kCheckedBytes)) {
    return Status::corruption(path, "segment header checksum does not match");
  }
  const auto version = get<std::uint32_t>(bytes, 8);
  if (version != kFormatVersion) {
    return Status::invalid(path, "format version " + number(version) + ", this library reads " + number(kFormatVersion));
  }
  std::memcpy(out->store_id.data(), bytes + 16, out->store_id.size());
  out->segment_id = get<std::uint64_t>(bytes, 32);
  out->layout.payload_bytes = get<std::uint32_t>(bytes, 40);
  out->layout.record_bytes = get<std::uint32_t>(bytes, 44);
  out->layout.unit_bytes = get<std::uint32_t>(bytes, 48);
  out->layout.records_per_unit = get<std::uint32_t>(bytes, 52);
  out->stream = get<std::uint32_t>(bytes, 56);
  return {};
}

void FooterBuilder::add(const RecordTail& tail) {
  if (entries_.empty()) base_epoch_ = max_epoch_ = tail.epoch;
  max_epoch_ = std::max(max_epoch_, tail.epoch);
  const std::int64_t delta = std::int64_t{tail.epoch} - std::int64_t{base_epoch_};
  put_varint(&entries_, tail.table_id);
  put_varint(&entries_, tail.row_id);
  put_varint(&entries_, delta >= 0 ? 2 * static_cast<std::uint64_t>(delta) : 2 * static_cast<std::uint64_t>(-delta) - 1);
}

void FooterBuilder::clear() {
  entries_.clear();
  base_epoch_ = max_epoch_ = 0;
}

AlignedBuffer FooterBuilder::finish(std::uint64_t segment_id, std::uint32_t num_records, std::uint32_t num_units,
                                    SegmentTrailer* trailer) const {
  const std::size_t num_bytes = (entries_.size() + kTrailerBytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  AlignedBuffer buffer(num_bytes);
  std::memset(buffer.data(), 0, num_bytes);
  std::memcpy(buffer.data(), entries_.data(), entries_.size());
  std::byte* out = buffer.data() + num_bytes - kTrailerBytes;
  trailer->segment_id = segment_id;
  trailer->num_records = num_records;
  trailer->num_units = num_units;
  trailer->entries_bytes = static_cast<std::uint32_t>(entries_.size());
  trailer->base_epoch = base_epoch_;
  trailer->max_epoch = max_epoch_;
  trailer->entries_crc = crc32c(entries_.data(), entries_.size());
  std::memcpy(out, kTrailerMagic, 8);
  put(out, 8, trailer->segment_id);
  put(out, 16, trailer->num_records);
  put(out, 20, trailer->num_units);
  put(out, 24, trailer->entries_bytes);
  put(out, 28, trailer->base_epoch);
  put(out, 32, trailer->max_epoch);
  put(out, 36, trailer->entries_crc);
  trailer->trailer_crc = crc32c(out, kCheckedBytes);
  put(out, 60, trailer->trailer_crc);
  return buffer;
}

Status FooterReader::open(File* file) {
  const std::string& path = file->path();
  at_ = 0;
  num_read_ = 0;
  KSTEP_RETURN_IF_ERROR(file->size_bytes(&file_bytes_));
  if (file_bytes_ < kSegmentHeaderBytes + kPageBytes || file_bytes_ % kPageBytes != 0) {
    return Status::corruption(path, "a segment cannot be " + number(file_bytes_) + " bytes long");
  }
  AlignedBuffer last(kPageBytes);
  std::size_t got = 0;
  KSTEP_RETURN_IF_ERROR(file->read_at(file_bytes_ - kPageBytes, last.data(), kPageBytes, &got));
  const std::byte* in = last.data() + kPageBytes - kTrailerBytes;
  if (got != kPageBytes || std::memcmp(in, kTrailerMagic, 8) != 0 ||
      get<std::uint32_t>(in, 60) != crc32c(in, kCheckedBytes)) {
    return Status::corruption(path, "no valid trailer in the last " + number(kTrailerBytes) + " bytes");
  }
  trailer_.segment_id = get<std::uint64_t>(in, 8);
  trailer_.num_records = get<std::uint32_t>(in, 16);
  trailer_.num_units = get<std::uint32_t>(in, 20);
  trailer_.entries_bytes = get<std::uint32_t>(in, 24);
  trailer_.base_epoch = get<std::uint32_t>(in, 28);
  trailer_.max_epoch = get<std::uint32_t>(in, 32);
  trailer_.entries_crc = get<std::uint32_t>(in, 36);
  trailer_.trailer_crc = get<std::uint32_t>(in, 60);

  const std::uint64_t footer_bytes =
      (std::uint64_t{trailer_.entries_bytes} + kTrailerBytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (footer_bytes > file_bytes_ - kSegmentHeaderBytes) {
    return Status::corruption(path, "footer of " + number(footer_bytes) + " bytes in a file of " + number(file_bytes_));
  }
  buffer_ = AlignedBuffer(footer_bytes);
  KSTEP_RETURN_IF_ERROR(file->read_at(file_bytes_ - footer_bytes, buffer_.data(), footer_bytes, &got));
  entries_ = reinterpret_cast<const unsigned char*>(buffer_.data());
  if (got != footer_bytes || crc32c(entries_, trailer_.entries_bytes) != trailer_.entries_crc) {
    return Status::corruption(path, "footer entries do not match their checksum");
  }
  return {};
}

bool FooterReader::next(RecordTail* tail) {
  if (num_read_ == trailer_.num_records) return false;
  std::uint64_t table = 0;
  std::uint64_t row = 0;
  std::uint64_t zigzag = 0;
  if (!get_varint(entries_, trailer_.entries_bytes, &at_, &table) ||
      !get_varint(entries_, trailer_.entries_bytes, &at_, &row) ||
      !get_varint(entries_, trailer_.entries_bytes, &at_, &zigzag)) {
    return false;
  }
  const auto magnitude = static_cast<std::int64_t>(zigzag >> 1);
  const std::int64_t delta = (zigzag & 1) != 0 ? -magnitude - 1 : magnitude;
  tail->table_id = static_cast<std::uint32_t>(table);
  tail->row_id = row;
  tail->epoch = static_cast<std::uint32_t>(std::int64_t{trailer_.base_epoch} + delta);
  ++num_read_;
  return true;
}

}  // namespace kstep
