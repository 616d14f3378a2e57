#define CLOISTER_ISA amx
#include "isa.inc"
