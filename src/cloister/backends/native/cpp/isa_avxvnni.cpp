#define CLOISTER_ISA avxvnni
#include "isa.inc"
