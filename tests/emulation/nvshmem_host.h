// Stands for the headers of NVSHMEM 3.4.5: names, types and values of what csrc/nvshmem calls, written anew. tests/emulation/network.h says
// what the network does. PEs are processes of this host.
#pragma once

#include <cstddef>
#include <cstdint>

#define NVSHMEM_VENDOR_MAJOR_VERSION 3
#define NVSHMEM_VENDOR_MINOR_VERSION 4
#define NVSHMEM_VENDOR_PATCH_VERSION 5

enum { NVSHMEMX_INIT_WITH_UNIQUEID = 1 << 3 };
enum { NVSHMEM_STATUS_NOT_INITIALIZED = 0, NVSHMEM_STATUS_IS_INITIALIZED = 2, NVSHMEM_STATUS_FULL_MPG = 4 };
enum { NVSHMEM_CMP_GE = 5 };
enum { NVSHMEM_SIGNAL_SET = 9 };

struct nvshmemx_uniqueid_t {
    int version;
    char internal[124];
};
struct nvshmemx_uniqueid_args_t {
    int version;
    nvshmemx_uniqueid_t* id;
    int myrank, nranks;
};
struct nvshmemx_init_args_t {
    int version;
    nvshmemx_uniqueid_args_t uid_args;
    char content[96];
};
struct nvshmemx_init_attr_t {
    int version;
    void* mpi_comm;
    nvshmemx_init_args_t args;
};
static_assert(sizeof(nvshmemx_uniqueid_t) == 128 && sizeof(nvshmemx_init_args_t) == 128 && sizeof(nvshmemx_init_attr_t) == 144);
#define NVSHMEMX_UNIQUEID_INITIALIZER {(1 << 16) + sizeof(nvshmemx_uniqueid_t), {0}}
#define NVSHMEMX_UNIQUEID_ARGS_INITIALIZER {(1 << 16) + sizeof(nvshmemx_uniqueid_args_t), nullptr, -1, -1}
#define NVSHMEMX_INIT_ARGS_INITIALIZER {(1 << 16) + sizeof(nvshmemx_init_args_t), NVSHMEMX_UNIQUEID_ARGS_INITIALIZER, {0}}
#define NVSHMEMX_INIT_ATTR_INITIALIZER {(1 << 16) + sizeof(nvshmemx_init_attr_t), nullptr, NVSHMEMX_INIT_ARGS_INITIALIZER}

#pragma GCC visibility push(default)
extern "C" {

int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t* id);
int nvshmemx_set_attr_uniqueid_args(int rank, int num_ranks, const nvshmemx_uniqueid_t* id, nvshmemx_init_attr_t* attributes);
int nvshmemx_hostlib_init_attr(unsigned flags, nvshmemx_init_attr_t* attributes);
int nvshmemx_init_attr(unsigned flags, nvshmemx_init_attr_t* attributes);  // ends the process where it fails
int nvshmemx_init_status();
void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch);

int nvshmem_my_pe();
int nvshmem_n_pes();
void* nvshmem_align(size_t alignment, size_t bytes);
void nvshmem_free(void* pointer);
void* nvshmem_ptr(const void* pointer, int pe);
void nvshmemx_quiet_on_stream(struct EmulatedStream* stream);

// Not part of NVSHMEM, for tests: payload bytes of this process that have arrived at `pe`.
uint64_t emulated_nvshmem_bytes(int pe);
}
#pragma GCC visibility pop
