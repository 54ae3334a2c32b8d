// Makes dispatch and combine autograd functions in C++, for all rows in one tensor or for a tensor of each local expert.
#pragma once

#include "torch/calls.h"

namespace deepep_moe {

struct DispatchRequest {
    Outgoing sent;
    std::shared_ptr<Handle> along;  // the handle of an earlier dispatch, or null
    bool is_late = false;           // true: the rows are those that did not fit into that dispatch's, which are there
    bool is_expert_layout = true;
    int64_t expert_alignment = 1, num_recv_rows = -1;
    Mode mode;
    int64_t num_leading = -1;  // ones before [num_rows, hidden] in the tensor of each local expert; -1: all rows are in one tensor
};

Received dispatch(Calls& calls, const DispatchRequest& request);

struct CombineRequest {
    variable_list rows;  // one tensor, or with
    const ExpertRows* expert_rows = nullptr;
    CombineInputs inputs;
    Mode mode;
};

Combined combine(Calls& calls, const Handle& handle, const CombineRequest& request);

}  // namespace deepep_moe
