/* Kernels over a paged KV cache on a CPU: what torch has no operator for.
 *
 * This header is also the cffi cdef: lines that start with '#' are dropped, the rest is plain C.
 *
 * A layer of the cache is [pages, 2, num_kv_heads, page_tokens, head_dim] (K, then V), or without the 2 where K and V
 * are the same rows (a latent cache); a token's slot is page * page_tokens + offset. Elements are IEEE float (4 bytes) or bfloat16 (2 bytes); all arithmetic is float.
 * Pointers are passed as uint64_t (tensor.data_ptr()). Nothing is allocated, nothing is kept.
 */
#ifndef PDD_ATTENTION_H
#define PDD_ATTENTION_H
#include <stdint.h>

enum pdd_element { PDD_FLOAT32 = 0, PDD_BFLOAT16 = 1 };

enum pdd_isa { PDD_ISA_BEST = 0, PDD_ISA_PORTABLE = 1 };

struct pdd_cache {
    uint64_t base; /* of the layer */
    int32_t element; /* enum pdd_element, of the cache and of qkv */
    int32_t num_heads; /* a multiple of num_kv_heads; heads of one KV head are adjacent */
    int32_t num_kv_heads;
    int32_t page_tokens;
    int32_t head_dim; /* even */
    int32_t isa; /* enum pdd_isa */
    int32_t threads; /* at most so many; 1 where built without OpenMP */
    int32_t latent; /* 1: K and V are the same rows. pdd_decode only */
};

/* What is done to a token's q and k before they are used. */
struct pdd_rotation {
    uint64_t q_norm; /* RMS-norm weights of head_dim elements each, of the cache's element type; 0: no norm */
    uint64_t k_norm;
    uint64_t table; /* float [positions, head_dim]: cos of the first half, then sin */
    float epsilon;
};

/* For each of num_tokens rows of qkv [num_tokens, num_heads + 2 num_kv_heads, head_dim], contiguous: norm and rotate q
 * and k in place, then store k and v at the row's slot. positions and slots are int32_t [num_tokens]. */
void pdd_store(const struct pdd_cache *cache, const struct pdd_rotation *rotation, uint64_t qkv, int64_t num_tokens,
               uint64_t positions, uint64_t slots);

/* Copy the first num_tokens tokens of a page table (int32_t) into out [2, num_kv_heads, num_tokens, head_dim]. */
void pdd_gather(const struct pdd_cache *cache, uint64_t pages, int64_t num_tokens, uint64_t out);

/* Attention of one query token for each of num_rows sequences over its first lengths[row] tokens.
 * q: elements, row r at q + r * q_stride elements, [num_heads, head_dim]; page_tables: uint64_t [num_rows], each
 * the address of int32_t pages; lengths: int32_t [num_rows], at least 1; out: float [num_rows, num_heads, head_dim].
 * A NaN or infinite score makes the row NaN. */
void pdd_decode(const struct pdd_cache *cache, uint64_t q, int64_t q_stride, int64_t num_rows, uint64_t page_tables,
                uint64_t lengths, float scale, uint64_t out);

/* "avx2" or "portable": what PDD_ISA_BEST means here. */
const char *pdd_isa_name(void);
#endif
