// What the memory can do: copies one array to another around the cache, on some threads, and prints bytes moved per second.
// Bytes are counted once read and once written. Usage: stream_copy <threads> <bytes per array>
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::size_t num_threads = std::strtoul(argv[1], nullptr, 10), bytes = std::strtoul(argv[2], nullptr, 10);
  char* arrays[2];
  for (char*& array : arrays) {
    array = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (array == MAP_FAILED) return 1;
    madvise(array, bytes, MADV_HUGEPAGE);
    std::fill(array, array + bytes, 1);
  }
  std::vector<double> rates;
  for (int round = 0; round < 9; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < num_threads; ++t) {
      threads.emplace_back([&, t] {
        const std::size_t from = bytes * t / num_threads / 64 * 64, to = bytes * (t + 1) / num_threads / 64 * 64;
        for (std::size_t at = from; at < to; at += 32) {
          _mm256_stream_si256(reinterpret_cast<__m256i*>(arrays[1] + at),
                              _mm256_load_si256(reinterpret_cast<const __m256i*>(arrays[0] + at)));
        }
        _mm_sfence();
      });
    }
    for (std::thread& thread : threads) thread.join();
    rates.push_back(2.0 * static_cast<double>(bytes) / std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(rates.begin(), rates.end());
  std::printf("%.0f\n", rates[rates.size() / 2]);
  return 0;
}
