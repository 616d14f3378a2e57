#define CLOISTER_ISA scalar
#include "isa.inc"
