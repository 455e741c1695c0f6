// A fiber: one CUDA thread's stack and the place where it stopped.
//
// makecontext starts a fiber once; every later switch is _setjmp/_longjmp, which saves no
// signal mask and is several times cheaper than swapcontext. A fiber stays on the operating-
// system thread that started it, so thread_local storage means the same before and after a switch.
#pragma once
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <new>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "range.hpp"

class Fiber {
  public:
    static constexpr size_t STACK_BYTES = 128 << 10;

    Fiber() {
        const size_t page = size_t(sysconf(_SC_PAGESIZE));
        void* memory = mmap(nullptr, STACK_BYTES + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        mprotect(memory, page, PROT_NONE);  // a stack overflow stops here instead of in the next stack
        stack_ = static_cast<char*>(memory) + page;
    }
    Fiber(const Fiber&) = delete;

    // The next resume() starts body from its beginning, whatever the fiber did before.
    void restart(void (*body)()) {
        body_ = body;
        started_ = false;
    }

    // Runs the fiber until it calls yield(), on behalf of the scheduler whose place is kept in home.
    __attribute__((noinline)) void resume(jmp_buf& home) {
        if (_setjmp(home)) return;
        if (started_) _longjmp(here_, 1);
        started_ = true;
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = stack_;
        context.uc_stack.ss_size = STACK_BYTES - colour();
        context.uc_link = nullptr;
        makecontext(&context, body_, 0);
        setcontext(&context);
    }

    __attribute__((noinline)) void yield(jmp_buf& home) {
        if (!_setjmp(here_)) _longjmp(home, 1);
    }

    Range stack() const { return {uint64_t(stack_), STACK_BYTES}; }

  private:
    // Stacks begin at the start of a page. Were they all used from there, the threads of a block would share a few
    // lines of the cache.
    size_t colour() const { return uint64_t(stack_) / 4096 % 32 * 192; }

    char* stack_;
    void (*body_)() = nullptr;
    bool started_ = false;
    jmp_buf here_;
};
