#define CLOISTER_ISA avx512
#include "isa.inc"
