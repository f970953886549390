#include "compute/merge_message.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "compute/thread_pool.h"

namespace kstep {
namespace {

constexpr std::size_t kAlignment = 8;
constexpr std::size_t kRowsPerTask = 256;

std::size_t padded(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The lowest bytes of a number, in the order of the machine, which both ends share.
void put(std::uint8_t* target, std::uint32_t num_bytes, std::uint64_t value) {
  switch (num_bytes) {
    case 1: *target = static_cast<std::uint8_t>(value); return;
    case 2: {
      const auto narrow = static_cast<std::uint16_t>(value);
      std::memcpy(target, &narrow, sizeof narrow);
      return;
    }
    case 4: {
      const auto narrow = static_cast<std::uint32_t>(value);
      std::memcpy(target, &narrow, sizeof narrow);
      return;
    }
    case 8: std::memcpy(target, &value, sizeof value); return;
  }
}

}  // namespace

MessageSections sections_of(const MessageFormat& format, std::size_t num_rows) {
  MessageSections sections;
  sections.counts = padded(num_rows * format.row_id_bytes);
  std::size_t end = sections.counts + padded(num_rows * format.count_bytes);
  for (std::size_t f = 0; f < format.wires.size(); ++f) {
    sections.fields[f] = end;
    end += padded(num_rows * wire_row_bytes(format.wires[f], format.dim));
  }
  sections.num_bytes = end;
  return sections;
}

void clear_filling(const MessageFormat& format, std::size_t num_rows, std::uint8_t* message) {
  const MessageSections sections = sections_of(format, num_rows);
  const auto clear = [&](std::size_t begin, std::size_t item_bytes) {
    const std::size_t used = num_rows * item_bytes;
    std::memset(message + begin + used, 0, padded(used) - used);
  };
  clear(0, format.row_id_bytes);
  clear(sections.counts, format.count_bytes);
  for (std::size_t f = 0; f < format.wires.size(); ++f) clear(sections.fields[f], wire_row_bytes(format.wires[f], format.dim));
}

std::size_t owner_of(std::uint64_t key, std::size_t num_replicas) {
  std::uint64_t mixed = key * 0x9E3779B97F4A7C15ull;
  mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9ull;
  return static_cast<std::uint32_t>(mixed >> 32) % static_cast<std::uint32_t>(num_replicas);
}

Packer::Packer(const PackRequest& request, const std::uint64_t* rows, std::size_t num_rows, std::size_t rows_per_task)
    : request_(request), rows_(rows), num_rows_(num_rows), rows_per_task_(rows_per_task), owners_(num_rows) {
  const std::size_t num_replicas = request.messages.size(), num_tasks = (num_rows + rows_per_task - 1) / rows_per_task;
  task_begin_.assign((num_tasks + 1) * num_replicas, 0);
  std::vector<std::size_t> total(num_replicas, 0);
  for (std::size_t task = 0; task < num_tasks; ++task) {
    const std::size_t end = std::min(num_rows, (task + 1) * rows_per_task);
    for (std::size_t i = task * rows_per_task; i < end; ++i) {
      owners_[i] = static_cast<std::uint32_t>(owner_of(rows[i] + request.first_key, num_replicas));
      ++total[owners_[i]];
    }
    std::copy(total.begin(), total.end(), task_begin_.begin() + static_cast<std::ptrdiff_t>((task + 1) * num_replicas));
  }
  for (std::size_t receiver = 0; receiver < num_replicas; ++receiver) {
    const MessageSections sections = sections_of(request.format, request.num_rows[receiver]);
    std::uint8_t* message = request.messages[receiver];
    clear_filling(request.format, request.num_rows[receiver], message);
    Target target{message, message + sections.counts, {}};
    for (std::size_t f = 0; f < request.format.wires.size(); ++f) target.fields[f] = message + sections.fields[f];
    targets_.push_back(target);
  }
  for (std::uint64_t salt : request.salts) noise_.emplace_back(salt);
}

Status Packer::check() const {
  const std::size_t num_replicas = request_.messages.size();
  for (std::size_t receiver = 0; receiver < num_replicas; ++receiver) {
    const std::size_t found = task_begin_[task_begin_.size() - num_replicas + receiver];
    if (found != request_.num_rows[receiver]) {
      return Status::invalid("message to replica " + std::to_string(receiver),
                             std::to_string(request_.num_rows[receiver]) + " rows were announced, it owns " + std::to_string(found));
    }
  }
  return Status();
}

bool Packer::pack(std::size_t begin, std::size_t end, const std::int32_t* counts, const float* const* fields) const {
  const MessageFormat& format = request_.format;
  const std::size_t num_replicas = targets_.size(), dim = format.dim;
  std::vector<std::size_t> next(task_begin_.begin() + static_cast<std::ptrdiff_t>(begin / rows_per_task_ * num_replicas),
                                task_begin_.begin() + static_cast<std::ptrdiff_t>((begin / rows_per_task_ + 1) * num_replicas));
  bool is_finite = true;
  for (std::size_t f = 0; f < format.wires.size(); ++f) is_finite &= all_finite(fields[f], (end - begin) * dim);
  for (std::size_t i = begin; i < end; ++i) {
    const Target& target = targets_[owners_[i]];
    const std::size_t place = next[owners_[i]]++;
    put(target.rows + place * format.row_id_bytes, format.row_id_bytes, rows_[i]);
    const std::int32_t count = std::min(counts[i - begin], request_.max_count);
    if (format.count_bytes != 0) put(target.counts + place * format.count_bytes, format.count_bytes, static_cast<std::uint64_t>(count));
    for (std::size_t f = 0; f < format.wires.size(); ++f) {
      std::uint8_t* packed = target.fields[f] + place * wire_row_bytes(format.wires[f], dim);
      const std::uint64_t key = format.wires[f] == Wire::Fp32 ? 0 : noise_[f].key(rows_[i]);
      wire_encode_row(format.wires[f], fields[f] + (i - begin) * dim, dim, key, packed);
    }
  }
  return is_finite;
}

Status pack_contributions(const std::uint64_t* rows, std::size_t num_rows, const std::int32_t* counts,
                          const std::vector<const float*>& fields, const PackRequest& request, int num_threads, bool* is_finite) {
  Packer packer(request, rows, num_rows, kRowsPerTask);
  KSTEP_RETURN_IF_ERROR(packer.check());
  std::atomic<bool> finite{true};
  parallel_tasks(num_threads, (num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](std::size_t task) {
    const std::size_t begin = task * kRowsPerTask, end = std::min(num_rows, begin + kRowsPerTask);
    const float* ranges[kMaxSpans];
    for (std::size_t f = 0; f < fields.size(); ++f) ranges[f] = fields[f] + begin * request.format.dim;
    if (!packer.pack(begin, end, counts + begin, ranges)) finite.store(false);
  });
  *is_finite = finite.load();
  return Status();
}

}  // namespace kstep
