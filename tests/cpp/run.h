// The runtime's part, on the current CUDA device.
#pragma once

#include <istream>
#include <ostream>

#include "plugin.h"

// Runs the restored plugin on every set of shapes that is to be run, reading inputs and writing
// outputs. First as the first launch of a context and inside a CUDA graph; then each set in a
// context and on a stream of its own, at the same time; then at other addresses; then all sets in
// one context. All must give the same bits, and nothing may be written beside the outputs.
void run(const Plugin& plugin, const Plan& plan, const Job& job, std::istream& inputs,
         std::ostream& outputs, bool guards);
