#include "ops/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <mutex>
#include <vector>

#include "tier/huge_buffer.h"

namespace kstep {
namespace {

constexpr std::size_t kMinBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxFreeOutputs = 4, kMaxFreeMessages = 32, kMaxFreeContributions = 64;

class BufferPool {
 public:
  explicit BufferPool(std::size_t max_free) : max_free_(max_free) {}

  HugeBuffer take(std::size_t bytes) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (std::size_t i = 0; i < free_.size(); ++i) {
        if (free_[i].size() < bytes || free_[i].size() > 2 * bytes + HugeBuffer::kPageBytes) continue;
        HugeBuffer buffer = std::move(free_[i]);
        free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
        return buffer;
      }
    }
    HugeBuffer buffer;
    const std::size_t rounded = (bytes + HugeBuffer::kPageBytes - 1) / HugeBuffer::kPageBytes * HugeBuffer::kPageBytes;
    const Status status = HugeBuffer::make(rounded, "output of a lookup", &buffer);
    TORCH_CHECK(status.ok(), status.message());
    return buffer;
  }

  void give_back(HugeBuffer buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.size() == max_free_) free_.erase(free_.begin());  // the one that waited longest
    free_.push_back(std::move(buffer));
  }

 private:
  const std::size_t max_free_;
  std::mutex mutex_;
  std::vector<HugeBuffer> free_;
};

BufferPool& output_pool() {
  static BufferPool* instance = new BufferPool(kMaxFreeOutputs);  // tensors may outlive static destruction
  return *instance;
}

BufferPool& contributions_pool() {
  static BufferPool* instance = new BufferPool(kMaxFreeContributions);
  return *instance;
}

BufferPool& message_pool() {
  static BufferPool* instance = new BufferPool(kMaxFreeMessages);
  return *instance;
}

at::Tensor recycled(BufferPool& pool, at::IntArrayRef sizes, std::size_t bytes, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype);
  if (bytes < kMinBytes) return at::empty(sizes, options);
  auto* buffer = new HugeBuffer(pool.take(bytes));
  return at::from_blob(
      buffer->data(), sizes,
      [buffer, &pool](void*) {
        pool.give_back(std::move(*buffer));
        delete buffer;
      },
      options);
}

std::size_t num_float_bytes(at::IntArrayRef sizes) {
  std::size_t bytes = sizeof(float);
  for (int64_t size : sizes) bytes *= static_cast<std::size_t>(size);
  return bytes;
}

}  // namespace

at::Tensor empty_output(at::IntArrayRef sizes) { return recycled(output_pool(), sizes, num_float_bytes(sizes), at::kFloat); }

at::Tensor empty_contributions(at::IntArrayRef sizes) {
  return recycled(contributions_pool(), sizes, num_float_bytes(sizes), at::kFloat);
}

at::Tensor empty_message(int64_t num_bytes) {
  return recycled(message_pool(), {num_bytes}, static_cast<std::size_t>(num_bytes), at::kByte);
}

}  // namespace kstep
