/* Decisions over recorded fi_info: no NIC and no libfabric provider takes part. Prints what failed.
 *
 * Where the figures are from:
 *   net, tcp;ofi_rxm, shm  `fi_info -v` of libfabric 1.17.0 (Debian 12), one Linux machine
 *   verbs;ofi_rxm          `fi_info -v` of an mlx5_0 in libfabric's issue 5149 (queue size, ranges, bytes, keys, modes); a
 *                          ConnectX-7 differs in what is read from the device, and its message limit is the same 1 GiB
 *   efa, efa-direct        libfabric's prov/efa/src/efa_prov_info.c, 1.17.0, 2.1.0 and 2.6.0 (keys, data, modes, ranges,
 *                          bytes); rdmap79s0 is what p5 machines call one of theirs. The queue size is the device's and not
 *                          recorded: anything from 128 on decides the same
 *   the others             made up, each with one fault
 */
#include "checks.h"
#include "pdd_choose.h"
#include "pdd_region.h"

#include <errno.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char check_context[128];

struct recorded {
    const char *provider, *fabric, *domain;
    uint64_t caps, mode;
    int endpoint, mr_mode;
    size_t key_bytes, data_bytes, iov, rma_iov, queue;
    uint64_t max_bytes, order;
};

enum {
    MAP = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY,
    NICS = MAP | FI_MR_LOCAL,
};
#define WRITES (FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)
#define GPU (WRITES | FI_HMEM)
#define FOREVER UINT64_MAX
#define GIB (1ull << 30)
#define NIC_ORDER (FI_ORDER_WAW | FI_ORDER_RAW | FI_ORDER_SAS)

#define NET "net", "192.0.2.0/24", "eth0"
#define RXM "tcp;ofi_rxm", "192.0.2.0/24", "eth0"
#define SHM "shm", "shm", "shm"
#define VERBS "verbs;ofi_rxm", "IB-0xfe80000000000000", "mlx5_0"
#define EFA "efa", "efa", "rdmap79s0-rdm"
#define EFA_2 "efa", "efa", "rdmap80s0-rdm"
#define DIRECT "efa", "efa-direct", "rdmap79s0-rdm"

static const struct recorded
    net = {NET, WRITES, 0, FI_EP_RDM, 0, 8, 8, 4, 4, 256, FOREVER, NIC_ORDER},
    rxm = {RXM, WRITES, 0, FI_EP_RDM, 0, 8, 8, 4, 4, 2048, FOREVER, NIC_ORDER},
    shm = {SHM, WRITES, 0, FI_EP_RDM, FI_MR_VIRT_ADDR, 8, 8, 4, 4, 1024, FOREVER, FI_ORDER_SAS},
    shm_gpu = {SHM, GPU, 0, FI_EP_RDM, FI_MR_VIRT_ADDR | FI_MR_HMEM, 8, 8, 4, 4, 1024, FOREVER, FI_ORDER_SAS},
    verbs = {VERBS, WRITES, 0, FI_EP_RDM, NICS, 4, 4, 4, 1, 1024, GIB, NIC_ORDER},
    verbs_gpu = {VERBS, GPU, 0, FI_EP_RDM, NICS | FI_MR_HMEM, 4, 4, 4, 1, 1024, GIB, NIC_ORDER},
    efa_1_17 = {EFA, WRITES, 0, FI_EP_RDM, NICS, 4, 8, 4, 1, 1024, FOREVER, 0},
    efa = {EFA, WRITES, 0, FI_EP_RDM, NICS, 4, 4, 4, 1, 1024, FOREVER, 0},
    efa_2 = {EFA_2, WRITES, 0, FI_EP_RDM, NICS, 4, 4, 4, 1, 1024, FOREVER, 0},
    efa_gpu = {EFA, GPU, 0, FI_EP_RDM, NICS | FI_MR_HMEM, 4, 4, 4, 1, 1024, FOREVER, 0},
    direct = {DIRECT, WRITES, FI_CONTEXT2, FI_EP_RDM, NICS, 4, 4, 2, 1, 1024, GIB, 0},
    datagrams = {"efa", "efa", "rdmap79s0-dgrm", FI_MSG, FI_MSG_PREFIX, FI_EP_DGRAM, NICS, 4, 4, 2, 0, 1024, 8760, 0},
    bound = {"made", "up", "up", WRITES, 0, FI_EP_RDM, FI_MR_ENDPOINT | FI_MR_ALLOCATED, 8, 8, 1, 1, 64, GIB, 0},
    tiny = {"made", "up", "up", WRITES, 0, FI_EP_RDM, 0, 8, 8, 0, 0, 0, 4096, 0};

static struct fi_info *make_info(const struct recorded *from, uint32_t version)
{
    struct fi_info *info = fi_allocinfo();
    CHECK(info);
    info->caps = from->caps;
    info->mode = from->mode;
    info->ep_attr->type = (enum fi_ep_type)from->endpoint;
    info->ep_attr->max_msg_size = from->max_bytes;
    info->domain_attr->mr_mode = from->mr_mode;
    info->domain_attr->mr_key_size = from->key_bytes;
    info->domain_attr->cq_data_size = from->data_bytes;
    info->domain_attr->name = strdup(from->domain);
    info->tx_attr->iov_limit = from->iov;
    info->tx_attr->rma_iov_limit = from->rma_iov;
    info->tx_attr->size = from->queue;
    info->tx_attr->msg_order = from->order;
    info->fabric_attr->prov_name = strdup(from->provider);
    info->fabric_attr->name = strdup(from->fabric);
    info->fabric_attr->api_version = version;
    return info;
}

/* ---- a libfabric that answers from a list ---- */
static const struct recorded *machine[8];
static struct {
    char node[64];
    uint64_t flags, caps, mode, order;
    uint32_t version;
    int mr_mode, calls;
} asked;

static int recorded_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
                            const struct fi_info *hints, struct fi_info **list)
{
    const char *provider = hints->fabric_attr->prov_name;
    CHECK(!service);
    snprintf(asked.node, sizeof asked.node, "%s", node ? node : "");
    asked.flags = flags;
    asked.caps = hints->caps;
    asked.mode = hints->mode;
    asked.order = hints->tx_attr->msg_order | hints->rx_attr->msg_order;
    asked.version = version;
    asked.mr_mode = hints->domain_attr->mr_mode;
    asked.calls++;
    *list = NULL;
    struct fi_info **end = list;
    for (size_t i = 0; i < sizeof machine / sizeof *machine && machine[i]; i++) {
        if (provider && strncmp(machine[i]->provider, provider, strlen(provider)))
            continue; /* by prefix: libfabric answers "tcp" with "tcp;ofi_rxm" */
        *end = make_info(machine[i], version);
        end = &(*end)->next;
    }
    return *list ? 0 : -FI_ENODATA;
}

#define MACHINE(...)                                                                                                   \
    do {                                                                                                               \
        const struct recorded *has[] = {__VA_ARGS__};                                                                  \
        memset(machine, 0, sizeof machine);                                                                            \
        memcpy(machine, has, sizeof has);                                                                              \
    } while (0)

static char why[512];

/* What is chosen, as "fabric domain", or "" with `why` filled. */
static const char *choose(const char *providers, const char *host, uint64_t device_caps)
{
    static char name[128];
    struct fi_info *info = pdd_choose(providers, host, device_caps, recorded_getinfo, why, sizeof why);
    name[0] = 0;
    if (info)
        snprintf(name, sizeof name, "%s %s", info->fabric_attr->name, info->domain_attr->name);
    fi_freeinfo(info);
    return name;
}

static struct pdd_terms terms_of(const struct recorded *from, uint32_t version)
{
    struct fi_info *info = make_info(from, version);
    CHECK(pdd_usable(info, why, sizeof why));
    struct pdd_terms terms = pdd_terms(info);
    fi_freeinfo(info);
    return terms;
}

/* ---- tests ---- */
static const uint32_t HEADERS = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
#define V1_17 FI_VERSION(1, 17)
#define V1_20 FI_VERSION(1, 20)

static void test_order_of_choice(void)
{
    MACHINE(&rxm, &net, &shm);
    CHECK(!strcmp(choose("net,tcp", "192.0.2.7", 0), "192.0.2.0/24 eth0"));
    CHECK(asked.calls == 1 && !strcmp(asked.node, "192.0.2.7") && asked.flags == FI_SOURCE && asked.version == V1_17);
    CHECK(!(asked.caps & (FI_HMEM | FI_REMOTE_COMM)) && !(asked.mr_mode & (FI_MR_HMEM | FI_MR_RAW)));
    CHECK(!asked.order); /* nothing may depend on one */
    CHECK(!strcmp(choose("efa,shm", "192.0.2.7", 0), "shm shm"));
    CHECK(!strncmp(asked.node, "pdd-", 4) && asked.flags == FI_SOURCE);
    CHECK(!strcmp(choose("tcp", "192.0.2.7", 0), "") && !why[0]); /* its other name is not asked for */
    CHECK(!strcmp(choose("verbs;ofi_rxm", "192.0.2.7", 0), "") && !why[0]);
    char offers[64];
    pdd_list_offers(recorded_getinfo, offers, sizeof offers);
    CHECK(!strcmp(offers, "tcp;ofi_rxm, net, shm"));
    pdd_list_offers(recorded_getinfo, offers, 8);
    CHECK(!strcmp(offers, "tcp;ofi"));
    MACHINE(NULL);
    pdd_list_offers(recorded_getinfo, offers, sizeof offers);
    CHECK(!strcmp(offers, "nothing"));
}

static void test_efa_is_asked_without_shm_and_by_device(void)
{
    MACHINE(&direct, &datagrams, &efa, &efa_2);
    CHECK(!strcmp(choose("efa", "10.0.0.4", 0), "efa rdmap79s0-rdm"));
    CHECK(!asked.node[0] && !asked.flags); /* libfabric would compare the text with a GID */
    CHECK(asked.caps & FI_REMOTE_COMM && !(asked.caps & FI_LOCAL_COMM));
    CHECK(asked.version == (HEADERS >= V1_20 ? V1_20 : V1_17));
    CHECK(!strcmp(choose("efa", "rdmap80s0", 0), "efa rdmap80s0-rdm"));
    CHECK(!strcmp(choose("efa", "rdmap80s0-rdm", 0), "efa rdmap80s0-rdm"));
    CHECK(!strcmp(choose("efa", "rdmap8", 0), "") && !why[0]);
    MACHINE(&direct, &datagrams);
    CHECK(!strcmp(choose("efa", "10.0.0.4", 0), ""));
    CHECK(strstr(why, "efa: fabric efa-direct takes writes only from addresses"));
    CHECK(strstr(why, "; efa: no endpoints that are reliable and unconnected (FI_EP_RDM)"));
}

static void test_device_memory_is_asked_for(void)
{
    MACHINE(&efa_gpu);
    CHECK(!strcmp(choose("efa", "10.0.0.4", FI_HMEM), "efa rdmap79s0-rdm"));
    CHECK(asked.caps & FI_HMEM && asked.mr_mode & FI_MR_HMEM);
    MACHINE(&verbs_gpu);
    CHECK(!strcmp(choose("verbs;ofi_rxm", "10.0.0.4", FI_HMEM), "IB-0xfe80000000000000 mlx5_0"));
    CHECK(!strcmp(asked.node, "10.0.0.4") && asked.flags == FI_SOURCE && !(asked.caps & FI_REMOTE_COMM));
    MACHINE(&shm_gpu);
    CHECK(!strcmp(choose("shm", "127.0.0.1", FI_HMEM), "") && !strcmp(why, "shm: no way to a GPU's memory"));
}

static void test_terms(void)
{
    struct pdd_terms t = terms_of(&net, V1_17);
    CHECK(t.max_iov == 4 && t.max_in_flight == 128 && t.max_message_bytes == FOREVER && t.key_bytes == 8);
    CHECK(t.chooses_keys && !t.virtual_addresses && !t.binds_memory && !t.device_memory && !t.lingers && t.listens);
    CHECK(t.wait_object == FI_WAIT_SET);
    t = terms_of(&rxm, V1_17);
    CHECK(t.chooses_keys && t.wait_object == FI_WAIT_FD && t.max_iov == 4);
    t = terms_of(&shm, V1_17);
    CHECK(t.chooses_keys && t.virtual_addresses && t.lingers && t.wait_object == FI_WAIT_FD);
    t = terms_of(&shm_gpu, V1_20);
    CHECK(!t.device_memory && !t.dmabuf && !t.requires_p2p); /* what it says of FI_HMEM is worth nothing */
    t = terms_of(&verbs, V1_17);
    CHECK(t.max_iov == 1 && t.max_in_flight == 128 && t.max_message_bytes == GIB && t.key_bytes == 4);
    CHECK(!t.chooses_keys && t.virtual_addresses && !t.binds_memory && !t.lingers && !t.device_memory);
    t = terms_of(&verbs_gpu, V1_20);
    CHECK(t.device_memory && t.dmabuf && !t.requires_p2p);
    t = terms_of(&efa, V1_20);
    CHECK(t.max_iov == 1 && t.max_in_flight == 128 && !t.chooses_keys && t.virtual_addresses && !t.lingers);
    CHECK(t.max_message_bytes == GIB); /* it says there is no limit, but would count a longer write twice */
    t = terms_of(&efa_1_17, V1_17);
    CHECK(t.max_iov == 1 && t.max_message_bytes == GIB && !t.device_memory);
    t = terms_of(&efa_gpu, V1_17);
    CHECK(t.device_memory && !t.dmabuf && t.requires_p2p); /* 1.17 would take a dma-buf for an address */
    t = terms_of(&efa_gpu, V1_20);
    CHECK(t.device_memory && t.dmabuf && t.requires_p2p);
    t = terms_of(&bound, V1_17);
    CHECK(t.binds_memory && t.chooses_keys && t.max_in_flight == 64);
    t = terms_of(&tiny, V1_17);
    CHECK(t.max_iov == 1 && t.max_in_flight == 1 && t.max_message_bytes == 4096);
}

static void expect_refusal(struct recorded changed, const char *words)
{
    struct fi_info *info = make_info(&changed, V1_20);
    CHECK(!pdd_usable(info, why, sizeof why));
    if (!strstr(why, words))
        fprintf(stderr, "said: %s\n", why);
    CHECK(strstr(why, words));
    char little[16];
    CHECK(!pdd_usable(info, little, sizeof little) && strlen(little) == sizeof little - 1);
    fi_freeinfo(info);
    MACHINE(&changed, &net);
    char providers[64];
    snprintf(providers, sizeof providers, "%s,net", changed.provider);
    CHECK(!strcmp(choose(providers, "10.0.0.4", 0), "192.0.2.0/24 eth0")); /* the next is asked */
    CHECK(!strcmp(choose(changed.provider, "10.0.0.4", 0), "") && strstr(why, words));
}

#define BUT(from, field, value)                                                                                        \
    ({                                                                                                                 \
        struct recorded changed = from;                                                                                \
        changed.field = value;                                                                                         \
        changed;                                                                                                       \
    })

static void test_refusals(void)
{
    expect_refusal(BUT(efa, data_bytes, 0), "completions carry 0 bytes of data, and counting arrivals takes 4");
    expect_refusal(BUT(verbs, caps, WRITES & ~FI_REMOTE_WRITE), "no one-sided writes in both directions");
    expect_refusal(BUT(verbs, caps, FI_MSG), "no one-sided writes in both directions");
    expect_refusal(BUT(efa, endpoint, FI_EP_DGRAM), "reliable and unconnected");
    expect_refusal(BUT(verbs, endpoint, FI_EP_MSG), "reliable and unconnected");
    expect_refusal(BUT(bound, mr_mode, FI_MR_RAW | FI_MR_ENDPOINT), "raw memory keys of 8 bytes");
    expect_refusal(BUT(bound, key_bytes, 16), "raw memory keys of 16 bytes, and a write carries 8");
    expect_refusal(BUT(verbs, key_bytes, 2), "memory keys of 2 bytes, which anybody guesses");
    expect_refusal(BUT(verbs, mr_mode, NICS | FI_MR_RMA_EVENT), "(mr_mode FI_MR_RMA_EVENT)");
    expect_refusal(BUT(bound, mr_mode, FI_MR_ENDPOINT | FI_MR_LOCAL), "leave by another endpoint");
    expect_refusal(BUT(verbs, mode, FI_RX_CQ_DATA), "(FI_RX_CQ_DATA)");
}

static void test_why_has_an_end(void)
{
    char little[24];
    MACHINE(&direct, &datagrams);
    CHECK(!pdd_choose("efa,efa", "10.0.0.4", 0, recorded_getinfo, little, sizeof little));
    CHECK(strlen(little) == sizeof little - 1 && !strncmp(little, "efa: fabric efa-direct", 22));
}

/* ---- registration ---- */
static const struct pdd_region HOST = {0x10000, 4096, .fd = -1, .cuda_device = -1, .dmabuf_fd = -1};
static const struct pdd_region CUDA = {0x7f0000000000, 1 << 21, .fd = -1, .cuda_device = 3, .dmabuf_fd = -1};
static const struct pdd_region CUDA_DMABUF = {0x7f0000000000, 1 << 21, .fd = -1, .cuda_device = 3, .dmabuf_fd = 9};

static void expect_by_address(const struct pdd_registration *r, const struct pdd_region *region)
{
    CHECK(!r->flags && r->attr.iov_count == 1 && r->attr.mr_iov == &r->range);
    CHECK((uint64_t)r->range.iov_base == region->address && r->range.iov_len == region->length_bytes);
    CHECK(r->attr.access == (FI_WRITE | FI_REMOTE_WRITE) && !r->attr.offset &&
          r->attr.iface == (region->cuda_device < 0 ? FI_HMEM_SYSTEM : FI_HMEM_CUDA));
}

static void test_registration_of_host_memory(void)
{
    struct pdd_registration r;
    struct pdd_terms t = terms_of(&net, V1_17);
    CHECK(!pdd_describe_region(&HOST, &t, 77, &r));
    expect_by_address(&r, &HOST);
    CHECK(r.attr.requested_key == 77 && !r.attr.device.reserved);
    t = terms_of(&efa_gpu, V1_20);
    CHECK(!pdd_describe_region(&HOST, &t, 77, &r));
    expect_by_address(&r, &HOST);
    CHECK(!r.attr.requested_key); /* the provider's */
}

static void test_registration_of_cuda_memory(void)
{
    struct pdd_registration r;
    const struct recorded *without[] = {&net, &shm_gpu, &verbs, &efa};
    for (size_t i = 0; i < sizeof without / sizeof *without; i++) {
        struct pdd_terms t = terms_of(without[i], V1_20);
        CHECK(pdd_describe_region(&CUDA, &t, 0, &r) == -EOPNOTSUPP);
        CHECK(pdd_describe_region(&CUDA_DMABUF, &t, 0, &r) == -EOPNOTSUPP);
    }
    struct pdd_terms old = terms_of(&efa_gpu, V1_17), t = terms_of(&verbs_gpu, V1_20);
    CHECK(!pdd_describe_region(&CUDA, &t, 0, &r));
    expect_by_address(&r, &CUDA);
    CHECK(r.attr.device.cuda == 3);
    CHECK(!pdd_describe_region(&CUDA_DMABUF, &old, 0, &r));
    expect_by_address(&r, &CUDA_DMABUF);
    CHECK(!pdd_describe_region(&CUDA_DMABUF, &t, 0, &r));
    CHECK(r.attr.iface == FI_HMEM_CUDA && r.attr.device.cuda == 3 && r.attr.iov_count == 1);
#ifdef FI_MR_DMABUF
    CHECK(r.flags == FI_MR_DMABUF && r.attr.dmabuf == &r.dmabuf);
    CHECK(r.dmabuf.fd == 9 && !r.dmabuf.offset && r.dmabuf.len == 1 << 21);
    CHECK((uint64_t)r.dmabuf.base_addr == CUDA_DMABUF.address);
#else
    expect_by_address(&r, &CUDA_DMABUF);
#endif
}

int main(void)
{
    test_order_of_choice();
    test_efa_is_asked_without_shm_and_by_device();
    test_device_memory_is_asked_for();
    test_terms();
    test_refusals();
    test_why_has_an_end();
    test_registration_of_host_memory();
    test_registration_of_cuda_memory();
    puts("ok");
    return 0;
}
