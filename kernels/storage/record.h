// RecordLayout: how rows of one payload size are packed into units and segments (docs/format.md).
//
// Thread rule: immutable after for_payload().
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/crc32c.h"
#include "common/status.h"

namespace kstep {

constexpr std::uint32_t kFormatVersion = 1;
constexpr std::uint32_t kPageBytes = 4096;
constexpr std::uint32_t kSegmentHeaderBytes = 4096;
constexpr std::uint32_t kRecordTailBytes = 20;  // row_id 8, table_id 4, epoch 4, crc32c 4
constexpr double kMaxUnitWaste = 0.15;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian and is written with memcpy");

struct RecordLayout {
  std::uint32_t payload_bytes = 0;
  std::uint32_t record_bytes = 0;
  std::uint32_t unit_bytes = 0;
  std::uint32_t records_per_unit = 0;
  std::uint32_t max_units = 0;  // of one segment

  // REQUIRES: payload_bytes a multiple of 4. A segment holds at least four units whatever was asked.
  static RecordLayout for_payload(std::uint32_t payload_bytes, std::uint64_t segment_bytes) {
    RecordLayout layout;
    layout.payload_bytes = payload_bytes;
    layout.record_bytes = payload_bytes + kRecordTailBytes;
    std::uint32_t unit = (layout.record_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    while (static_cast<double>(unit % layout.record_bytes) > kMaxUnitWaste * unit) unit += kPageBytes;
    layout.unit_bytes = unit;
    layout.records_per_unit = unit / layout.record_bytes;
    const std::uint64_t units = segment_bytes / unit;
    layout.max_units = static_cast<std::uint32_t>(units < 4 ? 4 : units);
    return layout;
  }

  std::uint32_t slots_per_segment() const { return records_per_unit * max_units; }
  std::uint64_t offset_of(std::uint32_t record) const {
    return kSegmentHeaderBytes + std::uint64_t{record / records_per_unit} * unit_bytes +
           std::uint64_t{record % records_per_unit} * record_bytes;
  }
  std::uint32_t units_for(std::uint64_t num_records) const {
    return static_cast<std::uint32_t>((num_records + records_per_unit - 1) / records_per_unit);
  }
};

struct RecordTail {
  std::uint64_t row_id = 0;
  std::uint32_t table_id = 0;
  std::uint32_t epoch = 0;
};

inline void write_record(const RecordLayout& layout, const std::byte* payload, const RecordTail& tail, std::byte* out) {
  std::memcpy(out, payload, layout.payload_bytes);
  std::byte* at = out + layout.payload_bytes;
  std::memcpy(at, &tail.row_id, 8);
  std::memcpy(at + 8, &tail.table_id, 4);
  std::memcpy(at + 12, &tail.epoch, 4);
  const std::uint32_t crc = crc32c(out, layout.record_bytes - 4);
  std::memcpy(at + 16, &crc, 4);
}

// False when the checksum does not match.
inline bool read_record_tail(const RecordLayout& layout, const std::byte* record, RecordTail* tail) {
  const std::byte* at = record + layout.payload_bytes;
  std::memcpy(&tail->row_id, at, 8);
  std::memcpy(&tail->table_id, at + 8, 4);
  std::memcpy(&tail->epoch, at + 12, 4);
  std::uint32_t crc = 0;
  std::memcpy(&crc, at + 16, 4);
  return crc == crc32c(record, layout.record_bytes - 4);
}

}  // namespace kstep
