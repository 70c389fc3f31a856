// Threads of our own rather than OpenMP's: torch brings an OpenMP runtime, often another one, whose threads would fight for
// the same cores; and these keep to the processors that they are given.
//
// Tasks are handed out one by one, so that a thread whose core is busy with something else holds nobody up. Threads are made
// when first needed, wait awake for a moment after each job and then asleep, and end with `lowtide_stop_threads`. After a
// fork the child has none of them: it makes its own when it needs them.
#include "threads.h"

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace lowtide {
namespace {

constexpr std::chrono::microseconds kAwake{50};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

template <class Condition>
void wait_awake(Condition condition) {
  const auto until = std::chrono::steady_clock::now() + kAwake;
  while (!condition() && std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < 32; ++i) relax();
  }
}

class Pool {
 public:
  void run(int num_threads, int64_t num_tasks, const std::function<void(int64_t)>& task) {
    const std::lock_guard<std::mutex> turn(turn_);
    const int64_t num_wanted = num_tasks < num_threads ? num_tasks : num_threads;
    while (static_cast<int64_t>(threads_.size()) < num_wanted && start_one()) {
    }
    if (threads_.empty()) {  // the system allows none
      for (int64_t number = 0; number < num_tasks; ++number) task(number);
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      task_ = &task;
      num_tasks_ = num_tasks;
      next_task_.store(0, std::memory_order_relaxed);
      num_places_ = num_wanted;
      is_done_.store(false, std::memory_order_relaxed);
      job_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    wait_awake([&] { return is_done_.load(std::memory_order_acquire); });
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return is_done_.load(std::memory_order_acquire); });
  }

  void pin(const int* cpus, int num_cpus) {
    const std::lock_guard<std::mutex> turn(turn_);
    cpus_.assign(cpus, cpus + num_cpus);
    for (size_t i = 0; i < threads_.size(); ++i) pin_one(i);
  }

  void stop() {
    const std::lock_guard<std::mutex> turn(turn_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_stopping_ = true;
      job_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    is_stopping_ = false;
  }

  const std::vector<int>& cpus() const { return cpus_; }

  int num_threads() {
    const std::lock_guard<std::mutex> turn(turn_);
    return static_cast<int>(threads_.size());
  }

 private:
  bool start_one() {
    const uint64_t seen = job_.load(std::memory_order_acquire);
    try {
      threads_.emplace_back([this, seen] { work(seen); });
    } catch (const std::system_error&) {  // a limit of the system: those that there are do the work
      return false;
    }
    pin_one(threads_.size() - 1);
    return true;
  }

  // Each may run on all of them: one that is held to a single core waits there while another thread has it.
  void pin_one(size_t index) {
#if defined(__linux__)
    if (cpus_.empty()) return;
    const size_t num_cpus = static_cast<size_t>(*std::max_element(cpus_.begin(), cpus_.end())) + 1;
    cpu_set_t* set = CPU_ALLOC(num_cpus);
    if (set == nullptr) return;
    const size_t num_bytes = CPU_ALLOC_SIZE(num_cpus);
    CPU_ZERO_S(num_bytes, set);
    for (const int cpu : cpus_) CPU_SET_S(static_cast<size_t>(cpu), num_bytes, set);
    // Processors that were taken away since: the thread runs wherever it may.
    pthread_setaffinity_np(threads_[index].native_handle(), num_bytes, set);
    CPU_FREE(set);
#else
    (void)index;
#endif
  }

  void work(uint64_t seen) {
    for (;;) {
      wait_awake([&] { return job_.load(std::memory_order_acquire) != seen; });
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return job_.load(std::memory_order_acquire) != seen; });
      seen = job_.load(std::memory_order_acquire);
      if (is_stopping_) return;
      if (num_places_ == 0) continue;  // enough threads have come, or the job is over
      --num_places_;
      ++num_working_;
      lock.unlock();
      for (;;) {
        const int64_t number = next_task_.fetch_add(1, std::memory_order_relaxed);
        if (number >= num_tasks_) break;
        (*task_)(number);
      }
      lock.lock();
      // Nobody waits for threads that have not come yet: there is nothing left for them.
      num_places_ = 0;
      if (--num_working_ == 0) {
        is_done_.store(true, std::memory_order_release);
        done_.notify_one();
      }
    }
  }

  std::mutex turn_;  // held by the caller for as long as its job runs
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  std::vector<int> cpus_;
  std::atomic<uint64_t> job_{0};
  std::atomic<int64_t> next_task_{0};
  std::atomic<bool> is_done_{false};
  const std::function<void(int64_t)>* task_ = nullptr;
  int64_t num_tasks_ = 0;
  int64_t num_places_ = 0;
  int num_working_ = 0;
  bool is_stopping_ = false;
};

// Never destroyed: its threads may outlive the end of `main`.
alignas(Pool) unsigned char storage[sizeof(Pool)];
std::atomic<Pool*> pool{nullptr};
std::once_flag once;

Pool& the_pool() {
  std::call_once(once, [] {
    pool.store(new (storage) Pool);
    pthread_atfork(nullptr, nullptr, [] {
      std::vector<int> cpus = pool.load()->cpus();
      // Not destroyed first: its threads do not exist here, and its locks may be held by one of them.
      pool.store(new (storage) Pool);
      pool.load()->pin(cpus.data(), static_cast<int>(cpus.size()));
    });
  });
  return *pool.load();
}

}  // namespace

void run_tasks(int num_threads, int64_t num_tasks, const std::function<void(int64_t)>& task) {
  if (num_threads <= 1 || num_tasks <= 1) {
    for (int64_t number = 0; number < num_tasks; ++number) task(number);
    return;
  }
  the_pool().run(num_threads, num_tasks, task);
}

}  // namespace lowtide

extern "C" {

// The threads, those that exist and those to come, keep to these processors. An empty list changes nothing.
__attribute__((visibility("default"))) void lowtide_pin_threads(const int* cpus, int num_cpus) {
  lowtide::the_pool().pin(cpus, num_cpus);
}

// How many threads there are now.
__attribute__((visibility("default"))) int lowtide_num_threads() { return lowtide::the_pool().num_threads(); }

// Waits for the running job and ends all threads. A later job makes new ones.
__attribute__((visibility("default"))) void lowtide_stop_threads() { lowtide::the_pool().stop(); }
}
