// A loaded kernel file: where its code and constants lie, and its static shared memory, which is the thread_local
// storage that every operating-system thread has of it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "range.hpp"
#include "simt_abi.h"

#ifndef __APPLE__

#include <link.h>

extern "C" void* __tls_get_addr(void*);  // of the loader

struct KernelFile {
    Range image;
    uint64_t shared_bytes = 0;

    explicit KernelFile(SimtEntry entry) : entry_(entry) {
        dl_iterate_phdr(
            [](dl_phdr_info* info, size_t, void* self) {
                static_cast<KernelFile*>(self)->note(*info);
                return 0;
            },
            this);
    }

    // That of the calling thread, which the loader makes when it is first asked for.
    Range static_shared() const {
        struct {
            unsigned long module, offset;
        } place = {module_, 0};
        return shared_bytes ? Range{uint64_t(__tls_get_addr(&place)), shared_bytes} : Range{};
    }

  private:
    void note(const dl_phdr_info& info) {
        Range found;
        uint64_t storage = 0;
        bool is_kernel_file = false;
        for (int i = 0; i < info.dlpi_phnum; ++i) {
            const auto& segment = info.dlpi_phdr[i];
            if (segment.p_type == PT_TLS) storage = segment.p_memsz;
            if (segment.p_type != PT_LOAD) continue;
            const uint64_t begin = info.dlpi_addr + segment.p_vaddr;
            if (!found.begin) found.begin = begin;
            found.bytes = begin + segment.p_memsz - found.begin;
            is_kernel_file |= Range{begin, segment.p_memsz}.holds(uint64_t(entry_), 1);
        }
        if (!is_kernel_file) return;
        image = found;
        shared_bytes = storage;
        module_ = info.dlpi_tls_modid;
    }

    SimtEntry entry_;
    unsigned long module_ = 0;
};

#else

// The same of macOS: it compiles and links, and has run on no Mac.
#include <dlfcn.h>
#include <mach-o/loader.h>

struct KernelFile {
    Range image;
    uint64_t shared_bytes = 0;

    explicit KernelFile(SimtEntry entry) {
        Dl_info found;
        if (!dladdr(reinterpret_cast<const void*>(entry), &found)) return;
        const auto* header = static_cast<const mach_header_64*>(found.dli_fbase);
        image.begin = uint64_t(header);
        const char* command = reinterpret_cast<const char*>(header + 1);
        for (uint32_t i = 0; i < header->ncmds; ++i) {
            const auto* segment = reinterpret_cast<const segment_command_64*>(command);
            if (segment->cmd == LC_SEGMENT_64) note(*segment);
            command += segment->cmdsize;
        }
        shared_bytes = storage_end_ - std::min(storage_begin_, storage_end_);
    }

    // That of the calling thread: it begins where the first of its variables does.
    Range static_shared() const {
        if (!shared_bytes) return {};
        uint64_t begin = ~0ull;
        for (uint64_t i = 0; i < num_variables_; ++i)
            begin = std::min(begin, uint64_t(variables_[i].address(&variables_[i])));
        return {begin, shared_bytes};
    }

  private:
    // What compiled code calls to find a thread_local variable.
    struct Variable {
        void* (*address)(Variable*);
        uint64_t place[2];  // in a form of the system
    };

    // Segments have addresses from that of the header on.
    void note(const segment_command_64& segment) {
        image.bytes = std::max<uint64_t>(image.bytes, segment.vmaddr + segment.vmsize);
        const auto* sections = reinterpret_cast<const section_64*>(&segment + 1);
        for (uint32_t i = 0; i < segment.nsects; ++i) note(sections[i]);
    }

    void note(const section_64& section) {
        const uint32_t type = section.flags & SECTION_TYPE;
        if (type == S_THREAD_LOCAL_REGULAR || type == S_THREAD_LOCAL_ZEROFILL) {
            storage_begin_ = std::min<uint64_t>(storage_begin_, section.addr);
            storage_end_ = std::max<uint64_t>(storage_end_, section.addr + section.size);
        } else if (type == S_THREAD_LOCAL_VARIABLES) {
            variables_ = reinterpret_cast<Variable*>(image.begin + section.addr);
            num_variables_ = section.size / sizeof(Variable);
        }
    }

    Variable* variables_ = nullptr;
    uint64_t num_variables_ = 0, storage_begin_ = ~0ull, storage_end_ = 0;
};

#endif
