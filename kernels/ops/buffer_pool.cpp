#include "ops/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <mutex>
#include <vector>

#include "tier/huge_buffer.h"

namespace kstep {
namespace {

constexpr std::size_t kMinBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxFree = 4;

class BufferPool {
 public:
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
    if (free_.size() == kMaxFree) free_.erase(free_.begin());  // the one that waited longest
    free_.push_back(std::move(buffer));
  }

 private:
  std::mutex mutex_;
  std::vector<HugeBuffer> free_;
};

BufferPool& pool() {
  static BufferPool* instance = new BufferPool;  // tensors may outlive static destruction
  return *instance;
}

}  // namespace

at::Tensor empty_output(at::IntArrayRef sizes) {
  std::size_t bytes = sizeof(float);
  for (int64_t size : sizes) bytes *= static_cast<std::size_t>(size);
  const auto options = at::TensorOptions().dtype(at::kFloat);
  if (bytes < kMinBytes) return at::empty(sizes, options);
  auto* buffer = new HugeBuffer(pool().take(bytes));
  return at::from_blob(
      buffer->data(), sizes,
      [buffer](void*) {
        pool().give_back(std::move(*buffer));
        delete buffer;
      },
      options);
}

}  // namespace kstep
