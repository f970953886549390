// Status: the one way in which the C++ core reports failure.
//
// Purpose: a value that says what kind of failure happened, where (context) and why (detail). The
// core throws no exceptions; the op door turns a Status into a Python exception.
// Ownership: a plain value. Thread rule: none (immutable once returned).
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace kstep {

enum class StatusKind : std::uint8_t {
  Ok,
  InvalidArgument,  // the caller passed something that can never work
  Corruption,       // bytes on the medium are not what was written
  Io,               // the operating system reported a failure
  NoSpace,          // the drive or the byte quota is full
  Full,             // an in-memory bound (queue, index) is reached
  Busy,             // somebody else holds the resource
  NotFound,         // no such file, snapshot, table or ticket
};

inline const char* status_kind_name(StatusKind kind) {
  switch (kind) {
    case StatusKind::Ok: return "ok";
    case StatusKind::InvalidArgument: return "invalid argument";
    case StatusKind::Corruption: return "corruption";
    case StatusKind::Io: return "i/o error";
    case StatusKind::NoSpace: return "no space";
    case StatusKind::Full: return "full";
    case StatusKind::Busy: return "busy";
    case StatusKind::NotFound: return "not found";
  }
  return "unknown";
}

struct [[nodiscard]] Status {
  StatusKind kind = StatusKind::Ok;
  std::string context;  // what was being done, and to which table, file or offset
  std::string detail;   // what went wrong, with expected and found values, and what to do next

  Status() = default;
  Status(StatusKind k, std::string c, std::string d)
      : kind(k), context(std::move(c)), detail(std::move(d)) {}

  bool ok() const { return kind == StatusKind::Ok; }

  std::string message() const {
    if (ok()) return "ok";
    return context + ": " + detail + " (" + status_kind_name(kind) + ")";
  }

  static Status invalid(std::string c, std::string d) {
    return {StatusKind::InvalidArgument, std::move(c), std::move(d)};
  }
  static Status corruption(std::string c, std::string d) {
    return {StatusKind::Corruption, std::move(c), std::move(d)};
  }
  static Status io(std::string c, std::string d) {
    return {StatusKind::Io, std::move(c), std::move(d)};
  }
  static Status no_space(std::string c, std::string d) {
    return {StatusKind::NoSpace, std::move(c), std::move(d)};
  }
  static Status full(std::string c, std::string d) {
    return {StatusKind::Full, std::move(c), std::move(d)};
  }
  static Status busy(std::string c, std::string d) {
    return {StatusKind::Busy, std::move(c), std::move(d)};
  }
  static Status not_found(std::string c, std::string d) {
    return {StatusKind::NotFound, std::move(c), std::move(d)};
  }
};

}  // namespace kstep

// Leaves the current function with the failure of `expr`, if it has one.
#define KSTEP_RETURN_IF_ERROR(expr)               \
  do {                                            \
    ::kstep::Status kstep_status_ = (expr);       \
    if (!kstep_status_.ok()) return kstep_status_; \
  } while (0)
