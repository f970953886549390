// A row store beside a plain map of what it should hold.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "storage/row_store.h"
#include "tests/faulty_env.h"

namespace kstep {

constexpr std::uint64_t kSegmentBytes = 256u << 10;

inline TableSpec make_table(std::uint32_t id, const std::string& name, std::uint64_t num_rows, std::uint32_t dim) {
  TableSpec table;
  table.table_id = id;
  table.name = name;
  table.num_rows = num_rows;
  table.dim = dim;
  EXPECT_TRUE(RecordSchema::make({{"weight", DType::F32, dim}, {"m", DType::F32, dim}}, &table.schema).ok());
  return table;
}

inline StoreOptions make_options(Env* env, std::vector<std::string> paths = {"/a"}) {
  StoreOptions options;
  options.env = env;
  options.paths = std::move(paths);
  options.tables = {make_table(3, "small", 500, 4), make_table(9, "twin", 300, 4), make_table(1, "wide", 400, 33)};
  options.segment_bytes = kSegmentBytes;
  options.queue_depth = 8;
  return options;
}

// The rows a store should hold: version of each (table, row); the payload follows from it.
using Model = std::map<std::pair<std::size_t, std::uint64_t>, std::uint64_t>;

inline std::vector<std::byte> payload_of(const TableState& table, std::uint64_t row, std::uint64_t version) {
  std::vector<std::byte> payload(table.spec.schema.payload_bytes());
  std::mt19937_64 rng(row * 1000003 + version * 7 + table.spec.table_id);
  for (std::byte& byte : payload) byte = static_cast<std::byte>(rng());
  return payload;
}

inline Status write_rows(RowStore* store, Model* model, const std::vector<std::pair<std::size_t, std::uint64_t>>& keys, std::uint64_t version) {
  std::uint64_t bytes = 0;
  for (const auto& key : keys) bytes += store->table(key.first)->log->layout().record_bytes;
  KSTEP_RETURN_IF_ERROR(store->begin_batch(bytes));
  for (const auto& key : keys) {
    TableState* table = store->table(key.first);
    KSTEP_RETURN_IF_ERROR(store->append(table, key.second, payload_of(*table, key.second, version).data()));
    (*model)[key] = version;
  }
  return store->end_batch();
}

// Every row of the model reads back, and the index knows no other row.
inline Status check_all(RowStore* store, const Model& model) {
  std::size_t num_materialised = 0;
  for (std::size_t t = 0; t < store->num_tables(); ++t) {
    TableState* table = store->table(t);
    num_materialised += table->index.num_materialised();
    std::vector<ReadRow> rows;
    std::vector<std::vector<std::byte>> outputs;
    for (const auto& item : model) {
      if (item.first.first != t) continue;
      const std::uint32_t slot = table->index.find(item.first.second);
      if (slot == kNoSlot) return Status::corruption("model", "row " + std::to_string(item.first.second) + " is lost");
      outputs.emplace_back(table->spec.schema.payload_bytes());
      rows.push_back({kNoSlot, table, item.first.second, outputs.back().data()});
    }
    KSTEP_RETURN_IF_ERROR(store->read(rows.data(), rows.size()));
    std::size_t i = 0;
    for (const auto& item : model) {
      if (item.first.first != t) continue;
      if (outputs[i++] != payload_of(*table, item.first.second, item.second)) {
        return Status::corruption("model", "row " + std::to_string(item.first.second) + " has other bytes");
      }
    }
  }
  if (num_materialised != model.size()) return Status::corruption("model", "the index holds rows that were never written");
  return {};
}

inline std::vector<std::pair<std::size_t, std::uint64_t>> random_keys(std::mt19937_64* rng, const RowStore& store, std::size_t count) {
  std::map<std::pair<std::size_t, std::uint64_t>, bool> keys;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t t = (*rng)() % store.num_tables();
    const std::uint64_t num_rows = store.table(t).spec.num_rows;
    keys[{t, (*rng)() % ((*rng)() % 2 == 0 ? num_rows : num_rows / 8)}] = true;
  }
  std::vector<std::pair<std::size_t, std::uint64_t>> list;
  for (const auto& item : keys) list.push_back(item.first);
  std::shuffle(list.begin(), list.end(), *rng);
  return list;
}

}  // namespace kstep
