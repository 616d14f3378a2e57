#include "buffer.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace cloister {

namespace {

constexpr size_t huge_page = size_t(2) << 20;

// Zeros straight from the system: what grows step by step would leave holes in the allocator's heap. Large ones begin where a huge
// page may.
uint8_t* map_zeros(size_t size) {
    size_t slack = size >= huge_page ? huge_page : 0;
    void* mapped = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    uint8_t* data = static_cast<uint8_t*>(mapped);
    if (!slack) return data;
    size_t before = (huge_page - reinterpret_cast<uintptr_t>(data) % huge_page) % huge_page;
    if (before) munmap(data, before);
    if (before < slack) munmap(data + before + size, slack - before);
#if defined(MADV_HUGEPAGE)
    madvise(data + before, size, MADV_HUGEPAGE);
#endif
    return data + before;
}

}  // namespace

void overwrite(uint8_t* at, size_t size) {
    memset(at, 0, size);
    __asm__ volatile("" : : "r"(at) : "memory");
}

[[gnu::noinline]] void overwrite_stack() {
    uint8_t below[size_t(1) << 16];  // several times what the deepest kernel takes
    overwrite(below, sizeof below);
}

Buffer::~Buffer() { release(); }

void Buffer::release() {
    if (!data_) return;
    overwrite(data_, used_);
    munmap(data_, size_);
    data_ = nullptr;
    size_ = used_ = 0;
}

uint8_t* Buffer::reserve(size_t size) {
    if (size > size_) {
        release();
        static const size_t page = size_t(sysconf(_SC_PAGESIZE));
        size_t whole = (size + page - 1) / page * page;
        data_ = map_zeros(whole);
        size_ = whole;
    }
    used_ = std::max(used_, size);
    return data_;
}

}  // namespace cloister
