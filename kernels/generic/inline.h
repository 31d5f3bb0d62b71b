// Everything in kernels/generic/ is inlined into the object of one instruction
// set. A copy of it standing on its own there could be picked by the linker for
// the whole program, and be run by a processor that lacks the set.

#ifndef ONEPASS_KERNELS_GENERIC_INLINE_H_
#define ONEPASS_KERNELS_GENERIC_INLINE_H_

#define ONEPASS_INLINE [[gnu::always_inline]] inline
// The same for a lambda, after its parameters.
#define ONEPASS_LAMBDA_INLINE __attribute__((always_inline))

#endif  // ONEPASS_KERNELS_GENERIC_INLINE_H_
