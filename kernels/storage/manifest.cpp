#include "storage/manifest.h"

#include <algorithm>

namespace kstep {
namespace {

const char* init_name(InitKind kind) {
  switch (kind) {
    case InitKind::Zero: return "zero";
    case InitKind::Uniform: return "uniform";
    case InitKind::Normal: return "normal";
  }
  return "zero";
}

bool init_from_name(const std::string& name, InitKind* out) {
  for (const InitKind kind : {InitKind::Zero, InitKind::Uniform, InitKind::Normal}) {
    if (name == init_name(kind)) {
      *out = kind;
      return true;
    }
  }
  return false;
}

// 64-bit values go out as strings: many JSON readers keep only 53 bits of a number.
Json wide(std::uint64_t value) { return Json::string(std::to_string(value)); }

Json encode_table(const TableSpec& table) {
  Json json = Json::object();
  json.set("table_id", Json::number(std::uint64_t{table.table_id}));
  json.set("name", Json::string(table.name));
  json.set("num_rows", wide(table.num_rows));
  json.set("dim", Json::number(std::uint64_t{table.dim}));
  json.set("first_column", Json::number(std::uint64_t{table.first_column}));
  json.set("seed", wide(table.seed));
  Json init = Json::object();
  init.set("kind", Json::string(init_name(table.init.kind)));
  init.set("a", Json::number(table.init.a));
  init.set("b", Json::number(table.init.b));
  json.set("init", std::move(init));
  Json fields = Json::array();
  for (const Field& field : table.schema.fields()) {
    Json item = Json::object();
    item.set("name", Json::string(field.name));
    item.set("dtype", Json::string(dtype_name(field.dtype)));
    item.set("width", Json::number(std::uint64_t{field.width}));
    fields.push(std::move(item));
  }
  json.set("fields", std::move(fields));
  return json;
}

Status decode_table(const Json& json, TableSpec* out) {
  KSTEP_RETURN_IF_ERROR(json.get_u32("table_id", &out->table_id));
  KSTEP_RETURN_IF_ERROR(json.get_string("name", &out->name));
  KSTEP_RETURN_IF_ERROR(json.get_u64("num_rows", &out->num_rows));
  KSTEP_RETURN_IF_ERROR(json.get_u32("dim", &out->dim));
  KSTEP_RETURN_IF_ERROR(json.get_u32("first_column", &out->first_column));
  KSTEP_RETURN_IF_ERROR(json.get_u64("seed", &out->seed));
  const Json* init = nullptr;
  std::string kind;
  KSTEP_RETURN_IF_ERROR(json.get("init", &init));
  KSTEP_RETURN_IF_ERROR(init->get_string("kind", &kind));
  if (!init_from_name(kind, &out->init.kind)) return Status::corruption("table '" + out->name + "'", "unknown init '" + kind + "'");
  KSTEP_RETURN_IF_ERROR(init->get_double("a", &out->init.a));
  KSTEP_RETURN_IF_ERROR(init->get_double("b", &out->init.b));
  std::vector<const Json*> items;
  KSTEP_RETURN_IF_ERROR(json.get_array("fields", &items));
  std::vector<Field> fields;
  for (const Json* item : items) {
    Field field;
    std::string dtype;
    KSTEP_RETURN_IF_ERROR(item->get_string("name", &field.name));
    KSTEP_RETURN_IF_ERROR(item->get_string("dtype", &dtype));
    KSTEP_RETURN_IF_ERROR(item->get_u32("width", &field.width));
    if (!dtype_from_name(dtype, &field.dtype)) {
      return Status::corruption("table '" + out->name + "' field '" + field.name + "'", "unknown dtype '" + dtype + "'");
    }
    fields.push_back(std::move(field));
  }
  return RecordSchema::make(std::move(fields), &out->schema);
}

Json encode_log(const ManifestLog& log) {
  Json json = Json::object();
  json.set("payload_bytes", Json::number(std::uint64_t{log.payload_bytes}));
  json.set("unit_bytes", Json::number(std::uint64_t{log.unit_bytes}));
  json.set("records_per_unit", Json::number(std::uint64_t{log.records_per_unit}));
  Json segments = Json::array();
  for (const ManifestSegment& segment : log.segments) {
    Json item = Json::object();
    item.set("id", wide(segment.id));
    item.set("path", Json::number(std::uint64_t{segment.path}));
    item.set("num_records", Json::number(std::uint64_t{segment.num_records}));
    item.set("file_bytes", wide(segment.file_bytes));
    item.set("trailer_crc", Json::number(std::uint64_t{segment.trailer_crc}));
    segments.push(std::move(item));
  }
  json.set("segments", std::move(segments));
  return json;
}

Status decode_log(const Json& json, ManifestLog* out) {
  KSTEP_RETURN_IF_ERROR(json.get_u32("payload_bytes", &out->payload_bytes));
  KSTEP_RETURN_IF_ERROR(json.get_u32("unit_bytes", &out->unit_bytes));
  KSTEP_RETURN_IF_ERROR(json.get_u32("records_per_unit", &out->records_per_unit));
  std::vector<const Json*> items;
  KSTEP_RETURN_IF_ERROR(json.get_array("segments", &items));
  for (const Json* item : items) {
    ManifestSegment segment;
    KSTEP_RETURN_IF_ERROR(item->get_u64("id", &segment.id));
    KSTEP_RETURN_IF_ERROR(item->get_u32("path", &segment.path));
    KSTEP_RETURN_IF_ERROR(item->get_u32("num_records", &segment.num_records));
    KSTEP_RETURN_IF_ERROR(item->get_u64("file_bytes", &segment.file_bytes));
    KSTEP_RETURN_IF_ERROR(item->get_u32("trailer_crc", &segment.trailer_crc));
    out->segments.push_back(segment);
  }
  return {};
}

Status get_store_id(const std::string& path, const Json& json, StoreId* out) {
  std::string text;
  KSTEP_RETURN_IF_ERROR(json.get_string("store_id", &text));
  if (!store_id_from_text(text, out)) return Status::corruption(path, "'" + text + "' is no store_id");
  return {};
}

Status check_version(const std::string& path, const Json& json) {
  std::uint32_t version = 0;
  KSTEP_RETURN_IF_ERROR(json.get_u32("format_version", &version));
  if (version == kFormatVersion) return {};
  return Status::invalid(path, "format version " + std::to_string(version) + ", this library reads " + std::to_string(kFormatVersion));
}

Status decode_body(const std::string& path, const Json& json, Manifest* out) {
  KSTEP_RETURN_IF_ERROR(check_version(path, json));
  KSTEP_RETURN_IF_ERROR(get_store_id(path, json, &out->store_id));
  KSTEP_RETURN_IF_ERROR(json.get_string("name", &out->name));
  KSTEP_RETURN_IF_ERROR(json.get_string("metadata", &out->metadata));
  KSTEP_RETURN_IF_ERROR(json.get_u64("next_segment_id", &out->next_segment_id));
  KSTEP_RETURN_IF_ERROR(json.get_u32("next_epoch", &out->next_epoch));
  KSTEP_RETURN_IF_ERROR(json.get_u32("num_paths", &out->num_paths));
  std::vector<const Json*> items;
  KSTEP_RETURN_IF_ERROR(json.get_array("tables", &items));
  for (const Json* item : items) {
    out->tables.emplace_back();
    KSTEP_RETURN_IF_ERROR(decode_table(*item, &out->tables.back()));
  }
  KSTEP_RETURN_IF_ERROR(json.get_array("logs", &items));
  for (const Json* item : items) {
    out->logs.emplace_back();
    KSTEP_RETURN_IF_ERROR(decode_log(*item, &out->logs.back()));
  }
  return {};
}

// Puts the file's path in front of what a key's getter said.
Status in_file(const std::string& path, Status status) {
  if (!status.ok() && status.context != path) status.context = path + ": " + status.context;
  return status;
}

}  // namespace

std::string Manifest::encode() const {
  Json json = Json::object();
  json.set("format_version", Json::number(std::uint64_t{kFormatVersion}));
  json.set("store_id", Json::string(store_id_text(store_id)));
  json.set("name", Json::string(name));
  json.set("metadata", Json::string(metadata));
  json.set("next_segment_id", wide(next_segment_id));
  json.set("next_epoch", Json::number(std::uint64_t{next_epoch}));
  json.set("num_paths", Json::number(std::uint64_t{num_paths}));
  Json table_items = Json::array();
  for (const TableSpec& table : tables) table_items.push(encode_table(table));
  json.set("tables", std::move(table_items));
  Json log_items = Json::array();
  for (const ManifestLog& log : logs) log_items.push(encode_log(log));
  json.set("logs", std::move(log_items));
  return json.dump_checked();
}

Status Manifest::decode(const std::string& path, const std::string& text, Manifest* out) {
  *out = Manifest();
  Json json;
  KSTEP_RETURN_IF_ERROR(Json::parse_checked(path, text, &json));
  return in_file(path, decode_body(path, json, out));
}

const TableSpec* Manifest::find_table(const std::string& table_name) const {
  const auto it = std::find_if(tables.begin(), tables.end(), [&](const TableSpec& table) { return table.name == table_name; });
  return it == tables.end() ? nullptr : &*it;
}

Status check_same_table(const TableSpec& wanted, const TableSpec& found) {
  const std::string context = "table '" + wanted.name + "'";
  auto differs = [&](const std::string& what, const std::string& expected, const std::string& got) {
    return Status::invalid(context, what + " is " + expected + " here, but " + got + " in the store; use the same configuration, or a new store");
  };
  const auto& wanted_fields = wanted.schema.fields();
  const auto& found_fields = found.schema.fields();
  for (std::size_t i = 0; i < std::max(wanted_fields.size(), found_fields.size()); ++i) {
    auto describe = [&](const std::vector<Field>& fields) {
      if (i >= fields.size()) return std::string("absent");
      return fields[i].name + ":" + dtype_name(fields[i].dtype) + "[" + std::to_string(fields[i].width) + "]";
    };
    if (i < wanted_fields.size() && i < found_fields.size() && wanted_fields[i] == found_fields[i]) continue;
    const std::string& name = i < wanted_fields.size() ? wanted_fields[i].name : found_fields[i].name;
    return differs("field '" + name + "'", describe(wanted_fields), describe(found_fields));
  }
  if (wanted.num_rows != found.num_rows) return differs("num_rows", std::to_string(wanted.num_rows), std::to_string(found.num_rows));
  if (wanted.table_id != found.table_id) return differs("table_id", std::to_string(wanted.table_id), std::to_string(found.table_id));
  if (wanted.first_column != found.first_column) {
    return differs("first_column", std::to_string(wanted.first_column), std::to_string(found.first_column));
  }
  if (wanted.seed != found.seed) return differs("seed", std::to_string(wanted.seed), std::to_string(found.seed));
  if (!(wanted.init == found.init)) return differs("the initial value", init_name(wanted.init.kind), init_name(found.init.kind));
  return {};
}

std::string StoreHeader::encode() const {
  Json json = Json::object();
  json.set("format_version", Json::number(std::uint64_t{kFormatVersion}));
  json.set("store_id", Json::string(store_id_text(store_id)));
  json.set("path_index", Json::number(std::uint64_t{path_index}));
  json.set("num_paths", Json::number(std::uint64_t{num_paths}));
  return json.dump_checked();
}

Status StoreHeader::decode(const std::string& path, const std::string& text, StoreHeader* out) {
  Json json;
  KSTEP_RETURN_IF_ERROR(Json::parse_checked(path, text, &json));
  KSTEP_RETURN_IF_ERROR(in_file(path, check_version(path, json)));
  KSTEP_RETURN_IF_ERROR(in_file(path, get_store_id(path, json, &out->store_id)));
  KSTEP_RETURN_IF_ERROR(in_file(path, json.get_u32("path_index", &out->path_index)));
  return in_file(path, json.get_u32("num_paths", &out->num_paths));
}

}  // namespace kstep
