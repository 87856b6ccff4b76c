/* What the library does under terms that no provider here sets: with a domain that only writes down its calls. */
#include "pdd_address.h"
#include "pdd_copy.h"

#include <stdio.h>

#define CHECK(what)                                                                                                    \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s does not hold; the calls were: %s\n", __FILE__, __LINE__, #what, calls);        \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* ---- a domain that writes down its calls ---- */
static char calls[1024];
static const char *failing = "none"; /* the call that fails */
static struct fi_mr_attr described;
static uint64_t register_flags, refused_flags;
static int p2p = -1;

static int call(const char *name)
{
    snprintf(calls + strlen(calls), sizeof calls - strlen(calls), "%s ", name);
    return strcmp(name, failing) ? 0 : -FI_ENOSYS;
}

static const char *name_of(const struct fid *fid)
{
    switch (fid->fclass) {
    case FI_CLASS_EP:
        return "ep";
    case FI_CLASS_MR:
        return "mr";
    case FI_CLASS_CQ:
        return "cq";
    default:
        return "av";
    }
}

static int call_on(const char *what, const struct fid *fid)
{
    char name[32];
    snprintf(name, sizeof name, "%s-%s", what, name_of(fid));
    return call(name);
}

static int fake_close(struct fid *fid)
{
    int rc = call_on("close", fid);
    free(fid);
    return rc;
}

static int fake_bind(struct fid *fid, struct fid *to, uint64_t flags)
{
    (void)flags;
    return fid->fclass == FI_CLASS_MR ? call(to->fclass == FI_CLASS_EP ? "mr-to-ep" : "mr-to-other") : 0;
}

static int fake_control(struct fid *fid, int command, void *argument)
{
    if (command == FI_GETWAIT)
        *(int *)argument = 17;
    return command == FI_ENABLE ? call_on("enable", fid) : 0;
}

static int fake_setopt(fid_t fid, int level, int option, const void *value, size_t length)
{
    (void)fid;
    if (level == FI_OPT_ENDPOINT && option == FI_OPT_FI_HMEM_P2P && length == sizeof(int))
        p2p = *(const int *)value;
    return call("setopt");
}

static int fake_getname(fid_t fid, void *address, size_t *bytes)
{
    (void)fid;
    memset(address, 7, 32);
    *bytes = 32;
    return call("getname");
}

static struct fi_ops fid_ops = {.size = sizeof fid_ops, .close = fake_close, .bind = fake_bind, .control = fake_control};
static struct fi_ops_ep ep_ops = {.size = sizeof ep_ops, .setopt = fake_setopt};
static struct fi_ops_cm cm_ops = {.size = sizeof cm_ops, .getname = fake_getname};

static struct fid made(size_t class) { return (struct fid){.fclass = class, .ops = &fid_ops}; }

static int fake_cq_open(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **cq, void *context)
{
    (void)domain, (void)context;
    if (call(attr->wait_obj == FI_WAIT_FD ? "cq-fd" : "cq"))
        return -FI_ENOSYS;
    *cq = calloc(1, sizeof **cq);
    (*cq)->fid = made(FI_CLASS_CQ);
    return 0;
}

static int fake_av_open(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **av, void *context)
{
    (void)domain, (void)attr, (void)context;
    *av = calloc(1, sizeof **av);
    (*av)->fid = made(FI_CLASS_AV);
    return 0;
}

static int fake_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep, void *context)
{
    (void)domain, (void)info, (void)context;
    *ep = calloc(1, sizeof **ep);
    (*ep)->fid = made(FI_CLASS_EP);
    (*ep)->ops = &ep_ops;
    (*ep)->cm = &cm_ops;
    return call("ep");
}

static int fake_regattr(struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **mr)
{
    (void)fid;
    described = *attr;
    register_flags = flags;
    if (call("mr") || flags & refused_flags)
        return -FI_ENOSYS;
    *mr = calloc(1, sizeof **mr);
    (*mr)->fid = made(FI_CLASS_MR);
    (*mr)->key = attr->requested_key ? attr->requested_key : 4711;
    return 0;
}

static struct fi_ops_domain domain_ops = {
    .size = sizeof domain_ops,
    .av_open = fake_av_open,
    .cq_open = fake_cq_open,
    .endpoint = fake_endpoint,
};
static struct fi_ops_mr mr_ops = {.size = sizeof mr_ops, .regattr = fake_regattr};
static struct fid_domain domain = {.ops = &domain_ops, .mr = &mr_ops};

/* ---- tests ---- */
static const uint64_t ADDRESS = 0x7f0000001000;
static struct pdd_port port;
static struct pdd_memory memory;
static struct target_address told;

static int register_region(struct pdd_terms terms, const struct pdd_region *region)
{
    struct call request = {.region = region, .memory = &memory};
    calls[0] = 0;
    p2p = -1;
    port.nics[0].domain = &domain;
    port.nics[0].terms = terms;
    port.num_nics = 1;
    if (!port.endpoints.next)
        list_init(&port.endpoints);
    int rc = pdd_do_register(&port, &request);
    if (!rc)
        CHECK(pdd_read_address(memory.address, memory.address_bytes, &told) && told.num_nics == 1 && !told.copies);
    return rc;
}

static int register_under(struct pdd_terms terms)
{
    const struct pdd_region host = {ADDRESS, 8192, .fd = -1, .cuda_device = -1, .dmabuf_fd = -1};
    return register_region(terms, &host);
}

static const char *release(void)
{
    struct call request = {.handle = memory.memory};
    calls[0] = 0;
    CHECK(!pdd_do_release(&port, &request));
    CHECK(pdd_do_release(&port, &request) == -ENOENT);
    return calls;
}

static void test_keys_and_addresses(void)
{
    CHECK(!register_under((struct pdd_terms){.key_bytes = 4, .virtual_addresses = true, .wait_object = FI_WAIT_FD}));
    CHECK(!strcmp(calls, "mr cq-fd ep enable-ep getname "));
    CHECK(told.nics[0].key == 4711 && told.nics[0].base == ADDRESS && told.nics[0].num_bytes == 32);
    CHECK(!described.requested_key && described.iface == FI_HMEM_SYSTEM && !register_flags);
    CHECK(!strcmp(release(), "close-ep close-av close-cq close-mr "));
    bool wide = false;
    for (int i = 0; i < 8; i++) {
        CHECK(!register_under((struct pdd_terms){.key_bytes = 4, .chooses_keys = true, .wait_object = FI_WAIT_FD}));
        uint64_t key = told.nics[0].key;
        CHECK(key == described.requested_key && !(key >> 32) && !told.nics[0].base);
        wide |= key > 0xffff;
        release();
    }
    CHECK(wide);
}

static void test_memory_that_is_bound_to_its_endpoint(void)
{
    struct pdd_terms terms = {.key_bytes = 8, .chooses_keys = true, .binds_memory = true, .wait_object = FI_WAIT_FD};
    CHECK(!register_under(terms));
    CHECK(!strcmp(calls, "mr cq-fd ep enable-ep mr-to-ep enable-mr getname "));
    CHECK(!strcmp(release(), "close-mr close-ep close-av close-cq ")); /* an endpoint with a key on it is busy */
    failing = "enable-mr";
    CHECK(register_under(terms) == -FI_ENOSYS);
    CHECK(strstr(calls, "enable-mr close-mr close-ep close-av close-cq "));
    failing = "none";
}

static void test_an_endpoint_without_a_descriptor_is_closed_all_the_same(void)
{
    struct pdd_terms terms = {.key_bytes = 4, .wait_object = FI_WAIT_FD};
    failing = "cq-fd";
    CHECK(!register_under(terms));
    CHECK(!strcmp(calls, "mr cq-fd cq ep enable-ep getname "));
    CHECK(pdd_find_memory(&port, memory.memory)->at[0].endpoint.fd == -1);
    CHECK(!strcmp(release(), "close-ep close-av close-cq close-mr "));
    terms.lingers = true;
    CHECK(!register_under(terms));
    CHECK(!strcmp(release(), "close-mr "));
    calls[0] = 0;
    pdd_free_memory(&port, &port.memories[(memory.memory & 0xffff) - 1]);
    CHECK(!strcmp(calls, "close-ep close-av close-cq "));
    failing = "none";
}

static void test_device_memory_must_not_be_copied_through_the_host(void)
{
    struct pdd_terms terms = {.key_bytes = 4, .requires_p2p = true, .wait_object = FI_WAIT_FD};
    CHECK(!register_under(terms));
    CHECK(!strcmp(calls, "mr cq-fd ep setopt enable-ep getname ") && p2p == FI_HMEM_P2P_REQUIRED);
    release();
    failing = "setopt";
    CHECK(register_under(terms) == -FI_ENOSYS); /* rather no port than one that copies */
    CHECK(strstr(calls, "setopt close-ep close-cq close-mr "));
    failing = "none";
}

static void test_memory_of_a_device(void)
{
    struct pdd_terms terms = {.key_bytes = 8, .virtual_addresses = true, .wait_object = FI_WAIT_FD};
    struct pdd_region region = {ADDRESS, 8192, .fd = -1, .cuda_device = 3, .dmabuf_fd = 9};
    CHECK(register_region(terms, &region) == -EOPNOTSUPP && !calls[0]);
    terms.device_memory = terms.dmabuf = true;
    struct copying copying = {0};
    port.copying = &copying; /* peers of this machine may copy to the host's memory, but not to a device's */
    CHECK(!register_region(terms, &region));
    port.copying = NULL;
    CHECK(described.iface == FI_HMEM_CUDA && described.device.cuda == 3 && told.nics[0].base == ADDRESS);
#ifdef FI_MR_DMABUF
    CHECK(register_flags == FI_MR_DMABUF);
    refused_flags = FI_MR_DMABUF; /* by a kernel that has none: the address is told as well */
    release();
    CHECK(!register_region(terms, &region) && !strcmp(calls, "mr mr cq-fd ep enable-ep getname "));
    refused_flags = 0;
#endif
    CHECK(!register_flags && described.iface == FI_HMEM_CUDA && described.device.cuda == 3);
    CHECK(!strcmp(release(), "close-ep close-av close-cq close-mr "));
}

/* Who is not fenced may still write: the port says so, and ends. */
static void test_a_fence_that_fails_fails_the_port(void)
{
    struct call request = {0};
    CHECK(!register_under((struct pdd_terms){.key_bytes = 4, .chooses_keys = true, .wait_object = FI_WAIT_FD}));
    request.handle = memory.memory;
    failing = "close-ep";
    CHECK(pdd_do_release(&port, &request) == -FI_ENOSYS && port.breaking == ENOSYS);
    failing = "none";
    port.breaking = 0;
}

int main(void)
{
    test_keys_and_addresses();
    test_memory_that_is_bound_to_its_endpoint();
    test_an_endpoint_without_a_descriptor_is_closed_all_the_same();
    test_device_memory_must_not_be_copied_through_the_host();
    test_memory_of_a_device();
    test_a_fence_that_fails_fails_the_port();
    puts("ok");
    return 0;
}
