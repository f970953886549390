// RocksDB as a peer: 32 shards and threads, with the options that FBGEMM's SSD embedding kernel gives it.
#include "backend.h"

#ifdef KSTEP_WITH_ROCKSDB
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/slice_transform.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <cstring>
#include <thread>
#endif

namespace kstep::bench {

#ifdef KSTEP_WITH_ROCKSDB
namespace {

constexpr std::size_t kShards = 32;
constexpr std::size_t kMemtableBytes = 512u << 20;  // in all; on top of the row cache
constexpr std::size_t kRowsPerWrite = 2000;
constexpr std::size_t kRowsPerGet = 512;

rocksdb::Options make_options() {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.compression = rocksdb::kNoCompression;
  options.write_buffer_size = kMemtableBytes / kShards / 4;
  options.max_write_buffer_number = 4;
  options.min_write_buffer_number_to_merge = 2;
  options.target_file_size_base = std::uint64_t{2} << 30;
  options.compaction_style = rocksdb::kCompactionStyleUniversal;
  options.compaction_options_universal.size_ratio = 10;
  options.compaction_options_universal.min_merge_width = 2;
  options.compaction_options_universal.max_size_amplification_percent = 400;
  options.level0_file_num_compaction_trigger = 8;
  options.level0_slowdown_writes_trigger = 32;
  options.level0_stop_writes_trigger = 64;
  options.prefix_extractor.reset(rocksdb::NewFixedPrefixTransform(8));
  options.allow_concurrent_memtable_write = false;
  options.avoid_unnecessary_blocking_io = true;
  options.use_direct_reads = true;
  options.use_direct_io_for_flush_and_compaction = true;
  options.optimize_filters_for_hits = true;
  rocksdb::BlockBasedTableOptions table;
  table.no_block_cache = true;
  table.index_type = rocksdb::BlockBasedTableOptions::kHashSearch;
  table.data_block_index_type = rocksdb::BlockBasedTableOptions::kDataBlockBinaryAndHash;
  table.data_block_hash_table_util_ratio = 0.75;
  table.checksum = rocksdb::kNoChecksum;
  table.format_version = 5;
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

Status to_status(const rocksdb::Status& status) { return status.ok() ? Status() : Status::io("rocksdb", status.ToString()); }

class RocksBackend : public Backend {
 public:
  RocksBackend(const Shape& shape, const std::string& folder) : shape_(shape), folder_(folder) {}
  ~RocksBackend() override {
    for (auto& db : dbs_) {
      if (db != nullptr) db->Close().PermitUncheckedError();
    }
  }

  Status load() override {
    dbs_.resize(kShards);
    for (std::size_t s = 0; s < kShards; ++s) {
      rocksdb::DB* db = nullptr;
      KSTEP_RETURN_IF_ERROR(to_status(rocksdb::DB::Open(make_options(), folder_ + "/rocks" + std::to_string(s), &db)));
      dbs_[s].reset(db);
    }
    return in_shards([&](std::size_t s) {
      std::vector<std::byte> payload(shape_.payload_bytes);
      rocksdb::WriteOptions write;
      write.disableWAL = true;
      for (std::uint64_t row = s; row < shape_.num_rows;) {
        rocksdb::WriteBatch batch;
        for (std::size_t k = 0; k < kRowsPerWrite && row < shape_.num_rows; ++k, row += kShards) {
          fill_payload(row, shape_.payload_bytes, payload.data());
          KSTEP_RETURN_IF_ERROR(to_status(batch.Put(slice(&row, sizeof(row)), slice(payload.data(), payload.size()))));
        }
        KSTEP_RETURN_IF_ERROR(to_status(dbs_[s]->Write(write, &batch)));
      }
      return to_status(dbs_[s]->Flush(rocksdb::FlushOptions()));
    });
  }

  Status read(const std::vector<std::uint64_t>& rows, const std::vector<std::byte*>& payloads) override {
    return in_shards([&](std::size_t s) {
      std::vector<std::size_t> mine = rows_of_shard(rows, s);
      rocksdb::ReadOptions options;
      options.verify_checksums = false;
      options.async_io = true;
      std::vector<rocksdb::Slice> keys(kRowsPerGet);
      std::vector<rocksdb::PinnableSlice> values(kRowsPerGet);
      std::vector<rocksdb::Status> states(kRowsPerGet);
      for (std::size_t first = 0; first < mine.size(); first += kRowsPerGet) {
        const std::size_t n = std::min(kRowsPerGet, mine.size() - first);
        for (std::size_t j = 0; j < n; ++j) {
          keys[j] = slice(&rows[mine[first + j]], sizeof(rows[0]));
          values[j].Reset();
        }
        dbs_[s]->MultiGet(options, dbs_[s]->DefaultColumnFamily(), n, keys.data(), values.data(), states.data(), false);
        for (std::size_t j = 0; j < n; ++j) {
          KSTEP_RETURN_IF_ERROR(to_status(states[j]));
          std::memcpy(payloads[mine[first + j]], values[j].data(), shape_.payload_bytes);
        }
      }
      return Status();
    });
  }

  Status write(const std::vector<std::uint64_t>& rows, const std::vector<std::byte*>& payloads) override {
    return in_shards([&](std::size_t s) {
      rocksdb::WriteOptions options;
      options.disableWAL = true;
      rocksdb::WriteBatch batch;
      for (const std::size_t i : rows_of_shard(rows, s)) {
        KSTEP_RETURN_IF_ERROR(to_status(batch.Put(slice(&rows[i], sizeof(rows[0])), slice(payloads[i], shape_.payload_bytes))));
      }
      return to_status(dbs_[s]->Write(options, &batch));
    });
  }

 private:
  static rocksdb::Slice slice(const void* data, std::size_t n) { return {static_cast<const char*>(data), n}; }

  static std::vector<std::size_t> rows_of_shard(const std::vector<std::uint64_t>& rows, std::size_t shard) {
    std::vector<std::size_t> mine;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] % kShards == shard) mine.push_back(i);
    }
    return mine;
  }

  template <typename Work>
  Status in_shards(Work work) {
    std::vector<std::thread> threads;
    std::vector<Status> states(kShards);
    for (std::size_t s = 0; s < kShards; ++s) threads.emplace_back([&, s] { states[s] = work(s); });
    for (std::thread& thread : threads) thread.join();
    for (const Status& status : states) KSTEP_RETURN_IF_ERROR(status);
    return {};
  }

  Shape shape_;
  std::string folder_;
  std::vector<std::unique_ptr<rocksdb::DB>> dbs_;
};

}  // namespace

std::unique_ptr<Backend> make_rocksdb(const Shape& shape, const std::string& folder) { return std::make_unique<RocksBackend>(shape, folder); }
#else
std::unique_ptr<Backend> make_rocksdb(const Shape&, const std::string&) { return nullptr; }
#endif

}  // namespace kstep::bench
