#include "compute/optimizer.h"

#include <cmath>
#include <string>

namespace kstep {
namespace {

Status find_field(const TableSpec& table, const char* name, DType dtype, std::uint32_t width, bool required,
                  std::uint32_t* offset) {
  *offset = table.schema.offset_of(name);
  if (*offset == RecordSchema::kNoField) {
    if (!required) return Status();
    return Status::invalid("table '" + table.name + "'", std::string("the optimizer needs a field '") + name +
                                                             "', the record has " + table.schema.describe());
  }
  for (const Field& field : table.schema.fields()) {
    if (field.name == name && (field.dtype != dtype || field.width != width)) {
      return Status::invalid("table '" + table.name + "'",
                             std::string("field '") + name + "' is " + dtype_name(field.dtype) + "[" +
                                 std::to_string(field.width) + "], the optimizer needs " + dtype_name(dtype) + "[" +
                                 std::to_string(width) + "]");
    }
  }
  return Status();
}

}  // namespace

double inverse_bias(double beta, std::uint64_t step) { return 1.0 / (1.0 - std::pow(beta, static_cast<double>(step))); }

BiasTable::BiasTable(double b) : beta(b) {
  inverse.push_back(1.0f);
  while (inverse.size() < kMaxSteps) {
    inverse.push_back(static_cast<float>(inverse_bias(beta, inverse.size())));
    if (inverse.back() == 1.0f) break;
  }
}

void RateHistory::set(std::int32_t clock, float lr, std::int32_t shift) {
  while (!runs_.empty() && runs_.back().first_clock >= clock) runs_.pop_back();
  if (runs_.empty() || runs_.back().lr != lr || runs_.back().shift != shift) runs_.push_back({clock, lr, shift});
}

std::string touches_field(std::size_t tracker) { return tracker == 0 ? "touches" : "touches_" + std::to_string(tracker); }

Status RowLayout::make(const TableSpec& table, const OptimizerSpec& spec, RowLayout* out) {
  const bool is_adam = spec.kind == OptimizerKind::Adam;
  const bool needs_step = is_adam && spec.bias_correction == BiasCorrection::Row;
  out->dim = table.dim;
  out->payload_bytes = table.schema.payload_bytes();
  std::uint32_t weight = 0;
  KSTEP_RETURN_IF_ERROR(find_field(table, "weight", DType::F32, table.dim, true, &weight));
  KSTEP_RETURN_IF_ERROR(find_field(table, "m", DType::F32, table.dim, is_adam, &out->m));
  KSTEP_RETURN_IF_ERROR(find_field(table, "v", DType::F32, table.dim, is_adam, &out->v));
  KSTEP_RETURN_IF_ERROR(find_field(table, "step", DType::I32, 1, needs_step, &out->step));
  out->step_v = out->v_hat = out->last_step = RecordSchema::kNoField;
  if (spec.replays_l2) KSTEP_RETURN_IF_ERROR(find_field(table, "last_step", DType::I32, 1, true, &out->last_step));
  if (needs_step && spec.step_per_moment) KSTEP_RETURN_IF_ERROR(find_field(table, "step_v", DType::I32, 1, true, &out->step_v));
  if (is_adam && spec.is_frozen) KSTEP_RETURN_IF_ERROR(find_field(table, "v_hat", DType::F32, table.dim, true, &out->v_hat));
  KSTEP_RETURN_IF_ERROR(
      find_field(table, "sum", DType::F32, 1, spec.kind == OptimizerKind::RowwiseAdagrad, &out->sum));
  for (std::size_t tracker = 0; tracker < kMaxTrackers; ++tracker) {
    KSTEP_RETURN_IF_ERROR(find_field(table, touches_field(tracker).c_str(), DType::I32, 1, false, &out->touches[tracker]));
  }
  const bool has_touches = out->touches[0] != RecordSchema::kNoField;
  if (spec.replays_l2 && has_touches) {
    return Status::invalid("table '" + table.name + "'", "rows that replay their L2 cannot be merged: their moves between two touches have no base");
  }
  KSTEP_RETURN_IF_ERROR(find_field(table, "base", DType::F32, table.dim, false, &out->base));
  if (out->base != RecordSchema::kNoField && !has_touches) {
    return Status::invalid("table '" + table.name + "'", "field 'base' needs field 'touches' beside it");
  }
  return Status();
}

}  // namespace kstep
