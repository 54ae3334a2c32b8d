#include "runtime/nvlink/fit.h"

#include <algorithm>
#include <cmath>

#include "cuda/params.h"

namespace deepep_moe {
namespace {

constexpr int kMeasuredSms = 12;     // the best of a sweep on 2 and on 4 H200s
constexpr double kLinkOfSm90 = 357;  // GB/s that their SMs push at most
// As many bytes are in flight as the link carries in this time at its highest rate: 11 to 12 rings of 184 KiB at 357 GB/s.
constexpr double kUsOnTheirWay = 5.9;
constexpr int kSmsPerSender = 4;     // the other SMs receive and sum, and touch each row more often than senders do
constexpr int kSendersPerExtra = 6;  // a sender of sums sometimes waits for them; one more for each 6 senders makes up for it

}  // namespace

double link_gbps_of(int capability_major) {
    if (capability_major == 9) return kLinkOfSm90;
    return capability_major == 10 ? 2 * kLinkOfSm90 : 0;  // NVLink 5 has twice the rate of NVLink 4
}

GpuTuning fit_tuning(const GpuMachine& machine) {
    GpuTuning fitted;
    fitted.uses_bulk_copies = machine.capability_major >= 9;
    int wanted = kMeasuredSms;
    if (fitted.uses_bulk_copies && machine.link_gbps > 0) {
        const double on_their_way = machine.link_gbps * kUsOnTheirWay * 1e3;  // bytes
        wanted = static_cast<int>(std::ceil(on_their_way / tuning::kRingBytes));
    }
    fitted.num_sms = std::clamp(wanted, 1, std::max(1, machine.num_multiprocessors / kSmsPerSender));
    fitted.num_sms_of_sums = fitted.num_sms + static_cast<int>(divide_up(fitted.num_sms, kSendersPerExtra));
    return fitted;
}

}  // namespace deepep_moe
