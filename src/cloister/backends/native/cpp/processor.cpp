#include "processor.hpp"

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

std::vector<std::string> runnable_sets() {
    // bits: Intel SDM volume 2A, CPUID
    Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
    unsigned long long state = has(basic.c, 27) ? enabled_state() : 0;
    bool ymm = (state & 6) == 6, zmm = (state & 0xe6) == 0xe6;
    bool avx2 = ymm && has(basic.c, 12) && has(basic.c, 29) && has(extended.b, 5);
    bool avx512 = zmm && avx2 && has(extended.b, 16) && has(extended.b, 17) && has(extended.b, 30) && has(extended.b, 31);
    bool avxvnni = avx2 && has(more.a, 4);
    bool vnni = avx512 && has(extended.c, 11);
    bool bf16 = vnni && has(more.a, 5);
    bool amx = bf16 && has(extended.d, 22) && has(extended.d, 24) && has(extended.d, 25) && (state >> 17 & 3) == 3;
    std::vector<std::string> found;
    if (amx && ask_for_tiles()) found.push_back("amx");
    if (bf16) found.push_back("bf16");
    if (vnni) found.push_back("vnni");
    if (avx512) found.push_back("avx512");
    if (avxvnni) found.push_back("avxvnni");
    if (avx2) found.push_back("avx2");
    found.push_back("scalar");
    return found;
}
#elif defined(__aarch64__)
std::vector<std::string> runnable_sets() {
#if defined(__linux__)
    constexpr unsigned long dot_product = 1ul << 20;  // HWCAP_ASIMDDP (Documentation/arch/arm64/elf_hwcaps.rst)
    if (!(getauxval(AT_HWCAP) & dot_product)) return {"scalar"};
#endif
    return {"neon", "scalar"};
}
#else
std::vector<std::string> runnable_sets() { return {"scalar"}; }
#endif

}  // namespace cloister
