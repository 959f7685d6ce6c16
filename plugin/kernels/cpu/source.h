// Where the keys of a batch entry and key head stand: rows of one tensor, or of pages.
#pragma once

#include "simd.h"
#include "task.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

template <typename T>
struct Source {
  const flashonnx_attention_params& params;
  const T* keys;  // of key 0; with pages: of this head, in page 0
  const T* values;
  const int32_t* table;  // the batch entry's row of the block table, or null

  // Visits keys [begin, end) of the tile that starts at key `first`, in runs that lie in one page:
  // visit(n, count, key row or null where there is no page, value row).
  template <typename Visit>
  void visit_runs(int64_t first, int begin, int end, Visit visit) const {
    if (table == nullptr) {
      visit(begin, end - begin, keys + (first + begin) * params.k.stride[2],
            values + (first + begin) * params.v.stride[2]);
      return;
    }
    for (int n = begin; n < end;) {
      const int64_t index = (first + n) / params.page_size, slot = (first + n) % params.page_size;
      const int64_t page = table[index * params.block_table.stride[1]];
      const int64_t rest = params.page_size - slot;
      const int count = rest < end - n ? static_cast<int>(rest) : end - n;
      if (page < 0 || page >= params.num_pages) {
        visit(n, count, static_cast<const T*>(nullptr), static_cast<const T*>(nullptr));
      } else {
        visit(n, count, keys + page * params.k.stride[0] + slot * params.k.stride[2],
              values + page * params.v.stride[0] + slot * params.v.stride[2]);
      }
      n += count;
    }
  }
};

// Which columns of a tile have no page.
struct Absent {
  bool any = false;
  bool column[kKeyTile];

  void clear() { any = false; }
  void add(int begin, int count) {
    if (!any) __builtin_memset(column, 0, sizeof column);
    any = true;
    __builtin_memset(column + begin, 1, count);
  }
};

// What stands in for their rows.
alignas(64) inline constexpr float kZeros[kMaxHeadDim] = {};

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA
