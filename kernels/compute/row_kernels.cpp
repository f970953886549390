#include "compute/row_kernels.h"

#include <atomic>
#include <cstring>

namespace kstep {

extern const RowKernels kBaselineKernels;
#if defined(__x86_64__)
extern const RowKernels kAvx512Kernels;
#endif

namespace {

bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

const RowKernels* widest() {
#if defined(__x86_64__)
  if (has_avx512()) return &kAvx512Kernels;
#endif
  return &kBaselineKernels;
}

std::atomic<const RowKernels*> selected{nullptr};

}  // namespace

const RowKernels& row_kernels() {
  const RowKernels* kernels = selected.load(std::memory_order_acquire);
  if (kernels == nullptr) {
    kernels = widest();
    selected.store(kernels, std::memory_order_release);
  }
  return *kernels;
}

bool select_isa(const char* isa) {
  const RowKernels* kernels = nullptr;
  if (std::strcmp(isa, "auto") == 0) {
    kernels = widest();
  } else if (std::strcmp(isa, kBaselineKernels.isa) == 0) {
    kernels = &kBaselineKernels;
  } else if (std::strcmp(isa, widest()->isa) == 0) {
    kernels = widest();
  }
  if (kernels == nullptr) return false;
  selected.store(kernels, std::memory_order_release);
  return true;
}

}  // namespace kstep
