// The real Env and the three engines: the same bytes whatever moves them.
#include <gtest/gtest.h>

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>

#include "storage/env.h"
#include "storage/env_throttled.h"
#include "storage/file_cache.h"
#include "storage/row_store.h"
#include "tests/faulty_env.h"
#include "tier/tiered_rows.h"

namespace kstep {
namespace {

// A folder on a real file system, removed with what it holds.
class Folder {
 public:
  Folder() {
    std::string pattern = ::testing::TempDir() + "kstep-XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  ~Folder() { EXPECT_TRUE(Env::posix().remove_tree(path_).ok()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Engines this machine has; io_uring may be forbidden.
std::vector<IoBackend> backends() {
  std::vector<IoBackend> list = {IoBackend::Inline, IoBackend::Threads, IoBackend::Auto};
  std::unique_ptr<IoEngine> engine;
  if (make_uring_engine(4, &engine).ok()) list.push_back(IoBackend::Uring);
  return list;
}

TEST(IoEngines, MoveTheSameBytes) {
  Folder folder;
  Env& env = Env::posix();
  int index = 0;
  for (const IoBackend backend : backends()) {
    for (const bool is_direct : {false, true}) {
      std::unique_ptr<IoEngine> engine;
      ASSERT_TRUE(env.new_engine(backend, 8, &engine).ok());
      std::unique_ptr<File> file;
      ASSERT_TRUE(env.open(folder.path() + "/f" + std::to_string(index++), OpenMode::Create, is_direct, &file).ok());
      constexpr std::size_t kPieces = 50;
      AlignedBuffer written(kPieces * kPageBytes);
      AlignedBuffer read(kPieces * kPageBytes);
      std::mt19937_64 rng(1);
      for (std::size_t i = 0; i < written.size(); ++i) written.data()[i] = static_cast<std::byte>(rng());
      for (const bool is_write : {true, false}) {
        std::vector<IoRequest> requests(kPieces);
        std::vector<IoRequest*> done(8);
        std::size_t next = 0;
        std::size_t num_finished = 0;
        while (num_finished < kPieces) {
          while (next < kPieces && engine->num_in_flight() < engine->depth()) {
            IoRequest& request = requests[next];
            request.is_write = is_write;
            request.file = file.get();
            request.offset = next * kPageBytes;
            request.num_bytes = kPageBytes;
            request.buffer = (is_write ? written : read).data() + next * kPageBytes;
            request.tag = next++;
            ASSERT_TRUE(engine->submit(&request).ok());
          }
          std::size_t num_done = 0;
          ASSERT_TRUE(engine->reap(1, done.size(), done.data(), &num_done).ok());
          ASSERT_GE(num_done, 1u);
          for (std::size_t i = 0; i < num_done; ++i) {
            EXPECT_EQ(done[i], &requests[done[i]->tag]);
            EXPECT_EQ(done[i]->result, std::int64_t{kPageBytes}) << engine->name();
          }
          num_finished += num_done;
        }
        EXPECT_EQ(engine->num_in_flight(), 0u);
      }
      EXPECT_EQ(std::memcmp(written.data(), read.data(), written.size()), 0) << engine->name();

      IoRequest at_end;  // a read that meets the end of the file is short, not an error
      at_end.file = file.get();
      at_end.offset = (kPieces - 1) * kPageBytes;
      at_end.num_bytes = 2 * kPageBytes;
      at_end.buffer = read.data();
      ASSERT_TRUE(engine->submit(&at_end).ok());
      IoRequest* done = nullptr;
      std::size_t num_done = 0;
      ASSERT_TRUE(engine->reap(1, 1, &done, &num_done).ok());
      EXPECT_EQ(at_end.result, std::int64_t{kPageBytes}) << engine->name();
    }
  }
}

// A bounded folder takes its time for every byte; one beside it does not wait for it.
TEST(ThrottledEnv, BoundsOneFolderAndNotTheOther) {
  Folder slow, fast;
  constexpr std::uint64_t kBytesPerS = 1 << 20;
  constexpr std::size_t kPieces = 16;  // 64 KiB: 62.5 ms of the slow folder
  ThrottledEnv env(&Env::posix(), {slow.path(), fast.path()}, {kBytesPerS, 0});
  for (const IoBackend backend : backends()) {
    std::unique_ptr<IoEngine> engine;
    ASSERT_TRUE(env.new_engine(backend, 2 * kPieces, &engine).ok());
    std::vector<std::unique_ptr<File>> files;
    for (const Folder* folder : {&slow, &fast}) {
      std::unique_ptr<File> file;
      const std::string path = folder->path() + "/" + std::to_string(static_cast<int>(backend));
      ASSERT_TRUE(env.open(path, OpenMode::Create, false, &file).ok());
      files.push_back(std::move(file));
    }
    const AlignedBuffer memory(kPageBytes);
    std::memset(memory.data(), 7, kPageBytes);
    std::vector<IoRequest> requests(2 * kPieces);
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      requests[i].is_write = true;
      requests[i].file = files[i / kPieces].get();
      requests[i].offset = i % kPieces * kPageBytes;
      requests[i].num_bytes = kPageBytes;
      requests[i].buffer = memory.data();
      requests[i].tag = i;
      ASSERT_TRUE(engine->submit(&requests[i]).ok());
    }
    std::vector<IoRequest*> done(requests.size());
    std::size_t num_done = 0, num_finished = 0;
    std::size_t num_slow_among_first = 0;
    while (num_finished < requests.size()) {
      ASSERT_EQ(engine->num_in_flight(), requests.size() - num_finished);
      ASSERT_TRUE(engine->reap(1, done.size(), done.data(), &num_done).ok());
      ASSERT_GE(num_done, 1u);
      for (std::size_t i = 0; i < num_done; ++i) {
        EXPECT_EQ(done[i]->result, std::int64_t{kPageBytes});
        if (num_finished + i < kPieces / 2) num_slow_among_first += done[i]->tag < kPieces ? 1 : 0;
      }
      num_finished += num_done;
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    EXPECT_GE(seconds, 0.999 * kPieces * kPageBytes / kBytesPerS) << engine->name();
    EXPECT_LT(num_slow_among_first, kPieces / 2) << engine->name();
  }
}

TEST(IoEngines, ReportErrors) {
  Folder folder;
  Env& env = Env::posix();
  ASSERT_TRUE(env.write_text(folder.path() + "/f", "text").ok());
  for (const IoBackend backend : backends()) {
    std::unique_ptr<IoEngine> engine;
    ASSERT_TRUE(env.new_engine(backend, 2, &engine).ok());
    std::unique_ptr<File> file;
    ASSERT_TRUE(env.open(folder.path() + "/f", OpenMode::Read, false, &file).ok());
    std::byte byte{};
    IoRequest request;  // writing to a file opened for reading
    request.is_write = true;
    request.file = file.get();
    request.buffer = &byte;
    request.num_bytes = 1;
    ASSERT_TRUE(engine->submit(&request).ok());
    IoRequest* done = nullptr;
    std::size_t num_done = 0;
    ASSERT_TRUE(engine->reap(1, 1, &done, &num_done).ok());
    EXPECT_LT(request.result, 0) << engine->name();
  }
}

TEST(PosixEnv, SaysWhatWentWrong) {
  Folder folder;
  Env& env = Env::posix();
  std::unique_ptr<File> file;
  EXPECT_EQ(env.open(folder.path() + "/absent", OpenMode::Read, true, &file).kind, StatusKind::NotFound);
  ASSERT_TRUE(env.write_text(folder.path() + "/f", "text").ok());
  EXPECT_EQ(env.open(folder.path() + "/f", OpenMode::Create, true, &file).kind, StatusKind::Io);
  EXPECT_EQ(env.remove_file(folder.path() + "/absent").kind, StatusKind::NotFound);
  std::string text;
  ASSERT_TRUE(env.read_text(folder.path() + "/f", &text).ok());
  EXPECT_EQ(text, "text");
  std::uint32_t alignment = 0;
  ASSERT_TRUE(env.direct_alignment(folder.path(), &alignment).ok());
  EXPECT_GE(alignment, 1u);
  EXPECT_EQ(alignment & (alignment - 1), 0u);
  std::unique_ptr<FileLock> first;
  std::unique_ptr<FileLock> second;
  ASSERT_TRUE(env.lock(folder.path() + "/LOCK", &first).ok());
  EXPECT_EQ(env.lock(folder.path() + "/LOCK", &second).kind, StatusKind::Busy);
  first.reset();
  EXPECT_TRUE(env.lock(folder.path() + "/LOCK", &second).ok());
}

TEST(FileCache, KeepsItsBound) {
  FaultyEnv env;
  FileCache cache(&env, 3);
  File* file = nullptr;
  for (std::uint64_t key = 0; key < 3; ++key) {
    ASSERT_TRUE(cache.open(key, "/f" + std::to_string(key), OpenMode::Create, false, &file).ok());
  }
  EXPECT_EQ(cache.open(3, "/f3", OpenMode::Create, false, &file).kind, StatusKind::Full);  // all are pinned
  cache.release(1);
  ASSERT_TRUE(cache.open(3, "/f3", OpenMode::Create, false, &file).ok());
  EXPECT_EQ(cache.num_open(), 3u);
  EXPECT_EQ(cache.find(1), nullptr);
  EXPECT_NE(cache.find(2), nullptr);
}

TEST(FileCache, ClosesWhatIsPinnedWhenItsLastPinGoes) {
  FaultyEnv env;
  FileCache cache(&env, 3);
  File* file = nullptr;
  ASSERT_TRUE(cache.open(1, "/f", OpenMode::Create, false, &file).ok());
  EXPECT_EQ(cache.find(1), file);  // a second pin
  cache.close(1);
  EXPECT_TRUE(file->write_at(0, reinterpret_cast<const std::byte*>("ab"), 2).ok()) << "still in use";
  cache.release(1);
  EXPECT_EQ(cache.num_open(), 1u);
  cache.release(1);
  EXPECT_EQ(cache.num_open(), 0u);
  EXPECT_EQ(cache.find(1), nullptr);
  cache.close(1);  // not open: nothing to do
}

TableSpec make_table(std::uint32_t dim, std::uint64_t num_rows) {
  TableSpec table;
  table.name = "t";
  table.num_rows = num_rows;
  table.dim = dim;
  EXPECT_TRUE(RecordSchema::make({{"weight", DType::F32, dim}}, &table.schema).ok());
  return table;
}

// Every engine, direct or not, any dim: rows come back, after a restore too. Few handles, few requests in flight.
TEST(RowStoreOnADrive, GivesTheSameRowsWithEveryEngine) {
  for (const IoBackend backend : backends()) {
    for (const bool is_direct : {true, false}) {
      for (const std::uint32_t dim : {1u, 16u, 173u, 2048u}) {
        Folder folder;
        StoreOptions options;
        options.paths = {folder.path() + "/a", folder.path() + "/b"};
        options.tables = {make_table(dim, 3000)};
        options.backend = backend;
        options.use_direct_io = is_direct;
        options.queue_depth = 4;
        options.max_open_files = 6;
        options.segment_bytes = 256u << 10;
        for (const bool is_restored : {false, true}) {
          std::unique_ptr<RowStore> store;
          if (is_restored) options.restore_snapshot = "s";
          Status status = RowStore::open(options, &store);
          ASSERT_TRUE(status.ok()) << status.message();
          TableState* table = store->table(0);
          std::vector<float> payload(dim);
          if (!is_restored) {
            for (int version = 0; version < 2; ++version) {
              ASSERT_TRUE(store->begin_batch(2000ull * dim * 4).ok());
              for (std::uint64_t row = 0; row < 2000; ++row) {
                std::fill(payload.begin(), payload.end(), static_cast<float>(row + 0.5 * version));
                ASSERT_TRUE(store->append(table, row, reinterpret_cast<const std::byte*>(payload.data())).ok());
              }
              ASSERT_TRUE(store->end_batch().ok());
            }
          }
          std::vector<float> outputs(2000 * dim);
          std::vector<ReadRow> rows;
          for (std::uint64_t row = 0; row < 2000; ++row) {
            rows.push_back({kNoSlot, table, row, reinterpret_cast<std::byte*>(&outputs[row * dim])});
          }
          status = store->read(rows.data(), rows.size());
          ASSERT_TRUE(status.ok()) << status.message();
          for (std::uint64_t row = 0; row < 2000; ++row) ASSERT_EQ(outputs[row * dim + dim - 1], static_cast<float>(row + 0.5));
          EXPECT_EQ(table->index.find(2500), kNoSlot);
          if (!is_restored) {
            ASSERT_TRUE(store->snapshot("s", "").ok());
          }
        }
      }
    }
  }
}

// A table of a billion rows costs nothing until rows are touched.
TEST(TieredRowsOnADrive, ABillionRowsAreCreatedAtOnce) {
  Folder folder;
  TieredOptions options;
  options.store.paths = {folder.path() + "/a"};
  options.store.tables = {make_table(16, 1'000'000'000)};
  options.cache_bytes = {1u << 20};
  std::unique_ptr<TieredRows> source;
  ASSERT_TRUE(TieredRows::make(options, &source).ok());
  const std::vector<std::uint64_t> rows = {0, 5, 999'999'999};
  std::vector<std::byte*> payloads(rows.size());
  PinTicket ticket = kNoTicket;
  ASSERT_TRUE(source->pin(0, rows.data(), rows.size(), PinMode::Update, payloads.data(), &ticket).ok());
  ASSERT_TRUE(source->unpin(ticket, true).ok());
  ASSERT_TRUE(source->snapshot("s", "").ok());
  EXPECT_LT(source->usage().total_bytes(), 64u << 10);
  EXPECT_LT(source->counters()[0].at("index_bytes"), 1u << 20);
}

// A slow drive: the caller's wait is counted as stall, and prefetch hides it.
TEST(TieredRows, PrefetchHidesASlowDrive) {
  std::map<bool, double> stall_s;
  for (const bool is_prefetched : {false, true}) {
    FaultyEnv env;
    TieredOptions options;
    options.store.env = &env;
    options.store.paths = {"/a"};
    options.store.tables = {make_table(16, 20000)};
    options.store.backend = IoBackend::Inline;
    options.cache_bytes = {600 * (64 + 48)};
    std::unique_ptr<TieredRows> source;
    ASSERT_TRUE(TieredRows::make(options, &source).ok());
    std::vector<std::vector<std::uint64_t>> batches(20);
    for (std::size_t b = 0; b < batches.size(); ++b) {
      for (std::uint64_t i = 0; i < 100; ++i) batches[b].push_back(b % 10 * 1000 + i * 7);
    }
    std::vector<std::byte*> payloads(100);
    for (std::size_t b = 0; b < batches.size(); ++b) {
      if (b == 10) {  // from here on rows come from the drive, and slowly
        ASSERT_TRUE(source->flush().ok());
        env.set_read_delay_us(500);
      }
      PinTicket ticket = kNoTicket;
      const double before_s = source->counters()[0].at("stall_s");
      ASSERT_TRUE(source->pin(0, batches[b].data(), 100, PinMode::Update, payloads.data(), &ticket).ok());
      if (b >= 12) stall_s[is_prefetched] += source->counters()[0].at("stall_s") - before_s;
      if (is_prefetched && b >= 10 && b + 1 < batches.size()) {
        ASSERT_TRUE(source->prefetch({{0, batches[b + 1].data(), 100}}).ok());
      }
      ::usleep(b >= 10 ? 80000 : 0);  // the step's compute
      ASSERT_TRUE(source->unpin(ticket, true).ok());
    }
  }
  EXPECT_GT(stall_s[false], 0.01);
  EXPECT_LT(stall_s[true], 0.5 * stall_s[false]);
}

}  // namespace
}  // namespace kstep
