#define CLOISTER_ISA avx2
#include "isa.inc"
