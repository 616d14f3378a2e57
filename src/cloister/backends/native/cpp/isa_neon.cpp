#define CLOISTER_ISA neon
#include "isa.inc"
