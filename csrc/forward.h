#pragma once
#include "cpu.h"
#include "problem.h"

namespace moeffn {

// y = sum over k of weights[t, k] * expert(x[t]), and h when asked. Returns the name of the kernel that ran.
const char* forward(const Experts& w, const Forward& call, Isa isa);

}  // namespace moeffn
