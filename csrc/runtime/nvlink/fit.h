// Chooses how many SMs send on a machine that nobody has tuned. docs/tuning.md has the reasoning and the measurements.
#pragma once

#include "cuda/tuning.h"

namespace deepep_moe {

struct GpuMachine {
    int num_multiprocessors;  // SMs that this process may use
    int capability_major;
    double link_gbps;  // rate at which SMs can push to the peers, in one direction; 0: unknown
};

// Returns 0 if nobody has measured or published the rate.
double link_gbps_of(int capability_major);

GpuTuning fit_tuning(const GpuMachine& machine);

}  // namespace deepep_moe
