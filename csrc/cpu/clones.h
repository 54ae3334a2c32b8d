// Defines function attributes for loops that the compiler vectorizes.
#pragma once

// DEEPEP_MOE_CLONES: compile the function for several x86-64 levels and pick one when the library is loaded (GCC's target_clones;
// needs the C library's ifunc, which asks before the thread sanitizer has begun). Floating-point contraction is off in the build, so every
// clone computes the same bits.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_THREAD__)
#define DEEPEP_MOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DEEPEP_MOE_CLONES
#endif

// DEEPEP_MOE_INLINE: a helper of such a function; only what is inlined into a clone is compiled for the clone's level.
#if defined(__GNUC__) || defined(__clang__)
#define DEEPEP_MOE_INLINE inline __attribute__((always_inline))
#else
#define DEEPEP_MOE_INLINE inline
#endif
