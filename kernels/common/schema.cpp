#include "common/schema.h"

#include <algorithm>

namespace kstep {
namespace {

constexpr std::uint64_t kFnvOffset = 1469598103934665603ull;
constexpr std::uint64_t kFnvPrime = 1099511628211ull;

std::uint64_t fnv1a(std::uint64_t hash, const void* data, std::size_t n) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < n; ++i) hash = (hash ^ bytes[i]) * kFnvPrime;
  return hash;
}

struct DTypeInfo {
  DType dtype;
  const char* name;
  std::uint32_t bytes;
};

constexpr DTypeInfo kDTypes[] = {{DType::F32, "f32", 4},  {DType::F16, "f16", 2},
                                 {DType::BF16, "bf16", 2}, {DType::I32, "i32", 4},
                                 {DType::I64, "i64", 8},  {DType::U8, "u8", 1}};

std::uint32_t round_up(std::uint32_t value, std::uint32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

std::uint32_t dtype_bytes(DType dtype) {
  return kDTypes[static_cast<std::size_t>(dtype)].bytes;
}

const char* dtype_name(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].name; }

bool dtype_from_name(const std::string& name, DType* out) {
  for (const DTypeInfo& info : kDTypes) {
    if (name == info.name) {
      *out = info.dtype;
      return true;
    }
  }
  return false;
}

Status RecordSchema::make(std::vector<Field> fields, RecordSchema* out) {
  constexpr std::uint64_t kMaxPayloadBytes = 1u << 20;
  const std::string context = "record schema";
  if (fields.empty()) return Status::invalid(context, "a row needs at least the field 'weight'");
  if (fields[0].name != "weight") {
    return Status::invalid(context, "the first field must be 'weight', got '" + fields[0].name + "'");
  }
  RecordSchema schema;
  std::uint64_t offset = 0;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const Field& field = fields[i];
    if (field.name.empty()) {
      return Status::invalid(context, "field " + std::to_string(i) + " has an empty name");
    }
    if (field.width == 0) {
      return Status::invalid(context, "field '" + field.name + "' has width 0");
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (fields[j].name == field.name) {
        return Status::invalid(context, "field '" + field.name + "' is declared twice");
      }
    }
    schema.offsets_.push_back(static_cast<std::uint32_t>(offset));
    offset += std::uint64_t{dtype_bytes(field.dtype)} * field.width;
    offset = (offset + 3) / 4 * 4;
    if (offset > kMaxPayloadBytes) {
      return Status::invalid(context, "payload exceeds " + std::to_string(kMaxPayloadBytes) +
                                          " bytes at field '" + field.name + "'");
    }
  }
  schema.payload_bytes_ = static_cast<std::uint32_t>(offset);
  schema.fields_ = std::move(fields);
  *out = std::move(schema);
  return {};
}

std::uint32_t RecordSchema::offset_of(const std::string& name) const {
  for (std::size_t i = 0; i < fields_.size(); ++i) {
    if (fields_[i].name == name) return offsets_[i];
  }
  return kNoField;
}

std::uint32_t RecordSchema::stride_bytes() const {
  return round_up(payload_bytes_, payload_bytes_ >= 64 ? 64 : 16);
}

std::uint64_t RecordSchema::fingerprint() const {
  std::uint64_t hash = kFnvOffset;
  for (const Field& field : fields_) {
    hash = fnv1a(hash, field.name.data(), field.name.size() + 1);  // with the closing zero
    const unsigned char tail[5] = {static_cast<unsigned char>(field.dtype),
                                   static_cast<unsigned char>(field.width),
                                   static_cast<unsigned char>(field.width >> 8),
                                   static_cast<unsigned char>(field.width >> 16),
                                   static_cast<unsigned char>(field.width >> 24)};
    hash = fnv1a(hash, tail, sizeof(tail));
  }
  return hash;
}

std::string RecordSchema::describe() const {
  std::string text;
  for (const Field& field : fields_) {
    if (!text.empty()) text += ' ';
    text += field.name + ':' + dtype_name(field.dtype) + '[' + std::to_string(field.width) + ']';
  }
  return text;
}

}  // namespace kstep
