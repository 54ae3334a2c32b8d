#pragma once

#include "cpu/elements.h"
#include "cuda_runtime_api.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {deepep_moe::BFloat16::store(x)}; }
inline float __bfloat162float(__nv_bfloat16 x) { return deepep_moe::BFloat16::load(x.bits); }
