// The fused kernels alone, without PyTorch, and what the memory can do on the very same arrays.
//
// Usage: row_kernels_bench <dim> <zipf|uniform> <threads> <bytes of weights> <batch size> <rounds>
// 26 tables with Adam, one id per bag. Prints one line per measurement: name, median milliseconds, median CPU milliseconds of all
// threads together (steadier on a busy machine), bytes.
//   dedup, forward, backward    the calls of TableGroup; backward = reduce and Adam in one pass
//   touch_rows                  a loop over the unique rows of the batch that adds a constant to each float of a record,
//                               rows prefetched as the kernel does: random access to these rows at its best
//   touch_rows_and_grads        the same, and each gradient of the batch read once, where it lies
//   stream_copy                 a non-temporal copy of one array to another
// All rows are materialised before. Bytes of a backward: 2 x record x unique rows + 4 x dim x lookups.
#include <immintrin.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "compute/dedup.h"
#include "compute/table_group.h"
#include "compute/thread_pool.h"
#include "tier/dram_rows.h"
#include "tier/huge_buffer.h"

namespace kstep {
namespace {

constexpr std::size_t kNumTables = 26;
constexpr std::size_t kNumBatches = 4;  // taken in turns, so that no batch finds its rows in the cache
constexpr double kZipf = 1.05;
constexpr std::size_t kRowsPerTask = 256;
constexpr std::size_t kRowsAhead = 8;

void must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

double cpu_ms() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

struct Setting {
  std::size_t dim, num_rows, batch_size, num_rounds, num_ids;
  bool is_zipf;
  int num_threads;
};

// Ids of one table; Zipf ranks are scattered by a permutation that all batches share.
void draw_ids(const Setting& setting, const std::vector<double>& cumulative, const std::vector<std::int64_t>& row_of_rank,
              std::mt19937_64* random, std::int64_t* ids) {
  std::uniform_real_distribution<double> draw(0.0, 1.0);
  for (std::size_t i = 0; i < setting.batch_size; ++i) {
    if (!setting.is_zipf) {
      ids[i] = static_cast<std::int64_t>((*random)() % setting.num_rows);
      continue;
    }
    const auto rank = std::upper_bound(cumulative.begin(), cumulative.end(), draw(*random) * cumulative.back()) - cumulative.begin();
    ids[i] = row_of_rank[std::min<std::size_t>(static_cast<std::size_t>(rank), setting.num_rows - 1)];
  }
}

struct Batch {
  std::vector<std::int64_t> ids, unique_rows, table_offsets, num_bad;
  std::vector<std::int32_t> row_offsets, positions, inverse;

  std::size_t num_unique() const { return static_cast<std::size_t>(table_offsets[kNumTables]); }
};

class Bench {
 public:
  explicit Bench(const Setting& setting) : setting_(setting), offsets_(setting.num_ids + 1), tables_of_feature_(kNumTables) {
    std::iota(offsets_.begin(), offsets_.end(), 0);
    std::iota(tables_of_feature_.begin(), tables_of_feature_.end(), 0);
    make_group();
    make_batches();
    const std::size_t bytes = setting.num_ids * setting.dim * sizeof(float);
    must(HugeBuffer::make(bytes, "output", &out_));
    must(HugeBuffer::make(bytes, "gradient", &grad_));
    auto* grad = reinterpret_cast<float*>(grad_.data());
    for (std::size_t i = 0; i < setting.num_ids * setting.dim; ++i) grad[i] = 1e-3f * static_cast<float>(i % 97) - 0.04f;
  }

  void run() {
    double unique = 0;
    for (const Batch& batch : batches_) unique += static_cast<double>(batch.num_unique()) / kNumBatches;
    const double ids = static_cast<double>(setting_.num_ids), row = 4.0 * static_cast<double>(setting_.dim), record = 3 * row;
    measure("dedup", ids * 8, [&](Batch& batch) { dedup_batch(&batch); });
    measure("forward", unique * row + ids * row, [&](Batch& batch) {
      must(group_->pooled_forward(lookup(batch), Pooling::Sum, nullptr, reinterpret_cast<float*>(out_.data()), columns(),
                                  setting_.num_threads));
    });
    Gradient gradient;
    gradient.data = reinterpret_cast<const float*>(grad_.data());
    gradient.stride = columns();
    std::uint64_t step = 0;
    measure("backward", 2 * record * unique + ids * row, [&](Batch& batch) {
      must(group_->reduce_update(lookup(batch), gradient, {1e-3, ++step}, setting_.num_threads));
    });
    measure("touch_rows", 2 * record * unique, [&](Batch& batch) { touch(batch, false); });
    measure("touch_rows_and_grads", 2 * record * unique + ids * row, [&](Batch& batch) { touch(batch, true); });
    measure_copy();
    std::printf("unique_rows %.0f\n", unique);
  }

 private:
  std::size_t columns() const { return kNumTables * setting_.dim; }

  void make_group() {
    std::vector<TableSpec> tables(kNumTables);
    const auto width = static_cast<std::uint32_t>(setting_.dim);
    for (std::size_t t = 0; t < kNumTables; ++t) {
      tables[t].table_id = static_cast<std::uint32_t>(t);
      tables[t].name = "t" + std::to_string(t);
      tables[t].num_rows = setting_.num_rows;
      tables[t].dim = width;
      tables[t].init = {InitKind::Uniform, -0.01, 0.01};
      must(RecordSchema::make({{"weight", DType::F32, width}, {"m", DType::F32, width}, {"v", DType::F32, width}}, &tables[t].schema));
    }
    std::unique_ptr<RowSource> source;
    must(DramRows::make(tables, DramLayout::Direct, setting_.num_threads, &source));
    OptimizerSpec adam;
    adam.kind = OptimizerKind::Adam;
    must(TableGroup::make(std::move(source), adam, &group_));
    std::vector<std::uint64_t> rows(setting_.num_rows);
    std::iota(rows.begin(), rows.end(), 0);
    const std::vector<float> zeros(setting_.num_rows * setting_.dim, 0.0f);
    for (std::uint32_t t = 0; t < kNumTables; ++t) {
      must(group_->write_field(t, rows.data(), rows.size(), "m", reinterpret_cast<const std::byte*>(zeros.data())));
    }
  }

  void make_batches() {
    std::mt19937_64 random(1);
    std::vector<double> cumulative(setting_.num_rows);
    double sum = 0;
    for (std::size_t r = 0; r < setting_.num_rows; ++r) cumulative[r] = sum += std::pow(static_cast<double>(r + 1), -kZipf);
    batches_.resize(kNumBatches);
    for (Batch& batch : batches_) {
      batch.ids.resize(setting_.num_ids);
      batch.unique_rows.resize(setting_.num_ids);
      batch.table_offsets.resize(kNumTables + 1);
      batch.num_bad.resize(kNumTables);
      batch.row_offsets.resize(setting_.num_ids + 1);
      batch.positions.resize(setting_.num_ids);
      batch.inverse.resize(setting_.num_ids);
    }
    std::vector<std::int64_t> row_of_rank(setting_.num_rows);
    for (std::size_t t = 0; t < kNumTables; ++t) {
      std::iota(row_of_rank.begin(), row_of_rank.end(), 0);
      std::shuffle(row_of_rank.begin(), row_of_rank.end(), random);
      for (Batch& batch : batches_) {
        draw_ids(setting_, cumulative, row_of_rank, &random, batch.ids.data() + t * setting_.batch_size);
      }
    }
    for (Batch& batch : batches_) dedup_batch(&batch);
  }

  void dedup_batch(Batch* batch) {
    const std::vector<std::int64_t> num_rows(kNumTables, static_cast<std::int64_t>(setting_.num_rows));
    Bags bags;
    bags.ids = batch->ids.data();
    bags.num_ids = setting_.num_ids;
    bags.offsets = offsets_.data();
    bags.num_features = kNumTables;
    bags.batch_size = setting_.batch_size;
    must(dedup(bags, tables_of_feature_.data(), num_rows.data(), kNumTables, OutOfRange::Error, setting_.num_threads, &workspace_,
               {batch->unique_rows.data(), batch->table_offsets.data(), batch->row_offsets.data(), batch->positions.data(),
                batch->inverse.data(), batch->num_bad.data()}));
  }

  Lookup lookup(const Batch& batch) const {
    Lookup result;
    result.num_ids = setting_.num_ids;
    result.num_features = kNumTables;
    result.batch_size = setting_.batch_size;
    result.offsets = offsets_.data();
    result.table_of_feature = tables_of_feature_.data();
    result.unique_rows = batch.unique_rows.data();
    result.table_offsets = batch.table_offsets.data();
    result.row_offsets = batch.row_offsets.data();
    result.positions = batch.positions.data();
    result.inverse = batch.inverse.data();
    return result;
  }

  // Reads and writes each record once, and with `grads` reads the gradients in the order that the backward needs them.
  void touch(const Batch& batch, bool grads) {
    const std::size_t floats = 3 * setting_.dim, dim = setting_.dim, num_unique = batch.num_unique();
    payload_.resize(num_unique);
    std::vector<PinTicket> tickets(kNumTables);
    for (std::size_t t = 0; t < kNumTables; ++t) {
      const std::int64_t begin = batch.table_offsets[t], end = batch.table_offsets[t + 1];
      must(group_->source().pin(static_cast<std::uint32_t>(t), reinterpret_cast<const std::uint64_t*>(batch.unique_rows.data() + begin),
                                static_cast<std::size_t>(end - begin), PinMode::Update, payload_.data() + begin, &tickets[t]));
    }
    const auto* grad = reinterpret_cast<const float*>(grad_.data());
    const std::size_t stride = columns();
    const auto grad_of = [&](std::int32_t position) {
      const auto at = static_cast<std::size_t>(position);
      return grad + at % setting_.batch_size * stride + at / setting_.batch_size * dim;
    };
    const auto ask = [](const float* address, std::size_t count) {
      for (std::size_t j = 0; j < count; j += 16) __builtin_prefetch(address + j);
    };
    parallel_tasks(setting_.num_threads, (num_unique + kRowsPerTask - 1) / kRowsPerTask, [&](std::size_t task) {
      const std::size_t end = std::min(num_unique, (task + 1) * kRowsPerTask);
      const std::int32_t last = batch.row_offsets[end];
      for (std::size_t u = task * kRowsPerTask; u < end; ++u) {
        if (u + kRowsAhead < end) ask(reinterpret_cast<const float*>(payload_[u + kRowsAhead]), floats);
        auto* row = reinterpret_cast<float*>(payload_[u]);
        float extra = 1e-9f;
        for (std::int32_t k = batch.row_offsets[u]; grads && k < batch.row_offsets[u + 1]; ++k) {
          if (k + 12 < last) ask(grad_of(batch.positions[static_cast<std::size_t>(k + 12)]), dim);
          const float* mine = grad_of(batch.positions[static_cast<std::size_t>(k)]);
          for (std::size_t j = 0; j < dim; j += 16) extra += 1e-9f * mine[j];
        }
        for (std::size_t j = 0; j < floats; ++j) row[j] += extra;
      }
    });
    for (PinTicket ticket : tickets) must(group_->source().unpin(ticket, true));
  }

  void measure(const char* name, double bytes, const std::function<void(Batch&)>& call) {
    std::vector<double> times, cpu_times;
    for (std::size_t round = 0; round < setting_.num_rounds + 2; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      const double cpu_begin = cpu_ms();
      call(batches_[round % kNumBatches]);
      const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
      if (round < 2) continue;
      times.push_back(ms);
      cpu_times.push_back(cpu_ms() - cpu_begin);
    }
    std::sort(times.begin(), times.end());
    std::sort(cpu_times.begin(), cpu_times.end());
    std::printf("%s %.4f %.4f %.0f\n", name, times[times.size() / 2], cpu_times[times.size() / 2], bytes);
    std::fflush(stdout);
  }

  void measure_copy() {
    constexpr std::size_t kBytes = std::size_t{512} << 20;
    constexpr std::size_t kTask = std::size_t{1} << 20;
    HugeBuffer from, to;
    must(HugeBuffer::make(kBytes, "copy", &from));
    must(HugeBuffer::make(kBytes, "copy", &to));
    std::fill(from.data(), from.data() + kBytes, std::byte{1});
    measure("stream_copy", 2.0 * kBytes, [&](Batch&) {
      parallel_tasks(setting_.num_threads, kBytes / kTask, [&](std::size_t task) {
        for (std::size_t at = task * kTask; at < (task + 1) * kTask; at += 32) {
          _mm256_stream_si256(reinterpret_cast<__m256i*>(to.data() + at),
                              _mm256_load_si256(reinterpret_cast<const __m256i*>(from.data() + at)));
        }
        _mm_sfence();
      });
    });
  }

  const Setting setting_;
  std::vector<std::int64_t> offsets_, tables_of_feature_;
  std::unique_ptr<TableGroup> group_;
  std::vector<Batch> batches_;
  DedupWorkspace workspace_;
  HugeBuffer out_, grad_;
  std::vector<std::byte*> payload_;
};

}  // namespace
}  // namespace kstep

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: row_kernels_bench <dim> <zipf|uniform> <threads> <bytes of weights> <batch size> <rounds>\n");
    return 2;
  }
  kstep::Setting setting{};
  setting.dim = std::strtoul(argv[1], nullptr, 10);
  setting.is_zipf = std::string(argv[2]) == "zipf";
  setting.num_threads = std::atoi(argv[3]);
  setting.num_rows = std::strtoul(argv[4], nullptr, 10) / (4 * setting.dim * kstep::kNumTables);
  setting.batch_size = std::strtoul(argv[5], nullptr, 10);
  setting.num_rounds = std::strtoul(argv[6], nullptr, 10);
  setting.num_ids = kstep::kNumTables * setting.batch_size;
  kstep::Bench(setting).run();
  return 0;
}
