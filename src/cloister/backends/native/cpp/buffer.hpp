// Memory that a program works in.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cloister {

// Zeros that no compiler leaves out because nobody reads them.
void overwrite(uint8_t* at, size_t size);

// Overwrites what functions that have returned left on the stack of this thread: a kernel's last tile of results.
void overwrite_stack();

// Memory that is aligned, zero at first, and grows. What was in it is overwritten before it is given back.
class Buffer {
public:
    ~Buffer();
    Buffer() = default;
    Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_), used_(other.used_) {
        other.data_ = nullptr;
        other.size_ = other.used_ = 0;
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    // Returns at least `size` bytes; what was there is lost when it grows.
    uint8_t* reserve(size_t size);
    template <class T> T* get() const { return reinterpret_cast<T*>(data_); }
    size_t size() const { return size_; }
    // Bytes from the front that may have been written since `clean`.
    size_t used() const { return used_; }
    // Says that these were overwritten with zeros.
    void clean() { used_ = 0; }

private:
    void release();

    uint8_t* data_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

}  // namespace cloister
