#define CLOISTER_ISA bf16
#include "isa.inc"
