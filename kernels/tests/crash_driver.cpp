// A training run without torch, made to be killed. Each step updates a set of rows that follows from the step's
// number, so the state after any step can be computed afresh and compared with what a snapshot gives back.
//
//   crash_driver run <folder,folder...> <num_steps> <steps_per_snapshot>
//       restores the newest snapshot if there is one, checks every row, trains on to num_steps with a snapshot
//       every steps_per_snapshot, deletes older ones, prints "step <n>" after each committed snapshot, "done" at last
//   crash_driver check <folder,folder...>
//       opens and verifies every snapshot and compares every row, prints "ok <number of snapshots>"
//   crash_driver hold <folder,folder...>
//       opens the store, prints "held", and sleeps until killed
// Exit code 0, or 1 with one line on stderr.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "compute/initial_values.h"
#include "storage/snapshot_reader.h"
#include "tier/tiered_rows.h"

namespace {

using kstep::Status;

constexpr std::uint64_t kNumRows = 6000;
constexpr std::uint32_t kDim = 16;
constexpr std::size_t kRowsPerStep = 700;
constexpr std::size_t kSnapshotsKept = 2;

kstep::TableSpec make_table(std::uint32_t id, const std::string& name) {
  kstep::TableSpec table;
  table.table_id = id;
  table.name = name;
  table.num_rows = kNumRows;
  table.dim = kDim + id;
  table.seed = 7;
  table.init = {kstep::InitKind::Uniform, -1.0, 1.0};
  Status status = kstep::RecordSchema::make({{"weight", kstep::DType::F32, table.dim}, {"m", kstep::DType::F32, table.dim}}, &table.schema);
  if (!status.ok()) std::abort();
  return table;
}

kstep::TieredOptions make_options(const std::vector<std::string>& paths) {
  kstep::TieredOptions options;
  options.store.paths = paths;
  options.store.tables = {make_table(0, "users"), make_table(1, "items")};
  options.store.segment_bytes = 256u << 10;
  options.cache_bytes = {64u << 10, 64u << 10};
  return options;
}

std::vector<std::uint64_t> rows_of_step(std::uint64_t step, std::uint32_t table) {
  std::mt19937_64 rng(step * 2 + table);
  std::map<std::uint64_t, bool> rows;
  for (std::size_t i = 0; i < kRowsPerStep; ++i) rows[rng() % (rng() % 2 == 0 ? kNumRows : kNumRows / 20)] = true;
  std::vector<std::uint64_t> list;
  for (const auto& row : rows) list.push_back(row.first);
  return list;
}

// The value of a row is how often it was updated and when: easy to compute for any step.
void update_row(std::byte* payload, std::uint32_t dim, std::uint64_t step) {
  std::vector<float> values(2 * dim);
  std::memcpy(values.data(), payload, values.size() * sizeof(float));
  for (std::uint32_t i = 0; i < dim; ++i) {
    values[i] = values[i] * 0.5f + static_cast<float>(step % 97);
    values[dim + i] += 1.0f;
  }
  std::memcpy(payload, values.data(), values.size() * sizeof(float));
}

Status train_step(kstep::TieredRows* rows, std::uint64_t step) {
  for (std::uint32_t t = 0; t < 2; ++t) {
    const std::vector<std::uint64_t> ids = rows_of_step(step, t);
    std::vector<std::byte*> payloads(ids.size());
    kstep::PinTicket ticket = kstep::kNoTicket;
    KSTEP_RETURN_IF_ERROR(rows->pin(t, ids.data(), ids.size(), kstep::PinMode::Update, payloads.data(), &ticket));
    for (std::byte* payload : payloads) update_row(payload, rows->tables()[t].dim, step);
    KSTEP_RETURN_IF_ERROR(rows->unpin(ticket, true));
  }
  return {};
}

Status prefetch_step(kstep::TieredRows* rows, std::uint64_t step) {
  const std::vector<std::uint64_t> users = rows_of_step(step, 0);
  const std::vector<std::uint64_t> items = rows_of_step(step, 1);
  return rows->prefetch({{0, users.data(), users.size()}, {1, items.data(), items.size()}});
}

// Every row's payload after `num_steps` steps, by table and row; only rows that were updated.
using State = std::vector<std::map<std::uint64_t, std::vector<float>>>;

Status expected_state(std::uint64_t num_steps, State* state);

std::uint64_t step_of(const std::string& metadata) { return std::strtoull(metadata.c_str(), nullptr, 10); }

Status check_snapshot(const std::vector<std::string>& paths, const std::string& name, std::uint64_t* step) {
  std::unique_ptr<kstep::SnapshotReader> reader;
  KSTEP_RETURN_IF_ERROR(kstep::SnapshotReader::open(nullptr, paths, name, &reader));
  kstep::VerifyReport report;
  KSTEP_RETURN_IF_ERROR(reader->verify(&report));
  if (!report.failures.empty()) return Status::corruption("snapshot " + name, report.failures[0]);
  *step = step_of(reader->manifest().metadata);
  State state;
  KSTEP_RETURN_IF_ERROR(expected_state(*step, &state));
  for (std::uint32_t t = 0; t < 2; ++t) {
    kstep::TableState* table = reader->find_table(make_table(t, t == 0 ? "users" : "items").name);
    std::size_t num_rows = 0;
    KSTEP_RETURN_IF_ERROR(reader->for_each_row(table, [&](std::uint64_t row, const std::byte* payload) {
      ++num_rows;
      const auto it = state[t].find(row);
      if (it != state[t].end() && std::memcmp(it->second.data(), payload, it->second.size() * sizeof(float)) == 0) return Status();
      return Status::corruption("snapshot " + name, "row " + std::to_string(row) + " is not what step " + std::to_string(*step) + " gives");
    }));
    if (num_rows != state[t].size()) {
      return Status::corruption("snapshot " + name, "holds " + std::to_string(num_rows) + " rows, expected " + std::to_string(state[t].size()));
    }
  }
  return {};
}

Status expected_state(std::uint64_t num_steps, State* state) {
  state->assign(2, {});
  for (std::uint64_t step = 1; step <= num_steps; ++step) {
    for (std::uint32_t t = 0; t < 2; ++t) {
      const kstep::TableSpec table = make_table(t, "t");
      for (const std::uint64_t row : rows_of_step(step, t)) {
        std::vector<float>& values = (*state)[t][row];
        if (values.empty()) {
          values.resize(2 * table.dim);
          kstep::fill_initial_row(table, row, reinterpret_cast<std::byte*>(values.data()));
        }
        update_row(reinterpret_cast<std::byte*>(values.data()), table.dim, step);
      }
    }
  }
  return {};
}

// The newest snapshot's name, empty when there is none. Opens the store for a moment, which also recovers it.
Status find_newest(const std::vector<std::string>& paths, std::vector<std::string>* names) {
  std::unique_ptr<kstep::TieredRows> rows;
  KSTEP_RETURN_IF_ERROR(kstep::TieredRows::make(make_options(paths), &rows));
  *names = rows->snapshots();
  return {};
}

Status run(const std::vector<std::string>& paths, std::uint64_t num_steps, std::uint64_t steps_per_snapshot) {
  std::vector<std::string> names;
  KSTEP_RETURN_IF_ERROR(find_newest(paths, &names));
  std::uint64_t step = 0;
  kstep::TieredOptions options = make_options(paths);
  if (!names.empty()) {
    KSTEP_RETURN_IF_ERROR(check_snapshot(paths, names.back(), &step));
    options.store.restore_snapshot = names.back();
    std::printf("restored %llu\n", static_cast<unsigned long long>(step));
    std::fflush(stdout);
  }
  std::unique_ptr<kstep::TieredRows> rows;
  KSTEP_RETURN_IF_ERROR(kstep::TieredRows::make(options, &rows));
  for (std::uint64_t ahead = step + 1; ahead < step + 3; ++ahead) KSTEP_RETURN_IF_ERROR(prefetch_step(rows.get(), ahead));
  while (step < num_steps) {
    ++step;
    KSTEP_RETURN_IF_ERROR(prefetch_step(rows.get(), step + 2));
    KSTEP_RETURN_IF_ERROR(train_step(rows.get(), step));
    if (step % steps_per_snapshot != 0 && step != num_steps) continue;
    KSTEP_RETURN_IF_ERROR(rows->snapshot("step-" + std::to_string(step), std::to_string(step)));
    std::printf("step %llu\n", static_cast<unsigned long long>(step));
    std::fflush(stdout);
    std::vector<std::string> all = rows->snapshots();
    for (std::size_t i = 0; i + kSnapshotsKept < all.size(); ++i) KSTEP_RETURN_IF_ERROR(rows->remove_snapshot(all[i]));
  }
  std::printf("done\n");
  return {};
}

Status check(const std::vector<std::string>& paths) {
  std::vector<std::string> names;
  KSTEP_RETURN_IF_ERROR(find_newest(paths, &names));
  std::uint64_t step = 0;
  for (const std::string& name : names) KSTEP_RETURN_IF_ERROR(check_snapshot(paths, name, &step));
  std::printf("ok %zu\n", names.size());
  return {};
}

Status hold(const std::vector<std::string>& paths) {
  std::unique_ptr<kstep::TieredRows> rows;
  KSTEP_RETURN_IF_ERROR(kstep::TieredRows::make(make_options(paths), &rows));
  std::printf("held\n");
  std::fflush(stdout);
  std::this_thread::sleep_for(std::chrono::seconds(60));
  return {};
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 2 ? argv[1] : "";
  Status status = Status::invalid("crash_driver", "usage: run FOLDERS STEPS STEPS_PER_SNAPSHOT | check FOLDERS | hold FOLDERS");
  if (command == "run" && argc == 5) status = run(split(argv[2]), std::strtoull(argv[3], nullptr, 10), std::strtoull(argv[4], nullptr, 10));
  if (command == "check" && argc == 3) status = check(split(argv[2]));
  if (command == "hold" && argc == 3) status = hold(split(argv[2]));
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return 1;
}
