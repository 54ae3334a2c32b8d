// The fp8 products as a library that fp8_products.py loads: it needs no build of deepep_moe.
//
//   nvcc -std=c++20 -O3 -fmad=false -Icsrc -gencode=arch=compute_90a,code=sm_90a -shared -Xcompiler=-fPIC \
//       -o wheels/libfp8_products.so benchmarks/probes/fp8_products_library.cu csrc/cuda/fp8_products.cu
#include <exception>
#include <string>

#include "cuda/launch.h"

namespace {

std::string error;

template <auto kLaunch>
int started(const deepep_moe::GpuFp8ProductParams& params, void* stream) {
    try {
        kLaunch(params, stream);
        return 0;
    } catch (const std::exception& what) {
        error = what.what();
        return 1;
    }
}

}  // namespace

extern "C" {

const char* fp8_error() { return error.c_str(); }

int fp8_product(const std::byte* x, const float* x_scales, const std::byte* w, const float* w_scales, const int* group_ends, void* y,
                int64_t num_rows, int n, int k, int num_groups, void* stream) {
    return started<deepep_moe::launch_fp8_product>({num_rows, n, k, num_groups, x, w, x_scales, w_scales, group_ends, y, false}, stream);
}

int fp8_weight_gradient(const std::byte* dy, const float* dy_scales, const std::byte* x, const float* x_scales, const int* group_ends,
                        void* out, int64_t num_rows, int n, int k, int num_groups, int is_fp32, void* stream) {
    return started<deepep_moe::launch_fp8_weight_gradient>(
        {num_rows, n, k, num_groups, dy, x, dy_scales, x_scales, group_ends, out, is_fp32 != 0}, stream);
}
}
