// Says what a combine computes besides the sums of rows. The options go from Python to the kernels whole, so that no layer between knows
// them.
#pragma once

namespace deepep_moe {

struct CombineOptions {
    bool sums_lanes;  // a top-k entry gets the sum over all ranks that its token went to, not only the value of its expert's rank
};

// Reads `CombineOptions` of Python. `object` is a handle of either module's bindings.
template <class Object>
CombineOptions combine_options_of(const Object& object) {
    return {object.attr("sums_lanes").template cast<bool>()};
}

}  // namespace deepep_moe
