// A pool of threads that share out numbered tasks. See threads.cpp.
#pragma once

#include <cstdint>
#include <functional>

namespace lowtide {

// Runs task(0) ... task(num_tasks - 1) on so many threads, in any order, and returns when all are done. One caller at a
// time: others wait their turn.
void run_tasks(int num_threads, int64_t num_tasks, const std::function<void(int64_t)>& task);

}  // namespace lowtide
