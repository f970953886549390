// The row kernels for AVX-512; entered only where the processor has it. Headers come before the pragma, so that no
// library code is built for AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "compute/cpu.h"
#include "compute/row_kernels.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,prefer-vector-width=512")
#define KSTEP_KERNELS kAvx512Kernels
#define KSTEP_ISA "avx512"
#include "compute/row_kernels_impl.h"
#pragma GCC pop_options
#endif
