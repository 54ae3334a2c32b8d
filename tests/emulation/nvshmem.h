// The device half of what stands for NVSHMEM 3.4.5.
#pragma once

#include "cuda_runtime_api.h"
#include "nvshmem_host.h"

#pragma GCC visibility push(default)
extern "C" {

void nvshmemx_putmem_signal_nbi_warp(void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int signal_op, int pe);
void nvshmemx_putmem_signal_nbi_block(void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int signal_op, int pe);
void nvshmemx_signal_op(uint64_t* signal, uint64_t value, int signal_op, int pe);
int nvshmem_uint64_test(uint64_t* word, int comparison, uint64_t value);
}
#pragma GCC visibility pop
