// The row kernels for the instruction set that the whole library is built for (AVX2 on x86-64).
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "compute/cpu.h"
#include "compute/row_kernels.h"

#define KSTEP_KERNELS kBaselineKernels
#define KSTEP_ISA "avx2"
#include "compute/row_kernels_impl.h"
