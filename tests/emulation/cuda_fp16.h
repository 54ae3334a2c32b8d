#pragma once

#include "cpu/elements.h"
#include "cuda_runtime_api.h"

struct __half {
    uint16_t bits;
};
using __half_raw = __half;
inline __half __float2half_rn(float x) { return {deepep_moe::Float16::store(x)}; }
inline float __half2float(__half x) { return deepep_moe::Float16::load(x.bits); }
