// crc32c: the checksum of everything that reaches a disk (Castagnoli polynomial).
//
// Thread rule: pure.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kstep {

// Checksum of `num_bytes` bytes. crc32c("123456789") == 0xe3069283.
std::uint32_t crc32c(const void* data, std::size_t num_bytes);

}  // namespace kstep
