// What the host does with a broken promise: an exception ends the job, and its text is the result.
#pragma once

#include <stdexcept>
#include <string>

inline void check(bool promise, const std::string& broken) {
  if (!promise) throw std::runtime_error(broken);
}
