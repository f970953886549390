// Backend: a place for fixed-size rows on a drive, as the row store benchmark sees its contenders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"

namespace kstep::bench {

struct Shape {
  std::uint64_t num_rows = 0;
  std::uint32_t payload_bytes = 0;  // dim x 4 x (weight, m, v)
};

class Backend {
 public:
  virtual ~Backend() = default;
  // Writes every row once. Row r starts with the 8 bytes of r.
  virtual Status load() = 0;
  // REQUIRES: rows unique. payloads[i] takes or gives row rows[i].
  virtual Status read(const std::vector<std::uint64_t>& rows, const std::vector<std::byte*>& payloads) = 0;
  virtual Status write(const std::vector<std::uint64_t>& rows, const std::vector<std::byte*>& payloads) = 0;
  // Untimed, after each measurement: gives back page cache, so that all contenders have the same DRAM.
  virtual Status drop_page_cache() { return {}; }
  virtual std::string describe() { return "{}"; }  // JSON
};

std::unique_ptr<Backend> make_row_store(const Shape& shape, const std::string& folder);
// Random reads of the windows the row store would read, and sequential writes of the same bytes, unverified.
std::unique_ptr<Backend> make_device_limit(const Shape& shape, const std::string& folder);
// One file, row r at r x payload rounded up to 512 bytes, updated in place.
std::unique_ptr<Backend> make_in_place(const Shape& shape, const std::string& folder);
// One mapped file with random-access advice, 16 threads faulting.
std::unique_ptr<Backend> make_mmap(const Shape& shape, const std::string& folder);
// RocksDB, 32 shards and threads, FBGEMM's options with bloom filters. Null where it is not built in.
std::unique_ptr<Backend> make_rocksdb(const Shape& shape, const std::string& folder);

// A recognisable payload.
void fill_payload(std::uint64_t row, std::uint32_t payload_bytes, std::byte* out);

}  // namespace kstep::bench
