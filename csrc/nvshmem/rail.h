// Declares the kernels of rail.cu for the module that does not link NVSHMEM.
#pragma once

namespace deepep_moe {

struct RailShim;
const RailShim& rail_shim();

}  // namespace deepep_moe
