// Instead of CUDA's header of this name, whose templates only nvcc understands.
#pragma once

#include "emulator.h"
