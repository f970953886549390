// RecordSchema and TableSpec: what one row of a table consists of.
//
// Purpose: the optimizer's spec declares the named fields of a row ("weight" first, then states);
// every part of the core that looks inside a row asks the schema for offsets. The payload of a row
// is its fields back to back, each starting at a multiple of 4 bytes.
// Ownership: plain values. Thread rule: immutable after make().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"

namespace kstep {

enum class DType : std::uint8_t { F32 = 0, F16 = 1, BF16 = 2, I32 = 3, I64 = 4, U8 = 5 };

std::uint32_t dtype_bytes(DType dtype);
const char* dtype_name(DType dtype);
bool dtype_from_name(const std::string& name, DType* out);

struct Field {
  std::string name;
  DType dtype = DType::F32;
  std::uint32_t width = 0;  // number of elements

  bool operator==(const Field& other) const {
    return name == other.name && dtype == other.dtype && width == other.width;
  }
};

class RecordSchema {
 public:
  static constexpr std::uint32_t kNoField = UINT32_MAX;

  RecordSchema() = default;

  // Checks the fields (at least one, "weight" first, unique non-empty names, width > 0) and lays
  // them out. Fails with InvalidArgument, naming the field.
  static Status make(std::vector<Field> fields, RecordSchema* out);

  const std::vector<Field>& fields() const { return fields_; }
  // Byte offset of a field in the payload, kNoField when there is no such field.
  std::uint32_t offset_of(const std::string& name) const;
  std::uint32_t payload_bytes() const { return payload_bytes_; }
  // Bytes between two rows in DRAM: the payload rounded up to 64 (or to 16 for payloads below 64).
  std::uint32_t stride_bytes() const;
  // Stable over machines and versions: a hash of names, dtypes and widths in order.
  std::uint64_t fingerprint() const;
  // For people: "weight:f32[64] m:f32[64] v:f32[64]".
  std::string describe() const;

  bool operator==(const RecordSchema& other) const { return fields_ == other.fields_; }
  bool operator!=(const RecordSchema& other) const { return !(*this == other); }

 private:
  std::vector<Field> fields_;
  std::vector<std::uint32_t> offsets_;
  std::uint32_t payload_bytes_ = 0;
};

enum class InitKind : std::uint8_t { Zero = 0, Uniform = 1, Normal = 2 };

// Initial values of a never-touched row's "weight"; every other field starts as zero bytes.
struct InitSpec {
  InitKind kind = InitKind::Zero;
  double a = 0.0;  // uniform: lower bound; normal: mean
  double b = 0.0;  // uniform: upper bound; normal: standard deviation

  bool operator==(const InitSpec& o) const { return kind == o.kind && a == o.a && b == o.b; }
};

struct TableSpec {
  std::uint32_t table_id = 0;  // < 2^20 in a store; unique there together with first_column
  std::string name;
  std::uint64_t num_rows = 0;  // row_id < num_rows <= 2^48
  std::uint32_t dim = 0;       // width of "weight"
  RecordSchema schema;
  InitSpec init;
  std::uint64_t seed = 0;
  // Column of the whole table that is column 0 here: initial values are those of the whole table
  // however it is cut into column shards.
  std::uint32_t first_column = 0;  // < 2^12 in a store

  // The number that stands for this table in records. Column shards of one table have the same table_id, because their
  // initial values are those of one table, and different record ids.
  static constexpr std::uint32_t kTableIdBits = 20;
  std::uint32_t record_table_id() const { return table_id | first_column << kTableIdBits; }
};

}  // namespace kstep
