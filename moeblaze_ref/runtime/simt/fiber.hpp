// A fiber: one CUDA thread's stack and the place where it stopped.
//
// A switch saves the registers that a function has to keep on the stack that it leaves, and takes those of the other
// stack. It needs no makecontext, which macOS lacks. A fiber stays on the operating-system thread that started it, so
// thread_local storage means the same before and after a switch.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

#include "range.hpp"

// Keeps the place where the caller is in *from, and goes on at the place `to`. Its name has no underscore in front, on
// macOS either, where a compiler would add one. x86-64 jumps there: it predicts that a return goes to the last call.
extern "C" void simt_switch(uint64_t** from, uint64_t* to) asm("simt_switch");

#if defined(__x86_64__)
constexpr size_t SAVED_WORDS = 8, RETURN_WORD = 6;  // the last keeps the stack aligned as a call would
asm(R"(
    .text
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
)");
#elif defined(__aarch64__)
constexpr size_t SAVED_WORDS = 20, RETURN_WORD = 11;
asm(R"(
    .text
simt_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#else
#error "the SIMT executor switches stacks on x86-64 and on aarch64 only"
#endif

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

    // The next resume() starts body, which never returns, from its beginning, whatever the fiber did before.
    void restart(void (*body)()) {
        here_ = reinterpret_cast<uint64_t*>(stack_ + STACK_BYTES - colour()) - SAVED_WORDS;
        std::fill_n(here_, SAVED_WORDS, 0);
        here_[RETURN_WORD] = uint64_t(body);
    }

    // Runs the fiber until it calls yield().
    void resume() { simt_switch(&resumed_at_, here_); }
    void yield() { simt_switch(&here_, resumed_at_); }

    Range stack() const { return {uint64_t(stack_), STACK_BYTES}; }

  private:
    // Stacks begin at the start of a page. Were they all used from there, the threads of a block would share a few
    // lines of the cache.
    size_t colour() const { return uint64_t(stack_) / 4096 % 32 * 192; }

    char* stack_;
    uint64_t *here_ = nullptr, *resumed_at_ = nullptr;
};
