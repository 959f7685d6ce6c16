// How the copy engine sees a tensor.
#pragma once

#include <cuda.h>

#include "flashonnx/status.h"
#include "kernels/table.h"

namespace flashonnx::sm90 {

// Whether the copy engine can read the tensor in place: it wants strides of whole 16 bytes, none of
// them 0, and at most 2^40 bytes. Data has to be aligned to 16 bytes as well.
bool strides_fit(const flashonnx_tensor& tensor, int64_t batch, int64_t heads, int64_t rows);

// The map of a (batch, heads, rows, dim) tensor of 16-bit elements for boxes of `box_rows` rows and
// `box_features` features, 64 or 32 of them, swizzled over the box's row.
flashonnx_status encode_tensor_map(const flashonnx_tensor& tensor, int64_t batch, int64_t heads,
                                   int64_t rows, int64_t dim, int box_rows, int box_features,
                                   CUtensorMap* map);

// As well of (heads, rows, dim), `dim` a multiple of 64, for boxes of whole rows, `box_features` of
// them: 8 rows of 64 features, the next 64 of the same 8, and so on.
flashonnx_status encode_whole_rows(const flashonnx_tensor& tensor, int64_t heads, int64_t rows,
                                   int64_t dim, int box_rows, int box_features, CUtensorMap* map);

// As well for a mask that depends on the query: elements of one byte or of Q's type, keys side by
// side, strides of 0 where heads or batch entries share it.
bool mask_strides_fit(const flashonnx_tensor& mask, int64_t batch, int64_t heads, int64_t rows);

// Its map, for boxes of `box_rows` queries and as many keys as fill 128 bytes, `box_keys` at most.
flashonnx_status encode_mask_map(const Params& params, int box_rows, int box_keys,
                                 CUtensorMap* map);

}  // namespace flashonnx::sm90
