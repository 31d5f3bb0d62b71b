// What a trainer writes to use onepass: a regression whose fp32 weights live on
// the CPU and whose bf16 copies the step writes as it goes.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "dispatch/thread_pool.h"
#include "kernels/default.h"
#include "offload/cpu_adam.h"

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

int main() {
  auto dispatcher = onepass::CreateDefaultDispatcher();
  if (!dispatcher.ok()) return Fail(dispatcher.status());
  auto kernel = dispatcher->Select();
  if (!kernel.ok()) return Fail(kernel.status());
  auto pool = onepass::ThreadPool::Create({});
  if (!pool.ok()) return Fail(pool.status());
  onepass::AdamOptions options;
  options.lr = 0.01;
  auto adam = onepass::CpuAdam::Create(**kernel, **pool, {options});
  if (!adam.ok()) return Fail(adam.status());

  const int64_t n = 1'000'000;
  std::vector<float> weights(n), gradients(n), exp_avg(n), exp_avg_sq(n);
  std::vector<uint16_t> copies(n);  // bf16, for the device
  onepass::AdamSpan span;
  span.numel = n;
  span.param = weights.data();
  span.grad = gradients.data();
  span.exp_avg = exp_avg.data();
  span.exp_avg_sq = exp_avg_sq.data();
  span.copy = copies.data();
  for (int64_t t = 1; t <= 300; ++t) {
    for (int64_t i = 0; i < n; ++i) gradients[i] = weights[i] - i % 2;
    absl::Status status = adam->Step(span, t, /*grad_scale=*/1.0f);
    if (!status.ok()) return Fail(status);
  }

  // The weights have found 0 and 1, and the copies are theirs.
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = uint32_t{copies[i]} << 16;
    float copy;
    std::memcpy(&copy, &bits, sizeof(copy));
    if (std::fabs(weights[i] - i % 2) > 0.05f ||
        std::fabs(copy - weights[i]) > 0.005f) {
      std::fprintf(stderr, "weight %g, copy %g, expected %d\n", weights[i],
                   copy, static_cast<int>(i % 2));
      return 1;
    }
  }
  std::printf("300 steps of %lld weights on kernel %s\n",
              static_cast<long long>(n), (*kernel)->name);
  return 0;
}
