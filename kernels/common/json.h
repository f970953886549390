// Json: the small part of JSON that manifests need, and the checksum line around it.
//
// Numbers are kept as text, so 64-bit integers and doubles (written with 17 digits) survive exactly.
// Ownership: plain values. Thread rule: none.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/status.h"

namespace kstep {

class Json {
 public:
  enum class Kind : std::uint8_t { Null, Bool, Number, String, Array, Object };

  Json() = default;
  static Json string(std::string text);
  static Json number(std::uint64_t value);
  static Json number(double value);
  static Json array();
  static Json object();

  Kind kind() const { return kind_; }
  // Building. REQUIRES: kind() is Array / Object.
  void push(Json value) { items_.emplace_back(std::string(), std::move(value)); }
  void set(std::string key, Json value) { items_.emplace_back(std::move(key), std::move(value)); }

  // Reading: every getter fails with Corruption, naming the key, when it is absent or of another kind.
  Status get(const std::string& key, const Json** out) const;
  Status get_u64(const std::string& key, std::uint64_t* out) const;
  Status get_u32(const std::string& key, std::uint32_t* out) const;
  Status get_double(const std::string& key, double* out) const;
  Status get_string(const std::string& key, std::string* out) const;
  Status get_array(const std::string& key, std::vector<const Json*>* out) const;

  std::string dump() const;
  static Status parse(const std::string& text, Json* out);

  // docs/format.md section 5: the object, a newline, and a line with its crc32c.
  std::string dump_checked() const;
  static Status parse_checked(const std::string& path, const std::string& text, Json* out);

 private:
  friend class JsonParser;
  void dump_to(std::string* out) const;

  Kind kind_ = Kind::Null;
  bool bool_ = false;
  std::string text_;  // of a Number or String
  std::vector<std::pair<std::string, Json>> items_;
};

}  // namespace kstep
