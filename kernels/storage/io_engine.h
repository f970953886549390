// IoEngine: many reads and writes in flight from one thread.
//
// Purpose: three interchangeable ways to keep a drive busy with the same results: io_uring (probed
// at run time), a pool of threads, and inline (each request done at submit; for tests and tools).
// Ownership: the caller owns requests and buffers and keeps both alive until reaped.
// Thread rule: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/status.h"

namespace kstep {

class File;

enum class IoBackend : std::uint8_t { Auto, Uring, Threads, Inline };

struct IoRequest {
  bool is_write = false;
  File* file = nullptr;
  std::uint64_t offset = 0;
  std::byte* buffer = nullptr;
  std::uint32_t num_bytes = 0;
  std::uint64_t tag = 0;      // for the caller
  std::int64_t result = 0;    // after reaping: bytes done, or a negative errno
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;

  virtual const char* name() const = 0;
  // The bound on requests in flight.
  virtual std::uint32_t depth() const = 0;
  virtual std::uint32_t num_in_flight() const = 0;
  // Starts a request. REQUIRES: num_in_flight() < depth(). May be held back until the next reap().
  virtual Status submit(IoRequest* request) = 0;
  // Waits for at least `min_done` (<= num_in_flight()) and returns up to `max_done` finished requests.
  virtual Status reap(std::size_t min_done, std::size_t max_done, IoRequest** done, std::size_t* num_done) = 0;
};

// Does each request inside submit() through File::read_at / write_at.
std::unique_ptr<IoEngine> make_inline_engine(std::uint32_t depth);
// `num_threads` named threads calling File::read_at / write_at; joined in the destructor.
std::unique_ptr<IoEngine> make_thread_engine(std::uint32_t depth, std::uint32_t num_threads);
// Fails with NotFound, saying why, where the kernel offers no usable io_uring. Never uses SQPOLL: its
// poller starves the submitter on small machines.
Status make_uring_engine(std::uint32_t depth, std::unique_ptr<IoEngine>* out);

// One request done synchronously; sets request->result.
void run_request(IoRequest* request);

}  // namespace kstep
