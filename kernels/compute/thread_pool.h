// A small pool of worker threads for the compute kernels.
//
// Why not OpenMP: the torch wheel carries its own copy of the OpenMP runtime, so a second one in this library would
// keep a second set of spinning threads on the same cores.
//
// Contract: `parallel_tasks(threads, n, f)` calls f(i) once for each i in [0, n), on up to `threads` threads, the calling
// one included, and returns when all calls have returned. Which thread runs which task is not defined; callers make
// each task's result independent of it. f must not throw. A nested or concurrent call runs on its calling thread alone.
// Workers are named "kstep-cpu", are joined at process exit, and are started anew in a forked child.
#pragma once

#include <cstddef>
#include <type_traits>

namespace kstep {

using TaskFunction = void (*)(void* context, std::size_t task);

void run_tasks(int num_threads, std::size_t num_tasks, TaskFunction function, void* context);

template <typename Function>
void parallel_tasks(int num_threads, std::size_t num_tasks, Function&& function) {
  if (num_threads <= 1 || num_tasks <= 1) {
    for (std::size_t task = 0; task < num_tasks; ++task) function(task);
    return;
  }
  auto call = [](void* context, std::size_t task) { (*static_cast<std::remove_reference_t<Function>*>(context))(task); };
  run_tasks(num_threads, num_tasks, call, &function);
}

}  // namespace kstep
