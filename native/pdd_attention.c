/* Kernels over a paged KV cache; the contract is in the header.
 *
 * One body of code, in GCC's and clang's vector extension, is compiled twice: with AVX2 and FMA, and for the base
 * architecture. Whoever calls picks at run time.
 */
#include "pdd_attention.h"

#include <math.h>
#include <string.h>

#define LANES 8
#define BLOCK 32 /* tokens whose scores are held at once: K and V of a block stay in the first-level cache */
#define MAX_GROUP 4 /* query heads that share one pass over a block; their sums stay in registers */

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* ---- elements: float, or bfloat16, which is the upper half of a float ---- */

INLINE float element(const void *from, int64_t at, const int type)
{
    if (type == PDD_FLOAT32)
        return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void set_element(void *to, int64_t at, float value, const int type)
{
    if (type == PDD_FLOAT32) {
        ((float *)to)[at] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    /* Round to nearest even; a NaN must not round to infinity. */
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    ((uint16_t *)to)[at] = (uint16_t)(value != value ? (bits >> 16) | 0x40 : rounded);
}

/* Always inlined, so no vector ever crosses a call: results leave through a pointer and no ABI is involved. */
INLINE void load(vec *to, const void *from, int64_t at, const int type)
{
    if (type == PDD_FLOAT32)
        *to = *(const vec *)((const float *)from + at);
    else
        *to = (vec)(__builtin_convertvector(*(const halves *)((const uint16_t *)from + at), words) << 16);
}

INLINE int64_t element_bytes(const int type)
{
    return type == PDD_FLOAT32 ? 4 : 2;
}

/* exp(x) for x <= 0, within 2 ulp; below -87 it stays at exp(-87). NaN gives NaN.
 * x = n ln 2 + r; the polynomial is the classic single-precision one of Cephes (Moshier). */
INLINE void exp_of_negative(vec *value)
{
    vec x = *value;
    ints low = x < -87.0f;
    x = (vec)(((ints)x & ~low) | ((ints)(x * 0 - 87.0f) & low));
    ints n = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, ints);
    vec whole = __builtin_convertvector(n, vec);
    vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    *value = p * (vec)((n + 127) << 23);
}

/* ---- decode attention ---- */

/* Some query heads of one KV head, over the blocks seen so far (online softmax, Milakov and Gimelshein 2018). */
struct heads {
    float *sums; /* [heads, head_dim]: sum of exp(score - max) * V */
    const float *q; /* [heads, head_dim], already scaled */
    float max[MAX_GROUP];
    float total[MAX_GROUP]; /* sum of exp(score - max) */
};

/* Pages are scattered and the processor's own prefetcher stops at their ends: fetch a row of the next block for each
 * row of this one. Beyond the sequence's end that is at most a useless fetch, never a fault. */
INLINE void prefetch_row(const char *row, int64_t row_bytes)
{
    for (int64_t at = 0; at < row_bytes; at += 64)
        __builtin_prefetch(row + at);
}

/* scores[head][token] = q[head] . k[token] */
INLINE void block_scores(float scores[][BLOCK], const struct heads *heads, const void *k, int32_t num_tokens,
                         int32_t dim, const char *next, int64_t to_v_bytes, const int group, const int type)
{
    const int64_t row_bytes = dim * element_bytes(type);
    for (int32_t token = 0; token < num_tokens; token++) {
        prefetch_row(next + token * row_bytes, row_bytes);
        if (to_v_bytes)
            prefetch_row(next + to_v_bytes + token * row_bytes, row_bytes);
        vec dot[MAX_GROUP] = {{0}};
        int64_t at = (int64_t)token * dim;
        int32_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            vec key;
            load(&key, k, at + d, type);
            for (int h = 0; h < group; h++)
                dot[h] += key * *(const vec *)(heads->q + h * dim + d);
        }
        for (int h = 0; h < group; h++) {
            float sum = ((dot[h][0] + dot[h][4]) + (dot[h][1] + dot[h][5])) +
                        ((dot[h][2] + dot[h][6]) + (dot[h][3] + dot[h][7]));
            for (int32_t rest = d; rest < dim; rest++)
                sum += heads->q[h * dim + rest] * element(k, at + rest, type);
            scores[h][token] = sum;
        }
    }
}

/* Scores become weights exp(score - max); returns through `scale` what older sums must be multiplied with. */
INLINE void block_weights(float scores[][BLOCK], struct heads *heads, float *scale, int32_t num_tokens,
                          const int group)
{
    for (int h = 0; h < group; h++) {
        float max = heads->max[h];
        for (int32_t token = 0; token < num_tokens; token++)
            max = scores[h][token] > max ? scores[h][token] : max;
        for (int32_t token = num_tokens; token % LANES; token++)
            scores[h][token] = -INFINITY;
        for (int32_t token = 0; token < num_tokens; token += LANES) {
            vec weight = *(vec *)(scores[h] + token) - max;
            exp_of_negative(&weight);
            *(vec *)(scores[h] + token) = weight;
        }
        float sum = 0;
        for (int32_t token = 0; token < num_tokens; token++)
            sum += scores[h][token];
        scale[h] = expf(heads->max[h] - max);
        heads->total[h] = heads->total[h] * scale[h] + sum;
        heads->max[h] = max;
    }
}

/* sums[head] = sums[head] * scale[head] + weights[head] . v */
INLINE void block_values(float weights[][BLOCK], struct heads *heads, const float *scale, const void *v,
                         int32_t num_tokens, int32_t dim, const int group, const int type)
{
    int32_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        vec sum[MAX_GROUP];
        for (int h = 0; h < group; h++)
            sum[h] = *(vec *)(heads->sums + h * dim + d) * scale[h];
        for (int32_t token = 0; token < num_tokens; token++) {
            vec value;
            load(&value, v, (int64_t)token * dim + d, type);
            for (int h = 0; h < group; h++)
                sum[h] += value * weights[h][token];
        }
        for (int h = 0; h < group; h++)
            *(vec *)(heads->sums + h * dim + d) = sum[h];
    }
    for (; d < dim; d++) {
        for (int h = 0; h < group; h++) {
            float sum = heads->sums[h * dim + d] * scale[h];
            for (int32_t token = 0; token < num_tokens; token++)
                sum += weights[h][token] * element(v, (int64_t)token * dim + d, type);
            heads->sums[h * dim + d] = sum;
        }
    }
}

/* `group` query heads of one KV head over a whole sequence. */
INLINE void attend_group(const struct pdd_cache *cache, const int32_t *pages, int32_t length, int32_t kv_head,
                         struct heads *heads, const int group, const int type)
{
    const int64_t dim = cache->head_dim, page_tokens = cache->page_tokens;
    const int64_t row_bytes = dim * element_bytes(type), head_bytes = page_tokens * row_bytes;
    const int64_t plane_bytes = cache->num_kv_heads * head_bytes, to_v_bytes = cache->latent ? 0 : plane_bytes;
    const int64_t page_bytes = plane_bytes + to_v_bytes;
    float scores[MAX_GROUP][BLOCK], scale[MAX_GROUP];
    for (int h = 0; h < group; h++) {
        heads->max[h] = -INFINITY;
        heads->total[h] = 0;
    }
    memset(heads->sums, 0, (size_t)(group * dim) * sizeof(float));
    const char *base = (const char *)cache->base + kv_head * head_bytes;
    const int64_t last = (length - 1) / page_tokens;
    for (int64_t number = 0; number <= last; number++) {
        const char *page = base + pages[number] * page_bytes;
        const char *next_page = base + pages[number < last ? number + 1 : last] * page_bytes;
        const int64_t in_page = number < last ? page_tokens : length - last * page_tokens;
        for (int64_t at = 0; at < in_page; at += BLOCK) {
            int32_t count = (int32_t)(in_page - at < BLOCK ? in_page - at : BLOCK);
            const char *k = page + at * row_bytes;
            const char *next = at + BLOCK < in_page ? k + BLOCK * row_bytes : next_page;
            block_scores(scores, heads, k, count, (int32_t)dim, next, to_v_bytes, group, type);
            block_weights(scores, heads, scale, count, group);
            block_values(scores, heads, scale, k + to_v_bytes, count, (int32_t)dim, group, type);
        }
    }
    for (int h = 0; h < group; h++)
        for (int64_t d = 0; d < dim; d++)
            heads->sums[h * dim + d] /= heads->total[h];
}

/* Up to MAX_GROUP query heads of one KV head of one sequence. q: elements; out: float. */
INLINE void attend(const struct pdd_cache *cache, const int32_t *pages, int32_t length, int32_t kv_head, int32_t group,
                   const void *q, float scale, float *out, const int type)
{
    const int32_t size = group * cache->head_dim;
    float scaled[size];
    for (int32_t i = 0; i < size; i++)
        scaled[i] = element(q, i, type) * scale;
    struct heads heads = {.sums = out, .q = scaled};
    switch (group) {
    case 1:
        attend_group(cache, pages, length, kv_head, &heads, 1, type);
        break;
    case 2:
        attend_group(cache, pages, length, kv_head, &heads, 2, type);
        break;
    case 3:
        attend_group(cache, pages, length, kv_head, &heads, 3, type);
        break;
    default:
        attend_group(cache, pages, length, kv_head, &heads, 4, type);
    }
}

/* ---- norm, rotate, store ---- */

INLINE void norm_head(void *head, const void *weight, int32_t dim, float epsilon, const int type)
{
    float squares = 0;
    for (int32_t d = 0; d < dim; d++) {
        float x = element(head, d, type);
        squares += x * x;
    }
    float factor = 1.0f / sqrtf(squares / (float)dim + epsilon);
    for (int32_t d = 0; d < dim; d++)
        set_element(head, d, element(head, d, type) * factor * element(weight, d, type), type);
}

INLINE void rotate_head(void *head, const float *cosine, const float *sine, int32_t half, const int type)
{
    for (int32_t d = 0; d < half; d++) {
        float a = element(head, d, type), b = element(head, half + d, type);
        set_element(head, d, a * cosine[d] - b * sine[d], type);
        set_element(head, half + d, b * cosine[d] + a * sine[d], type);
    }
}

INLINE void store_token(const struct pdd_cache *cache, const struct pdd_rotation *rotation, char *qkv,
                        int32_t position, int32_t slot, const int type)
{
    const int64_t dim = cache->head_dim, row_bytes = dim * element_bytes(type);
    const int64_t head_bytes = cache->page_tokens * row_bytes, v_bytes = cache->num_kv_heads * head_bytes;
    const float *cosine = (const float *)rotation->table + position * dim, *sine = cosine + dim / 2;
    for (int32_t h = 0; h < cache->num_heads + cache->num_kv_heads; h++) {
        void *head = qkv + h * row_bytes;
        uint64_t weight = h < cache->num_heads ? rotation->q_norm : rotation->k_norm;
        if (weight)
            norm_head(head, (const void *)weight, (int32_t)dim, rotation->epsilon, type);
        rotate_head(head, cosine, sine, (int32_t)dim / 2, type);
    }
    char *to = (char *)cache->base + slot / cache->page_tokens * 2 * v_bytes + slot % cache->page_tokens * row_bytes;
    const char *k = qkv + cache->num_heads * row_bytes, *v = k + cache->num_kv_heads * row_bytes;
    for (int32_t h = 0; h < cache->num_kv_heads; h++) {
        memcpy(to + h * head_bytes, k + h * row_bytes, (size_t)row_bytes);
        memcpy(to + v_bytes + h * head_bytes, v + h * row_bytes, (size_t)row_bytes);
    }
}

/* ---- the body compiled for each instruction set ---- */

typedef void attend_fn(const struct pdd_cache *, const int32_t *, int32_t, int32_t, int32_t, const void *, float,
                       float *);
typedef void store_fn(const struct pdd_cache *, const struct pdd_rotation *, char *, int32_t, int32_t);

#define COMPILE(name, attribute)                                                                                      \
    attribute static void attend_##name(const struct pdd_cache *cache, const int32_t *pages, int32_t length,         \
                                        int32_t kv_head, int32_t group, const void *q, float scale, float *out)      \
    {                                                                                                                 \
        if (cache->element == PDD_FLOAT32)                                                                            \
            attend(cache, pages, length, kv_head, group, q, scale, out, PDD_FLOAT32);                                 \
        else                                                                                                          \
            attend(cache, pages, length, kv_head, group, q, scale, out, PDD_BFLOAT16);                                \
    }                                                                                                                 \
    attribute static void store_##name(const struct pdd_cache *cache, const struct pdd_rotation *rotation, char *qkv, \
                                       int32_t position, int32_t slot)                                                \
    {                                                                                                                 \
        if (cache->element == PDD_FLOAT32)                                                                            \
            store_token(cache, rotation, qkv, position, slot, PDD_FLOAT32);                                           \
        else                                                                                                          \
            store_token(cache, rotation, qkv, position, slot, PDD_BFLOAT16);                                          \
    }

COMPILE(portable, )
#ifdef __x86_64__
COMPILE(avx2, __attribute__((target("avx2,fma"))))

static int has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#define PICK(cache, kind) ((cache)->isa == PDD_ISA_BEST && has_avx2() ? kind##_avx2 : kind##_portable)
#else
static int has_avx2(void)
{
    return 0;
}
#define PICK(cache, kind) (kind##_portable)
#endif

const char *pdd_isa_name(void)
{
    return has_avx2() ? "avx2" : "portable";
}

/* ---- entry points ---- */

void pdd_store(const struct pdd_cache *cache, const struct pdd_rotation *rotation, uint64_t qkv, int64_t num_tokens,
               uint64_t positions, uint64_t slots)
{
    store_fn *store = PICK(cache, store);
    const int64_t row_bytes =
        (int64_t)(cache->num_heads + 2 * cache->num_kv_heads) * cache->head_dim * element_bytes(cache->element);
#ifdef _OPENMP
#pragma omp parallel for num_threads(cache->threads) schedule(static) if (num_tokens >= 64)
#endif
    for (int64_t token = 0; token < num_tokens; token++)
        store(cache, rotation, (char *)qkv + token * row_bytes, ((const int32_t *)positions)[token],
              ((const int32_t *)slots)[token]);
}

void pdd_gather(const struct pdd_cache *cache, uint64_t pages, int64_t num_tokens, uint64_t out)
{
    const int64_t row_bytes = cache->head_dim * element_bytes(cache->element);
    const int64_t head_bytes = cache->page_tokens * row_bytes, page_bytes = 2 * cache->num_kv_heads * head_bytes;
#ifdef _OPENMP
#pragma omp parallel for num_threads(cache->threads) schedule(static)
#endif
    for (int64_t head = 0; head < 2 * cache->num_kv_heads; head++) { /* K heads, then V heads: as in a page */
        char *to = (char *)out + head * num_tokens * row_bytes;
        for (int64_t first = 0; first < num_tokens; first += cache->page_tokens) {
            int64_t page = ((const int32_t *)pages)[first / cache->page_tokens];
            int64_t left = num_tokens - first < cache->page_tokens ? num_tokens - first : cache->page_tokens;
            const char *from = (const char *)cache->base + page * page_bytes + head * head_bytes;
            memcpy(to + first * row_bytes, from, (size_t)(left * row_bytes));
        }
    }
}

void pdd_decode(const struct pdd_cache *cache, uint64_t q, int64_t q_stride, int64_t num_rows, uint64_t page_tables,
                uint64_t lengths, float scale, uint64_t out)
{
    attend_fn *attend_heads = PICK(cache, attend);
    const int32_t all = cache->num_heads / cache->num_kv_heads; /* query heads of a KV head */
    const int64_t num_groups = (all + MAX_GROUP - 1) / MAX_GROUP, element_size = element_bytes(cache->element);
#ifdef _OPENMP
#pragma omp parallel for num_threads(cache->threads) schedule(dynamic, 1)
#endif
    for (int64_t item = 0; item < num_rows * cache->num_kv_heads * num_groups; item++) {
        const int64_t row = item / num_groups / cache->num_kv_heads, kv_head = item / num_groups % cache->num_kv_heads;
        const int32_t first = (int32_t)(item % num_groups) * MAX_GROUP;
        const int64_t head = kv_head * all + first;
        attend_heads(cache, (const int32_t *)((const uint64_t *)page_tables)[row], ((const int32_t *)lengths)[row],
                     (int32_t)kv_head, all - first < MAX_GROUP ? all - first : MAX_GROUP,
                     (const char *)q + (row * q_stride + head * cache->head_dim) * element_size, scale,
                     (float *)out + (row * cache->num_heads + head) * cache->head_dim);
    }
}
