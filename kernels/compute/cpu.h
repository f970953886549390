// The two processor hints that the kernels use, with no effect on any result.
#pragma once

#include <cstddef>

namespace kstep {

constexpr std::size_t kCacheLineBytes = 64;

inline void spin_wait() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace kstep
