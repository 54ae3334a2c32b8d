// Describes a tensor as native code reads it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "common/types.h"

namespace deepep_moe {

// Holds the fields of a contiguous tensor, or of None, that a call reads.
struct TensorArg {
    uintptr_t address = 0;  // 0 means no memory
    bool is_there = false;
    int num_dims = 0;
    int64_t num_rows = 1, num_columns = 1, element_bytes = 0;  // [num_rows], or [..., num_columns]: rows of all dimensions before
    int64_t inner_rows = 1, num_leading = 1;                   // rows of the last of these dimensions, and the product of the others

    template <class Pointer>
    Pointer as() const {
        return reinterpret_cast<Pointer>(address);
    }
    int64_t row_bytes() const { return num_columns * element_bytes; }

    void set_shape(std::span<const int64_t> shape) {
        is_there = true;
        num_dims = static_cast<int>(shape.size());
        const int last = std::max(0, num_dims - 2);  // index of the last dimension of rows
        if (num_dims > 1) num_columns = shape[num_dims - 1];
        for (int i = 0; i < last; ++i) num_leading *= shape[i];
        if (num_dims > 0) inner_rows = shape[last];
        num_rows = num_leading * inner_rows;
    }
    bool is_empty() const { return num_rows == 0 || num_columns == 0; }
};

}  // namespace deepep_moe
