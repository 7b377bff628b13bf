// Threads of a GPU as fibers of a CPU: blocks, warps, barriers and collectives. It knows no instruction.
//
// One operating-system thread runs a block at a time and one fiber of it at a time, so that a run can be
// repeated from its seed, which shuffles the order of the fibers and lets warps run ahead of the others.
// Misuse that hangs or corrupts memory on a GPU fails here, with a sentence that names the block and the
// thread: a collective that part of a warp reaches, a barrier that some threads never reach, an access
// that is not aligned.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace host {

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 128 << 10;
constexpr int MAX_WORDS = 8;  // that a lane brings to a collective

// Save the registers of the running fiber and continue another: the callee-saved ones and the stack.
#if defined(__x86_64__)
extern "C" void host_switch(void **save, void *load);
asm(R"(
.text
.weak host_switch
.type host_switch, @function
host_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size host_switch, . - host_switch
)");
#else
#error "host_switch is written for x86-64"
#endif

struct Copy {
  void *target;
  const void *source;
  bool valid;
};

enum class State { ready, in_warp, in_block, done };

struct Fiber {
  void *stack_pointer;
  char *stack;
  int thread;
  State state;
  int collective;                           // which one it waits in
  unsigned turn;                            // how many it has been in
  std::vector<Copy> copies;                 // issued and not yet in a group
  std::deque<std::vector<Copy>> groups;     // of copies, not yet waited for
};

struct Warp {
  uint32_t words[2][WARP][MAX_WORDS];  // what lanes bring; two, since some may be a collective ahead
  int arrived = 0;
};

struct Block {
  unsigned index, grid, threads;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned char> shared;
  int arrived = 0, alive = 0;
  uint64_t random = 0;
  void *scheduler = nullptr;
  const std::function<void()> *body = nullptr;
  std::string failure;
};

inline thread_local Block *block = nullptr;
inline thread_local Fiber *fiber = nullptr;

inline void to_scheduler() {
  Fiber *self = fiber;
#ifdef __SANITIZE_ADDRESS__
  void *fake = nullptr;
  __sanitizer_start_switch_fiber(self->state == State::done ? nullptr : &fake, nullptr, 0);
#endif
  host_switch(&self->stack_pointer, block->scheduler);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

// Give the launch up; this fiber never continues.
[[noreturn]] inline void fail(const char *what) {
  char text[256];
  snprintf(text, sizeof text, "%s (block %u, thread %d)", what, block->index,
           fiber ? fiber->thread : -1);
  block->failure = text;
  fiber->state = State::done;
  to_scheduler();
  __builtin_unreachable();
}

inline void enter() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  (*block->body)();
  fiber->state = State::done;
  --block->alive;
  to_scheduler();
  __builtin_unreachable();
}

inline void barrier() {
  fiber->state = State::in_block;
  if (++block->arrived < int(block->threads)) return to_scheduler();
  block->arrived = 0;
  for (Fiber &other : block->fibers) {
    if (other.state == State::in_block) other.state = State::ready;
  }
}

// Bring words to a collective of the warp and wait for all lanes; returns what they brought.
inline const uint32_t (*collect(int collective, const uint32_t *words, int count))[MAX_WORDS] {
  Warp &warp = block->warps[fiber->thread / WARP];
  int side = fiber->turn++ & 1;
  memcpy(warp.words[side][fiber->thread % WARP], words, count * sizeof(uint32_t));
  fiber->collective = collective;
  fiber->state = State::in_warp;
  if (++warp.arrived < WARP) {
    to_scheduler();
    return warp.words[side];
  }
  warp.arrived = 0;
  int first = fiber->thread / WARP * WARP;
  for (int lane = 0; lane < WARP; ++lane) {
    Fiber &other = block->fibers[first + lane];
    if (other.collective != collective) fail("lanes of a warp are in different collectives");
    other.state = State::ready;
  }
  return warp.words[side];
}

inline void resume(Fiber &next) {
  fiber = &next;
#ifdef __SANITIZE_ADDRESS__
  void *fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, next.stack, STACK_BYTES);
#endif
  host_switch(&block->scheduler, next.stack_pointer);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

inline void prepare(Block &work, unsigned index, uint64_t seed) {
  work.index = index;
  work.arrived = 0;
  work.alive = int(work.threads);
  work.random = seed * 0x9e3779b97f4a7c15ull + index;
  std::fill(work.shared.begin(), work.shared.end(), 0xff);  // NaN in every float type
  for (Warp &warp : work.warps) warp.arrived = 0;
  for (Fiber &each : work.fibers) {
    each.state = State::ready;
    each.turn = 0;
    each.copies.clear();
    each.groups.clear();
    void **top = reinterpret_cast<void **>(each.stack + STACK_BYTES) - 2;
    *top = reinterpret_cast<void *>(enter);
    each.stack_pointer = top - 6;  // the registers that host_switch pops
  }
}

inline unsigned draw(Block &work, unsigned below) {
  work.random = work.random * 6364136223846793005ull + 1442695040888963407ull;
  return unsigned(work.random >> 33) % below;
}

// Run the fibers of a block to their end. Shuffled, they go in another order in every pass, and most of
// the time one warp goes on alone until it waits for the others: where a barrier is missing, somebody
// reads what is not there yet, or not there any more.
inline void run(Block &work, bool shuffle) {
  constexpr int ALL = -1;
  int alone = ALL;
  std::vector<int> order(work.threads);
  for (unsigned i = 0; i < work.threads; ++i) order[i] = int(i);
  while (work.alive && work.failure.empty()) {
    for (unsigned i = work.threads - 1; shuffle && i > 0; --i) std::swap(order[i], order[draw(work, i + 1)]);
    if (shuffle && alone == ALL && draw(work, 4)) alone = int(draw(work, unsigned(work.warps.size())));
    bool progress = false;
    for (int i : order) {
      if (work.fibers[i].state != State::ready || (alone != ALL && i / WARP != alone)) continue;
      progress = true;
      resume(work.fibers[i]);
      if (!work.failure.empty()) return;
    }
    if (!progress && alone == ALL) {
      work.failure = "some threads never reach a barrier or a collective (block " +
                     std::to_string(work.index) + ")";
    }
    if (!progress) alone = ALL;
  }
}

// Run a kernel's body once for every thread of every block. Returns what went wrong, or nothing.
inline std::string launch(unsigned grid, unsigned threads, size_t shared_bytes, uint64_t seed,
                          unsigned workers, const std::function<void()> &body) {
  if (threads % WARP) return "a block must have whole warps";
  std::atomic<unsigned> next{0};
  std::mutex guard;
  std::string failure;
  auto work = [&] {
    Block mine;
    block = &mine;
    mine.grid = grid;
    mine.threads = threads;
    mine.body = &body;
    mine.fibers.resize(threads);
    mine.warps.resize(threads / WARP);
    mine.shared.resize(shared_bytes + 128);
    size_t bytes = STACK_BYTES * threads;
    void *stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (unsigned i = 0; i < threads; ++i) {
      mine.fibers[i].thread = int(i);
      mine.fibers[i].stack = static_cast<char *>(stacks) + i * STACK_BYTES;
    }
    for (unsigned index; mine.failure.empty() && (index = next++) < grid;) {
      prepare(mine, index, seed);
      run(mine, seed != 0);
    }
    munmap(stacks, bytes);
    if (!mine.failure.empty()) {
      std::lock_guard<std::mutex> lock(guard);
      failure = mine.failure;
      next = grid;
    }
    block = nullptr;
  };
  std::vector<std::thread> threads_of_cpu;
  for (unsigned i = 0; i < std::min(workers, grid); ++i) threads_of_cpu.emplace_back(work);
  for (std::thread &each : threads_of_cpu) each.join();
  return failure;
}

}  // namespace host
