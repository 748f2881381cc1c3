// Which of the compiled instruction sets serves this machine: found out once, or forced by REGARDANT_ISA.
#pragma once

#include <string>
#include <vector>

#include "problem.hpp"

namespace regardant {

// The names of the instruction sets that were compiled and that this machine has, best last.
std::vector<std::string> instruction_sets();

// The kernels in use, and their name. Throws std::runtime_error if REGARDANT_ISA names none of the above.
const Kernels& kernels();
std::string instruction_set();

// Use another from now on, in the whole process; throws std::runtime_error as above.
void choose(const std::string& name);

}  // namespace regardant
