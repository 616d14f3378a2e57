#include "cpu.hpp"

#include <stdexcept>
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace cloister {

#if defined(__x86_64__)
namespace {

struct Registers { unsigned a, b, c, d; };

Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r{};
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
    return r;
}

bool has(unsigned word, int bit) { return word >> bit & 1; }

unsigned long long enabled_state() {
    unsigned a, d;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (unsigned long long)d << 32 | a;
}

// Linux hands out the tile registers on request (Documentation/arch/x86/xstate.rst).
bool ask_for_tiles() {
#if defined(__linux__)
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

}  // namespace

std::vector<const Kernels*> usable_kernels() {
    // bits: Intel SDM volume 2A, CPUID
    Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
    std::vector<const Kernels*> found;
    unsigned long long state = has(basic.c, 27) ? enabled_state() : 0;
    bool ymm = (state & 6) == 6, zmm = (state & 0xe6) == 0xe6;
    bool avx2 = ymm && has(basic.c, 12) && has(basic.c, 29) && has(extended.b, 5);
    bool avx512 = zmm && avx2 && has(extended.b, 16) && has(extended.b, 17) && has(extended.b, 30) && has(extended.b, 31);
    bool avxvnni = avx2 && has(more.a, 4);
    bool vnni = avx512 && has(extended.c, 11);
    bool bf16 = vnni && has(more.a, 5);
    bool amx = bf16 && has(extended.d, 22) && has(extended.d, 24) && has(extended.d, 25) && (state >> 17 & 3) == 3;
    // What the compiler could not make (CMakeLists.txt) is not there to be named.
    if constexpr (CLOISTER_HAS_AMX) if (amx && ask_for_tiles()) found.push_back(&kernels_amx);
    if constexpr (CLOISTER_HAS_BF16) if (bf16) found.push_back(&kernels_bf16);
    if constexpr (CLOISTER_HAS_VNNI) if (vnni) found.push_back(&kernels_vnni);
    if constexpr (CLOISTER_HAS_AVX512) if (avx512) found.push_back(&kernels_avx512);
    if constexpr (CLOISTER_HAS_AVXVNNI) if (avxvnni) found.push_back(&kernels_avxvnni);
    if constexpr (CLOISTER_HAS_AVX2) if (avx2) found.push_back(&kernels_avx2);
    found.push_back(&kernels_scalar);
    return found;
}
#elif defined(__aarch64__)
std::vector<const Kernels*> usable_kernels() {
#if defined(__linux__)
    constexpr unsigned long dot_product = 1ul << 20;  // HWCAP_ASIMDDP (Documentation/arch/arm64/elf_hwcaps.rst)
    if (!(getauxval(AT_HWCAP) & dot_product)) return {&kernels_scalar};
#endif
    if constexpr (CLOISTER_HAS_NEON) return {&kernels_neon, &kernels_scalar};
    else return {&kernels_scalar};
}
#else
std::vector<const Kernels*> usable_kernels() { return {&kernels_scalar}; }
#endif

const Kernels& find_kernels(const std::string& name) {
    std::string names;
    for (const Kernels* kernels : usable_kernels()) {
        if (name == kernels->name) return *kernels;
        names += (names.empty() ? "" : ", ") + std::string(kernels->name);
    }
    throw std::invalid_argument("this processor has the kernels " + names + ", not " + name);
}

}  // namespace cloister
