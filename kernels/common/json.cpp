#include "common/json.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "common/crc32c.h"

namespace kstep {
namespace {

constexpr int kMaxDepth = 16;

void dump_string(const std::string& text, std::string* out) {
  out->push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
      out->append(escaped);
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

std::string hex8(std::uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

}  // namespace

class JsonParser {
 public:
  explicit JsonParser(const std::string& text) : text_(text) {}

  bool parse(Json* out) {
    if (!value(out, 0)) return false;
    skip_space();
    return at_ == text_.size();
  }
  std::size_t at() const { return at_; }

 private:
  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
  }
  bool take(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool take_word(const char* word) {
    const std::string expected(word);
    if (text_.compare(at_, expected.size(), expected) != 0) return false;
    at_ += expected.size();
    return true;
  }

  bool string(std::string* out) {
    if (!take('"')) return false;
    while (at_ < text_.size() && text_[at_] != '"') {
      char c = text_[at_++];
      if (c == '\\') {
        if (at_ >= text_.size()) return false;
        c = text_[at_++];
        if (c == 'n') c = '\n';
        else if (c == 't') c = '\t';
        else if (c == 'u') {
          if (at_ + 4 > text_.size()) return false;
          const unsigned long code = std::strtoul(text_.substr(at_, 4).c_str(), nullptr, 16);
          if (code > 0x7f) return false;  // this writer escapes control characters only
          at_ += 4;
          c = static_cast<char>(code);
        } else if (c != '"' && c != '\\' && c != '/') return false;
      }
      out->push_back(c);
    }
    return take('"');
  }

  bool list(Json* out, char close, bool has_keys, int depth) {
    if (take(close)) return true;
    do {
      std::string key;
      if (has_keys && (skip_space(), !string(&key) || !take(':'))) return false;
      Json item;
      if (!value(&item, depth + 1)) return false;
      out->items_.emplace_back(std::move(key), std::move(item));
    } while (take(','));
    return take(close);
  }

  bool value(Json* out, int depth) {
    if (depth > kMaxDepth) return false;
    skip_space();
    if (at_ >= text_.size()) return false;
    const char c = text_[at_];
    if (c == '{' || c == '[') {
      ++at_;
      out->kind_ = c == '{' ? Json::Kind::Object : Json::Kind::Array;
      return list(out, c == '{' ? '}' : ']', c == '{', depth);
    }
    if (c == '"') {
      out->kind_ = Json::Kind::String;
      return string(&out->text_);
    }
    if (c == 'n') return take_word("null");
    if (c == 't' || c == 'f') {
      out->kind_ = Json::Kind::Bool;
      out->bool_ = c == 't';
      return take_word(c == 't' ? "true" : "false");
    }
    out->kind_ = Json::Kind::Number;
    const std::size_t end = text_.find_first_not_of("+-.0123456789eEinfa", at_);
    out->text_ = text_.substr(at_, end == std::string::npos ? std::string::npos : end - at_);
    at_ += out->text_.size();
    return !out->text_.empty();
  }

  const std::string& text_;
  std::size_t at_ = 0;
};

Json Json::string(std::string text) {
  Json json;
  json.kind_ = Kind::String;
  json.text_ = std::move(text);
  return json;
}

Json Json::number(std::uint64_t value) {
  Json json;
  json.kind_ = Kind::Number;
  json.text_ = std::to_string(value);
  return json;
}

Json Json::number(double value) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", value);
  Json json;
  json.kind_ = Kind::Number;
  json.text_ = text;
  return json;
}

Json Json::array() {
  Json json;
  json.kind_ = Kind::Array;
  return json;
}

Json Json::object() {
  Json json;
  json.kind_ = Kind::Object;
  return json;
}

Status Json::get(const std::string& key, const Json** out) const {
  for (const auto& item : items_) {
    if (item.first == key) {
      *out = &item.second;
      return {};
    }
  }
  return Status::corruption("manifest key '" + key + "'", "absent");
}

Status Json::get_u64(const std::string& key, std::uint64_t* out) const {
  const Json* value = nullptr;
  KSTEP_RETURN_IF_ERROR(get(key, &value));
  const bool has_digits = !value->text_.empty() && value->text_.find_first_not_of("0123456789") == std::string::npos;
  errno = 0;
  *out = has_digits ? std::strtoull(value->text_.c_str(), nullptr, 10) : 0;
  if (!has_digits || errno != 0) {
    return Status::corruption("manifest key '" + key + "'", "expected an unsigned integer, got '" + value->text_ + "'");
  }
  return {};
}

Status Json::get_u32(const std::string& key, std::uint32_t* out) const {
  std::uint64_t value = 0;
  KSTEP_RETURN_IF_ERROR(get_u64(key, &value));
  if (value > UINT32_MAX) return Status::corruption("manifest key '" + key + "'", std::to_string(value) + " exceeds 32 bits");
  *out = static_cast<std::uint32_t>(value);
  return {};
}

Status Json::get_double(const std::string& key, double* out) const {
  const Json* value = nullptr;
  KSTEP_RETURN_IF_ERROR(get(key, &value));
  if (value->kind_ != Kind::Number) return Status::corruption("manifest key '" + key + "'", "expected a number");
  *out = std::strtod(value->text_.c_str(), nullptr);
  return {};
}

Status Json::get_string(const std::string& key, std::string* out) const {
  const Json* value = nullptr;
  KSTEP_RETURN_IF_ERROR(get(key, &value));
  if (value->kind_ != Kind::String) return Status::corruption("manifest key '" + key + "'", "expected a string");
  *out = value->text_;
  return {};
}

Status Json::get_array(const std::string& key, std::vector<const Json*>* out) const {
  const Json* value = nullptr;
  KSTEP_RETURN_IF_ERROR(get(key, &value));
  if (value->kind_ != Kind::Array) return Status::corruption("manifest key '" + key + "'", "expected a list");
  out->clear();
  for (const auto& item : value->items_) out->push_back(&item.second);
  return {};
}

void Json::dump_to(std::string* out) const {
  switch (kind_) {
    case Kind::Null: out->append("null"); return;
    case Kind::Bool: out->append(bool_ ? "true" : "false"); return;
    case Kind::Number: out->append(text_); return;
    case Kind::String: dump_string(text_, out); return;
    case Kind::Array:
    case Kind::Object: break;
  }
  const bool has_keys = kind_ == Kind::Object;
  out->push_back(has_keys ? '{' : '[');
  for (std::size_t i = 0; i < items_.size(); ++i) {
    if (i > 0) out->push_back(',');
    if (has_keys) {
      dump_string(items_[i].first, out);
      out->push_back(':');
    }
    items_[i].second.dump_to(out);
  }
  out->push_back(has_keys ? '}' : ']');
}

std::string Json::dump() const {
  std::string text;
  dump_to(&text);
  return text;
}

Status Json::parse(const std::string& text, Json* out) {
  *out = Json();
  JsonParser parser(text);
  if (!parser.parse(out)) return Status::corruption("JSON", "cannot be read at byte " + std::to_string(parser.at()));
  return {};
}

std::string Json::dump_checked() const {
  std::string text = dump() + "\n";
  return text + "crc32c:" + hex8(crc32c(text.data(), text.size())) + "\n";
}

Status Json::parse_checked(const std::string& path, const std::string& text, Json* out) {
  constexpr std::size_t kTailBytes = 7 + 8 + 1;  // "crc32c:", digits, newline
  if (text.size() < kTailBytes) return Status::corruption(path, "only " + std::to_string(text.size()) + " bytes long");
  const std::size_t body_bytes = text.size() - kTailBytes;
  const std::string expected = "crc32c:" + hex8(crc32c(text.data(), body_bytes)) + "\n";
  if (text.compare(body_bytes, kTailBytes, expected) != 0) {
    return Status::corruption(path, "checksum line does not match the text before it");
  }
  Status status = parse(text.substr(0, body_bytes), out);
  if (!status.ok()) return Status::corruption(path, status.detail);
  return {};
}

}  // namespace kstep
