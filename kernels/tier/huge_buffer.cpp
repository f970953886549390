#include "tier/huge_buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

namespace kstep {

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept { *this = std::move(other); }

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

HugeBuffer::~HugeBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

Status HugeBuffer::make(std::size_t bytes, const char* purpose, HugeBuffer* out) {
  HugeBuffer buffer;
  buffer.mapping_bytes_ = bytes + kPageBytes;
  void* mapping = mmap(nullptr, buffer.mapping_bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    return Status::no_space(purpose, "mmap of " + std::to_string(bytes) + " bytes of DRAM failed: " + std::strerror(errno));
  }
  buffer.mapping_ = mapping;
  const std::uintptr_t aligned = (reinterpret_cast<std::uintptr_t>(mapping) + kPageBytes - 1) & ~(kPageBytes - 1);
  buffer.data_ = reinterpret_cast<std::byte*>(aligned);
  buffer.size_ = bytes;
  madvise(buffer.data_, bytes, MADV_HUGEPAGE);  // a kernel without huge pages refuses; the memory works all the same
  *out = std::move(buffer);
  return Status();
}

}  // namespace kstep
