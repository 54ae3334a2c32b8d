// The conversions of dense routing, and counts, on CPUs.
#pragma once

#include "common/dense_routing.h"

namespace deepep_moe {

void lanes_of_map(const LanesOfMapParams& params);
void dense_of_lanes(const DenseOfLanesParams& params);
void count_lanes(const CountLanesParams& params);

}  // namespace deepep_moe
