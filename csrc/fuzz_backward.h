// The backward's share of the fuzz.
#pragma once
#include <random>

#include "cpu.h"

inline void fuzz_backward(moeffn::Isa, std::mt19937_64&) {}
