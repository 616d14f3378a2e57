#define CLOISTER_ISA vnni
#include "isa.inc"
