// The io_uring engine, on the bare system calls: the kernel's header is all it needs, so the library
// has no run-time dependency and no build switch.
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "storage/env.h"
#include "storage/io_engine.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#define KSTEP_HAS_URING 1
#endif

namespace kstep {

#ifdef KSTEP_HAS_URING
namespace {

constexpr std::uint32_t kSubmitGroup = 16;  // requests gathered before the kernel is called

unsigned load_acquire(const unsigned* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
void store_release(unsigned* p, unsigned value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }

// One mmap of the ring file; unmapped on destruction.
struct Mapping {
  void* address = MAP_FAILED;
  std::size_t num_bytes = 0;
  bool map(int fd, std::size_t n, std::uint64_t offset) {
    num_bytes = n;
    address = ::mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
    return address != MAP_FAILED;
  }
  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(address) + offset);
  }
  ~Mapping() {
    if (address != MAP_FAILED) ::munmap(address, num_bytes);
  }
};

class UringEngine : public IoEngine {
 public:
  explicit UringEngine(std::uint32_t depth) : depth_(depth) {}
  ~UringEngine() override {
    if (ring_fd_ >= 0) ::close(ring_fd_);
  }

  Status init() {
    const std::string context = "io_uring with depth " + std::to_string(depth_);
    io_uring_params params{};
#ifdef IORING_SETUP_COOP_TASKRUN
    params.flags = IORING_SETUP_COOP_TASKRUN;
#endif
    ring_fd_ = setup(&params);
    if (ring_fd_ < 0 && params.flags != 0) {
      params = {};
      ring_fd_ = setup(&params);
    }
    if (ring_fd_ < 0) return Status::not_found(context, std::string("setup refused: ") + std::strerror(errno));
    if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0) return Status::not_found(context, "kernel before 5.4");
    const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    if (!rings_.map(ring_fd_, sq_bytes > cq_bytes ? sq_bytes : cq_bytes, IORING_OFF_SQ_RING) ||
        !entries_.map(ring_fd_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) {
      return Status::not_found(context, std::string("mapping the rings failed: ") + std::strerror(errno));
    }
    sq_tail_ = rings_.at<unsigned>(params.sq_off.tail);
    sq_mask_ = *rings_.at<unsigned>(params.sq_off.ring_mask);
    sq_array_ = rings_.at<unsigned>(params.sq_off.array);
    cq_head_ = rings_.at<unsigned>(params.cq_off.head);
    cq_tail_ = rings_.at<unsigned>(params.cq_off.tail);
    cq_mask_ = *rings_.at<unsigned>(params.cq_off.ring_mask);
    cqes_ = rings_.at<io_uring_cqe>(params.cq_off.cqes);
    return check_opcodes(context);
  }

  const char* name() const override { return "io_uring"; }
  std::uint32_t depth() const override { return depth_; }
  std::uint32_t num_in_flight() const override { return num_in_flight_; }

  Status submit(IoRequest* request) override {
    const unsigned tail = *sq_tail_;
    const unsigned index = tail & sq_mask_;
    io_uring_sqe* entry = entries_.at<io_uring_sqe>(0) + index;
    std::memset(entry, 0, sizeof(*entry));
    entry->opcode = request->is_write ? IORING_OP_WRITE : IORING_OP_READ;
    entry->fd = request->file->descriptor();
    entry->off = request->offset;
    entry->addr = reinterpret_cast<std::uint64_t>(request->buffer);
    entry->len = request->num_bytes;
    entry->user_data = reinterpret_cast<std::uint64_t>(request);
    sq_array_[index] = index;
    store_release(sq_tail_, tail + 1);
    ++num_unsubmitted_;
    ++num_in_flight_;
    return num_unsubmitted_ >= kSubmitGroup ? enter(0) : Status{};
  }

  Status reap(std::size_t min_done, std::size_t max_done, IoRequest** done, std::size_t* num_done) override {
    *num_done = 0;
    if (num_unsubmitted_ > 0) KSTEP_RETURN_IF_ERROR(enter(0));
    while (true) {
      take_completions(max_done, done, num_done);
      if (*num_done >= min_done || *num_done == max_done) return {};
      KSTEP_RETURN_IF_ERROR(enter(static_cast<unsigned>(min_done - *num_done)));
    }
  }

 private:
  int setup(io_uring_params* params) const {
    return static_cast<int>(::syscall(__NR_io_uring_setup, depth_, params));
  }

  Status check_opcodes(const std::string& context) const {
    constexpr unsigned kMaxOps = 64;
    alignas(io_uring_probe) unsigned char memory[sizeof(io_uring_probe) + kMaxOps * sizeof(io_uring_probe_op)] = {};
    auto* probe = reinterpret_cast<io_uring_probe*>(memory);
    if (::syscall(__NR_io_uring_register, ring_fd_, IORING_REGISTER_PROBE, probe, kMaxOps) < 0) {
      return Status::not_found(context, std::string("probe refused: ") + std::strerror(errno));
    }
    for (unsigned op : {unsigned{IORING_OP_READ}, unsigned{IORING_OP_WRITE}}) {
      if (op > probe->last_op || (probe->ops[op].flags & IO_URING_OP_SUPPORTED) == 0) {
        return Status::not_found(context, "the kernel lacks opcode " + std::to_string(op));
      }
    }
    return {};
  }

  // Hands gathered requests to the kernel and waits for `min_done` completions.
  Status enter(unsigned min_done) {
    while (true) {
      const long rc = ::syscall(__NR_io_uring_enter, ring_fd_, num_unsubmitted_, min_done,
                                min_done > 0 ? IORING_ENTER_GETEVENTS : 0u, nullptr, 0);
      if (rc >= 0) {
        num_unsubmitted_ -= static_cast<std::uint32_t>(rc);
        if (num_unsubmitted_ == 0) return {};
        continue;
      }
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EBUSY) {  // the kernel is short of memory or completions are waiting
        if (num_in_flight_ > num_unsubmitted_) min_done = 1;
        if (load_acquire(cq_tail_) != *cq_head_) return {};
        continue;
      }
      return Status::io("io_uring_enter", std::strerror(errno));
    }
  }

  void take_completions(std::size_t max_done, IoRequest** done, std::size_t* num_done) {
    unsigned head = *cq_head_;
    while (*num_done < max_done && head != load_acquire(cq_tail_)) {
      const io_uring_cqe& completion = cqes_[head & cq_mask_];
      auto* request = reinterpret_cast<IoRequest*>(completion.user_data);
      request->result = completion.res;
      ++head;
      store_release(cq_head_, head);
      --num_in_flight_;
      // A short or interrupted transfer is finished (or failed for good) on the plain path.
      const bool is_retryable = request->result == -EAGAIN || request->result == -EINTR;
      if (is_retryable || (request->result >= 0 && request->result < std::int64_t{request->num_bytes})) {
        run_request(request);
      }
      done[(*num_done)++] = request;
    }
  }

  const std::uint32_t depth_;
  int ring_fd_ = -1;
  Mapping rings_;
  Mapping entries_;
  unsigned* sq_tail_ = nullptr;
  unsigned* sq_array_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
  std::uint32_t num_unsubmitted_ = 0;
  std::uint32_t num_in_flight_ = 0;
};

}  // namespace

Status make_uring_engine(std::uint32_t depth, std::unique_ptr<IoEngine>* out) {
  auto engine = std::make_unique<UringEngine>(depth);
  KSTEP_RETURN_IF_ERROR(engine->init());
  *out = std::move(engine);
  return {};
}

#else

Status make_uring_engine(std::uint32_t, std::unique_ptr<IoEngine>*) {
  return Status::not_found("io_uring", "not offered by the system this was built on");
}

#endif

}  // namespace kstep
