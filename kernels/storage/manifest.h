// Manifest: what one snapshot consists of (docs/format.md section 5), and the store header.
//
// Thread rule: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/json.h"
#include "common/schema.h"
#include "storage/segment_format.h"

namespace kstep {

struct ManifestSegment {
  std::uint64_t id = 0;
  std::uint32_t path = 0;
  std::uint32_t num_records = 0;
  std::uint64_t file_bytes = 0;
  std::uint32_t trailer_crc = 0;
};

struct ManifestLog {
  std::uint32_t payload_bytes = 0;
  std::uint32_t unit_bytes = 0;
  std::uint32_t records_per_unit = 0;
  std::vector<ManifestSegment> segments;
};

struct Manifest {
  StoreId store_id{};
  std::string name;
  std::string metadata;
  std::uint64_t next_segment_id = 1;
  std::uint32_t next_epoch = 1;
  std::uint32_t num_paths = 1;
  std::vector<TableSpec> tables;
  std::vector<ManifestLog> logs;

  std::string encode() const;
  static Status decode(const std::string& path, const std::string& text, Manifest* out);
  const TableSpec* find_table(const std::string& table_name) const;
};

// Checks that `wanted` may read rows written as `found`; the failure names table and field.
Status check_same_table(const TableSpec& wanted, const TableSpec& found);

struct StoreHeader {
  StoreId store_id{};
  std::uint32_t path_index = 0;
  std::uint32_t num_paths = 1;

  std::string encode() const;
  static Status decode(const std::string& path, const std::string& text, StoreHeader* out);
};

}  // namespace kstep
