/* Copying a page that nobody reads soon: past the caches, where the processor can. Compared with memcpy, stores that do
 * not fetch the line first save a third of the memory traffic. */
#include "pdd_copy.h"

#if defined(__x86_64__)
#include <immintrin.h>

enum { STREAMED_BYTES = 8192, LINES_BYTES = 128 };

__attribute__((target("avx2"))) static void stream(uint8_t *to, const uint8_t *from, uint64_t length_bytes)
{
    for (uint64_t i = 0; i < length_bytes; i += LINES_BYTES) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + i + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + i + 96));
        _mm256_stream_si256((__m256i *)(to + i), a);
        _mm256_stream_si256((__m256i *)(to + i + 32), b);
        _mm256_stream_si256((__m256i *)(to + i + 64), c);
        _mm256_stream_si256((__m256i *)(to + i + 96), d);
    }
    _mm_sfence(); /* such stores are ordered by nothing else */
}

void pdd_copy_bytes(uint8_t *to, const uint8_t *from, uint64_t length_bytes)
{
    uint64_t first = -(uintptr_t)to & 31, middle = 0;
    if (length_bytes >= STREAMED_BYTES && __builtin_cpu_supports("avx2")) {
        middle = (length_bytes - first) / LINES_BYTES * LINES_BYTES;
        memcpy(to, from, first);
        stream(to + first, from + first, middle);
        middle += first;
    }
    memcpy(to + middle, from + middle, length_bytes - middle);
}
#else
void pdd_copy_bytes(uint8_t *to, const uint8_t *from, uint64_t length_bytes) { memcpy(to, from, length_bytes); }
#endif
