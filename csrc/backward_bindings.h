// What the backward adds to the Python module.
#pragma once
#include <nanobind/nanobind.h>

inline void bind_backward(nanobind::module_&) {}
