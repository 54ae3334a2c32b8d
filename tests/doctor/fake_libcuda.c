// A libcuda of two GPUs that reach each other, one way with atomics. Memory is a file, so that another process can map it by its handle.
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    char bytes[64];
} Handle;

static char path[64];

static int map(uint64_t* address, int flags) {
    int fd = open(path, flags, 0600);
    if (fd < 0 || ftruncate(fd, 1 << 21) != 0) return 1;
    void* at = mmap(NULL, 1 << 21, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    *address = (uint64_t)(uintptr_t)at;
    return at == MAP_FAILED;
}

int cuInit(unsigned flags) { return getenv("FAKE_NO_DEVICE") ? 100 : (int)flags; }
int cuGetErrorName(int code, const char** name) {
    *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
int cuDriverGetVersion(int* version) { return *version = 12040, 0; }
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDeviceGetName(char* name, int size, int device) { return strncpy(name, device ? "second" : "first", size), 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute == 16 ? 100 + device : attribute == 75 ? 9 : 0;
    return 0;
}
int cuDeviceCanAccessPeer(int* can, int device, int peer) { return *can = device != peer, 0; }
int cuDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
    *value = attribute == 3 && device == 0 && peer == 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = path + device, 0; }
int cuCtxSetCurrent(void* context) { return context == NULL; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAlloc_v2(uint64_t* address, size_t num_bytes) {
    strncpy(path, getenv("FAKE_MEMORY"), sizeof path - 1);
    return num_bytes != 1 << 21 || map(address, O_RDWR | O_CREAT);
}
int cuIpcGetMemHandle(Handle* handle, uint64_t address) {
    memcpy(handle->bytes + 1, path, 63);  // a handle may begin with a zero byte
    return address == 0;
}
int cuIpcOpenMemHandle_v2(uint64_t* address, Handle handle, unsigned flags) {
    memcpy(path, handle.bytes + 1, 63);
    return getenv("FAKE_NO_IPC") || flags != 1 || map(address, O_RDWR);
}
int cuIpcCloseMemHandle(uint64_t address) { return address == 0; }
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t num_bytes) { return memcpy(to, (void*)(uintptr_t)from, num_bytes) == NULL; }
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t num_bytes) { return memcpy((void*)(uintptr_t)to, from, num_bytes) == NULL; }
