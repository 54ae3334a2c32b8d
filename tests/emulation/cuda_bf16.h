#pragma once

#include "cpu/elements.h"
#include "cuda_runtime_api.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {deepep_moe::BFloat16::store(x)}; }
inline float __bfloat162float(__nv_bfloat16 x) { return deepep_moe::BFloat16::load(x.bits); }
