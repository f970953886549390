// Segment header and footer: encoding and checked decoding (docs/format.md section 2).
//
// Thread rule: pure functions and plain values.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "common/status.h"
#include "storage/env.h"
#include "storage/record.h"

namespace kstep {

using StoreId = std::array<unsigned char, 16>;

std::string store_id_text(const StoreId& id);
bool store_id_from_text(const std::string& text, StoreId* out);

struct SegmentHeader {
  StoreId store_id{};
  std::uint64_t segment_id = 0;
  RecordLayout layout;  // max_units is not stored
  std::uint32_t stream = 0;
};

// Fills kSegmentHeaderBytes bytes.
void encode_header(const SegmentHeader& header, std::byte* out);
Status decode_header(const std::string& path, const std::byte* bytes, SegmentHeader* out);

struct SegmentTrailer {
  std::uint64_t segment_id = 0;
  std::uint32_t num_records = 0;
  std::uint32_t num_units = 0;
  std::uint32_t entries_bytes = 0;
  std::uint32_t base_epoch = 0;
  std::uint32_t max_epoch = 0;
  std::uint32_t entries_crc = 0;
  std::uint32_t trailer_crc = 0;  // of the encoded trailer; set by encoding and decoding
};

// Gathers the footer of a segment while it is written.
class FooterBuilder {
 public:
  void add(const RecordTail& tail);
  void clear();
  std::size_t entries_bytes() const { return entries_.size(); }
  std::uint32_t max_epoch() const { return max_epoch_; }
  // Whole footer, padded to pages; *trailer says what it holds.
  AlignedBuffer finish(std::uint64_t segment_id, std::uint32_t num_records, std::uint32_t num_units,
                       SegmentTrailer* trailer) const;

 private:
  std::string entries_;
  std::uint32_t base_epoch_ = 0;
  std::uint32_t max_epoch_ = 0;
};

// A sealed segment's footer, checked against its checksums; iterates over the entries.
class FooterReader {
 public:
  // Reads trailer and entries of the segment file `file`.
  Status open(File* file);
  const SegmentTrailer& trailer() const { return trailer_; }
  std::uint64_t file_bytes() const { return file_bytes_; }
  // False after the last entry or on a malformed one; finished() tells them apart.
  bool next(RecordTail* tail);
  bool finished() const { return num_read_ == trailer_.num_records && at_ == trailer_.entries_bytes; }

 private:
  SegmentTrailer trailer_;
  AlignedBuffer buffer_;
  const unsigned char* entries_ = nullptr;
  std::uint64_t file_bytes_ = 0;
  std::size_t at_ = 0;
  std::uint32_t num_read_ = 0;
};

}  // namespace kstep
