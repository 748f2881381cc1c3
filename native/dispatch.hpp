// Which of the compiled instruction sets serves this machine: found out once, or forced by REGARDANT_ISA.
#pragma once

#include <string>
#include <vector>

#include "problem.hpp"

namespace regardant {

// The names of the instruction sets that were compiled, best last; and of those that this machine has.
std::vector<std::string> built();
std::vector<std::string> present();

// The kernels in use, and their name. Throws std::invalid_argument if REGARDANT_ISA names none of the above.
const Kernels& kernels();
std::string instruction_set();

// Use another from now on, in the whole process; throws std::invalid_argument as above.
void choose(const std::string& name);

}  // namespace regardant
