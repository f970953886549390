// Recycled memory for large op outputs.
//
// A 50 MB output that is allocated afresh costs 13,000 page faults per step, about as much as filling it. Outputs of at
// least kMinBytes therefore come from huge-page buffers that return here when their tensor dies.
// Bounds: few lookup outputs wait, but as many messages and contributions as a merge round beside training has at a time (three
// messages a bucket, one tensor of contributions a table). A buffer serves requests down to half its size, so that a smaller batch
// does not hold a larger buffer for ever. Threads: all functions may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>

namespace kstep {

// An uninitialised float32 CPU tensor.
at::Tensor empty_output(at::IntArrayRef sizes);
// The same, for what touched rows contribute to a merge round.
at::Tensor empty_contributions(at::IntArrayRef sizes);
// An uninitialised uint8 CPU tensor [num_bytes], at a multiple of 64 bytes: a message.
at::Tensor empty_message(int64_t num_bytes);

}  // namespace kstep
