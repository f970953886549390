// The row store itself, the drive's own limit, one file updated in place, and one mapped file.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <thread>

#include "backend.h"
#include "storage/row_store.h"

namespace kstep::bench {
namespace {

constexpr std::uint64_t kLoadChunk = 65536;
constexpr std::uint32_t kDepth = 128;
constexpr std::uint64_t kSector = 512;

Status run_requests(IoEngine* engine, std::vector<IoRequest>* requests) {
  std::size_t next = 0;
  std::vector<IoRequest*> done(engine->depth());
  while (next < requests->size() || engine->num_in_flight() > 0) {
    while (next < requests->size() && engine->num_in_flight() < engine->depth()) {
      KSTEP_RETURN_IF_ERROR(engine->submit(&(*requests)[next++]));
    }
    std::size_t num_done = 0;
    KSTEP_RETURN_IF_ERROR(engine->reap(std::max<std::size_t>(1, engine->num_in_flight() / 4), done.size(), done.data(), &num_done));
    for (std::size_t i = 0; i < num_done; ++i) {
      if (done[i]->result != std::int64_t{done[i]->num_bytes}) {
        return Status::io("benchmark transfer", "result " + std::to_string(done[i]->result) + " of " + std::to_string(done[i]->num_bytes) + " bytes");
      }
    }
  }
  return {};
}

class RowStoreBackend : public Backend {
 public:
  RowStoreBackend(const Shape& shape, const std::string& folder) : shape_(shape) {
    options_.paths = {folder};
    TableSpec table;
    table.name = "t";
    table.num_rows = shape.num_rows;
    table.dim = shape.payload_bytes / 4;
    status_ = RecordSchema::make({{"weight", DType::F32, table.dim}}, &table.schema);
    options_.tables = {table};
  }

  Status load() override {
    KSTEP_RETURN_IF_ERROR(status_);
    KSTEP_RETURN_IF_ERROR(RowStore::open(options_, &store_));
    std::vector<std::byte> payload(shape_.payload_bytes);
    for (std::uint64_t row = 0; row < shape_.num_rows; ++row) {
      if (row % kLoadChunk == 0) KSTEP_RETURN_IF_ERROR(store_->begin_batch(kLoadChunk * shape_.payload_bytes));
      fill_payload(row, shape_.payload_bytes, payload.data());
      KSTEP_RETURN_IF_ERROR(store_->append(store_->table(0), row, payload.data()));
    }
    return store_->flush();
  }

  Status read(const std::vector<std::uint64_t>& rows, const std::vector<std::byte*>& payloads) override {
    TableState* table = store_->table(0);
    reads_.clear();
    for (std::size_t i = 0; i < rows.size(); ++i) reads_.push_back({kNoSlot, table, rows[i], payloads[i]});
    return store_->read(reads_.data(), reads_.size());
  }

  Status write(const std::vector<std::uint64_t>& rows, const std::vector<std::byte*>& payloads) override {
    KSTEP_RETURN_IF_ERROR(store_->begin_batch(rows.size() * shape_.payload_bytes));
    TableState* table = store_->table(0);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (i + kIndexAhead < rows.size()) table->index.prefetch(rows[i + kIndexAhead]);
      KSTEP_RETURN_IF_ERROR(store_->append(table, rows[i], payloads[i]));
    }
    return store_->end_batch();
  }

  std::string describe() override {
    std::string text = "{\"io_backend\": \"" + std::string(store_->io_backend()) + "\"";
    for (const auto& item : store_->counters()) text += ", \"" + item.first + "\": " + std::to_string(item.second);
    return text + "}";
  }

 private:
  Shape shape_;
  StoreOptions options_;
  Status status_;
  std::unique_ptr<RowStore> store_;
  std::vector<ReadRow> reads_;
};

// One file of equal places. The drive's limit packs as the row store does; in-place rows start at sectors.
class FileBackend : public Backend {
 public:
  FileBackend(const Shape& shape, const std::string& folder, bool is_limit) : shape_(shape), path_(folder + "/rows.bin"), is_limit_(is_limit) {
    layout_ = RecordLayout::for_payload(shape.payload_bytes, 64u << 20);
    place_bytes_ = (shape.payload_bytes + kSector - 1) / kSector * kSector;
  }

  Status load() override {
    Env& env = Env::posix();
    KSTEP_RETURN_IF_ERROR(env.open(path_, OpenMode::Create, true, &file_));
    KSTEP_RETURN_IF_ERROR(env.new_engine(IoBackend::Auto, kDepth, &engine_));
    const std::uint64_t total = place(shape_.num_rows - 1) + (std::uint64_t{layout_.unit_bytes} + place_bytes_);
    AlignedBuffer buffer(8u << 20);
    std::memset(buffer.data(), 1, buffer.size());
    for (std::uint64_t at = 0; at < total; at += buffer.size()) {
      if (!is_limit_) {
        for (std::uint64_t i = 0; i < buffer.size() / place_bytes_; ++i) {
          fill_payload(at / place_bytes_ + i, shape_.payload_bytes, buffer.data() + i * place_bytes_);
        }
      }
      const std::uint64_t step = is_limit_ ? buffer.size() : buffer.size() / place_bytes_ * place_bytes_;
      KSTEP_RETURN_IF_ERROR(file_->write_at(at, buffer.data(), step));
      at -= buffer.size() - step;
    }
    return file_->sync();
  }

  Status read(const std::vector<std::uint64_t>& rows, const std::vector<std::byte*>& payloads) override {
    make_requests(rows, false);
    KSTEP_RETURN_IF_ERROR(run_requests(engine_.get(), &requests_));
    if (is_limit_) return {};
    for (std::size_t i = 0; i < rows.size(); ++i) std::memcpy(payloads[i], requests_[i].buffer, shape_.payload_bytes);
    return {};
  }

  Status write(const std::vector<std::uint64_t>& rows, const std::vector<std::byte*>& payloads) override {
    if (is_limit_) return write_in_a_row(rows.size());
    make_requests(rows, true);
    for (std::size_t i = 0; i < rows.size(); ++i) std::memcpy(requests_[i].buffer, payloads[i], shape_.payload_bytes);
    return run_requests(engine_.get(), &requests_);
  }

 private:
  std::uint64_t place(std::uint64_t row) const {
    if (!is_limit_) return row * place_bytes_;
    return layout_.offset_of(static_cast<std::uint32_t>(row)) - kSegmentHeaderBytes;
  }

  void make_requests(const std::vector<std::uint64_t>& rows, bool is_write) {
    const std::uint64_t stride = (shape_.payload_bytes + kRecordTailBytes + 3 * kSector) / kSector * kSector;
    if (staging_.size() < rows.size() * stride) staging_ = AlignedBuffer(rows.size() * stride);
    requests_.clear();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::uint64_t begin = place(rows[i]) / kSector * kSector;
      const std::uint64_t end = is_limit_ ? (place(rows[i]) + layout_.record_bytes + kSector - 1) / kSector * kSector : begin + place_bytes_;
      IoRequest request;
      request.is_write = is_write;
      request.file = file_.get();
      request.offset = begin;
      request.num_bytes = static_cast<std::uint32_t>(end - begin);
      request.buffer = staging_.data() + i * stride;
      requests_.push_back(request);
    }
  }

  Status write_in_a_row(std::size_t num_rows) {
    constexpr std::uint64_t kPiece = 1u << 20;
    const std::uint64_t total = (num_rows * shape_.payload_bytes + kPiece - 1) / kPiece * kPiece;
    if (staging_.size() < total) staging_ = AlignedBuffer(total);
    requests_.clear();
    for (std::uint64_t at = 0; at < total; at += kPiece) {
      IoRequest request;
      request.is_write = true;
      request.file = file_.get();
      request.offset = at;
      request.num_bytes = kPiece;
      request.buffer = staging_.data() + at;
      requests_.push_back(request);
    }
    return run_requests(engine_.get(), &requests_);
  }

  Shape shape_;
  std::string path_;
  bool is_limit_;
  RecordLayout layout_;
  std::uint64_t place_bytes_ = 0;
  std::unique_ptr<File> file_;
  std::unique_ptr<IoEngine> engine_;
  AlignedBuffer staging_;
  std::vector<IoRequest> requests_;
};

class MmapBackend : public Backend {
 public:
  MmapBackend(const Shape& shape, const std::string& folder) : shape_(shape), path_(folder + "/mapped.bin") {
    rows_per_page_ = std::max<std::uint64_t>(1, kPageBytes / shape.payload_bytes);
    page_bytes_ = (shape.payload_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    num_bytes_ = (shape.num_rows + rows_per_page_ - 1) / rows_per_page_ * page_bytes_;
  }
  ~MmapBackend() override {
    if (map_ != nullptr) ::munmap(map_, num_bytes_);
    if (fd_ >= 0) ::close(fd_);
  }

  Status load() override {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    std::vector<std::byte> page(page_bytes_);
    for (std::uint64_t row = 0; row < shape_.num_rows; row += rows_per_page_) {
      for (std::uint64_t i = 0; i < rows_per_page_; ++i) fill_payload(row + i, shape_.payload_bytes, page.data() + i * shape_.payload_bytes);
      const auto at = static_cast<off_t>(row / rows_per_page_ * page_bytes_);
      if (::pwrite(fd_, page.data(), page.size(), at) != static_cast<ssize_t>(page.size())) return Status::io(path_, std::strerror(errno));
    }
    void* map = ::mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (map == MAP_FAILED) return Status::io(path_, std::strerror(errno));
    map_ = static_cast<std::byte*>(map);
    ::madvise(map_, num_bytes_, MADV_RANDOM);
    ::fsync(fd_);
    return drop_page_cache();
  }

  Status read(const std::vector<std::uint64_t>& rows, const std::vector<std::byte*>& payloads) override {
    in_threads(rows.size(), [&](std::size_t i) { std::memcpy(payloads[i], at(rows[i]), shape_.payload_bytes); });
    return {};
  }

  Status write(const std::vector<std::uint64_t>& rows, const std::vector<std::byte*>& payloads) override {
    in_threads(rows.size(), [&](std::size_t i) { std::memcpy(at(rows[i]), payloads[i], shape_.payload_bytes); });
    const unsigned flags = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    if (::sync_file_range(fd_, 0, 0, flags) != 0) return Status::io(path_, std::strerror(errno));
    return {};
  }

  Status drop_page_cache() override {
    ::madvise(map_, num_bytes_, MADV_DONTNEED);
    ::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
    return {};
  }

 private:
  static constexpr std::size_t kThreads = 16;

  std::byte* at(std::uint64_t row) const { return map_ + row / rows_per_page_ * page_bytes_ + row % rows_per_page_ * shape_.payload_bytes; }

  template <typename Work>
  static void in_threads(std::size_t count, Work work) {
    std::array<std::thread, kThreads> threads;
    for (std::size_t t = 0; t < kThreads; ++t) {
      threads[t] = std::thread([=] {
        for (std::size_t i = count * t / kThreads; i < count * (t + 1) / kThreads; ++i) work(i);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  Shape shape_;
  std::string path_;
  int fd_ = -1;
  std::byte* map_ = nullptr;
  std::uint64_t rows_per_page_ = 1;
  std::uint64_t page_bytes_ = 0;
  std::uint64_t num_bytes_ = 0;
};

}  // namespace

void fill_payload(std::uint64_t row, std::uint32_t payload_bytes, std::byte* out) {
  std::memset(out, 0, payload_bytes);
  std::memcpy(out, &row, std::min<std::size_t>(sizeof(row), payload_bytes));
}

std::unique_ptr<Backend> make_row_store(const Shape& shape, const std::string& folder) { return std::make_unique<RowStoreBackend>(shape, folder); }
std::unique_ptr<Backend> make_device_limit(const Shape& shape, const std::string& folder) { return std::make_unique<FileBackend>(shape, folder, true); }
std::unique_ptr<Backend> make_in_place(const Shape& shape, const std::string& folder) { return std::make_unique<FileBackend>(shape, folder, false); }
std::unique_ptr<Backend> make_mmap(const Shape& shape, const std::string& folder) { return std::make_unique<MmapBackend>(shape, folder); }

}  // namespace kstep::bench
