#include "cpu.hpp"

#include <stdexcept>

#include "processor.hpp"

namespace cloister {

// What was not compiled (CMakeLists.txt) is not there to be named.
std::vector<const Kernels*> compiled_kernels() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    if constexpr (CLOISTER_HAS_AMX) found.push_back(&kernels_amx);
    if constexpr (CLOISTER_HAS_BF16) found.push_back(&kernels_bf16);
    if constexpr (CLOISTER_HAS_VNNI) found.push_back(&kernels_vnni);
    if constexpr (CLOISTER_HAS_AVX512) found.push_back(&kernels_avx512);
    if constexpr (CLOISTER_HAS_AVXVNNI) found.push_back(&kernels_avxvnni);
    if constexpr (CLOISTER_HAS_AVX2) found.push_back(&kernels_avx2);
#elif defined(__aarch64__)
    if constexpr (CLOISTER_HAS_NEON) found.push_back(&kernels_neon);
#endif
    found.push_back(&kernels_scalar);
    return found;
}

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> found;
    for (const std::string& name : runnable_sets())
        for (const Kernels* kernels : compiled_kernels())
            if (name == kernels->name) found.push_back(kernels);
    return found;
}

const Kernels& find_kernels(const std::string& name) {
    std::string names;
    for (const Kernels* kernels : usable_kernels()) {
        if (name == kernels->name) return *kernels;
        names += (names.empty() ? "" : ", ") + std::string(kernels->name);
    }
    throw std::invalid_argument("this processor has the kernels " + names + ", not " + name);
}

}  // namespace cloister
