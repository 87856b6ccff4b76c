/* See fake_fabric.h. One lock for all: ports have a thread each. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "fake_fabric.h"
#include "checks.h"

#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_OBJECTS = 8192, MAX_FLIGHTS = 8192, MAX_RANGES = 8, ADDRESS_BYTES = 8 };

struct entry {
    struct fi_cq_data_entry told;
    int error; /* 0: none */
};

struct cq {
    struct fid_cq fid; /* first, here and below */
    int fd;
    struct entry *entries;
    uint32_t num_entries, max_entries;
};

struct av {
    struct fid_av fid;
    uint64_t number; /* of the one endpoint that was put in */
};

struct ep {
    struct fid_ep fid;
    uint64_t number;
    struct cq *cq;
    struct av *av;
    uint32_t num_posted, num_bound, storm;
};

struct mr {
    struct fid_mr fid;
    uint8_t *base;
    uint64_t length_bytes;
    struct ep *ep; /* NULL: of any endpoint */
    bool enabled;
};

struct flight {
    struct ep *from;
    uint64_t to;
    struct iovec local[MAX_RANGES];
    struct mr *sources[MAX_RANGES];
    struct fi_rma_iov remote[MAX_RANGES];
    size_t num_ranges;
    void *context;
    uint32_t data;
};

static struct {
    pthread_mutex_t lock;
    uint64_t random, last_number, last_key;
    struct fake_odds odds;
    bool hold, breaking;
    const char *provider;
    uint64_t mr_mode, max_message_bytes;
    size_t max_iov, num_in_flight;
    struct fid *open[MAX_OBJECTS];
    uint32_t num_open;
    struct flight flights[MAX_FLIGHTS];
    uint32_t num_flights;
    uint64_t arrived, arrived_of[FAKE_SLOTS][FAKE_GENERATIONS];
} fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .provider = "fake"};
static _Atomic uint64_t skipped_ns;

static void lock(void) { pthread_mutex_lock(&fake.lock); }
static void unlock(void) { pthread_mutex_unlock(&fake.lock); }
static uint64_t below(uint64_t limit) { return next_random(&fake.random) % limit; }
static bool chance(uint32_t odds) { return odds && below(1000) < odds; }

/* ---- what is open ---- */
static void opened(struct fid *fid, size_t class, struct fi_ops *ops)
{
    *fid = (struct fid){.fclass = class, .ops = ops};
    CHECK(fake.num_open < MAX_OBJECTS);
    fake.open[fake.num_open++] = fid;
}

static bool is_open(const struct fid *fid)
{
    for (uint32_t i = 0; i < fake.num_open; i++)
        if (fake.open[i] == fid)
            return true;
    return false;
}

static struct ep *find_ep(uint64_t number)
{
    for (uint32_t i = 0; i < fake.num_open; i++)
        if (fake.open[i]->fclass == FI_CLASS_EP && ((struct ep *)fake.open[i])->number == number)
            return (struct ep *)fake.open[i];
    return NULL;
}

static struct mr *find_mr(uint64_t key, const struct ep *at)
{
    for (uint32_t i = 0; i < fake.num_open; i++) {
        struct mr *mr = (struct mr *)fake.open[i];
        if (fake.open[i]->fclass == FI_CLASS_MR && mr->fid.key == key && mr->enabled && (!mr->ep || mr->ep == at))
            return mr;
    }
    return NULL;
}

/* ---- delivery ---- */
/* Anywhere among those that wait to be read. */
static void tell(struct cq *cq, struct entry entry)
{
    uint64_t one = 1;
    if (cq->num_entries == cq->max_entries) {
        cq->max_entries = 2 * cq->max_entries + 64;
        cq->entries = realloc(cq->entries, cq->max_entries * sizeof *cq->entries);
        CHECK(cq->entries);
    }
    uint32_t at = (uint32_t)below(cq->num_entries + 1);
    memmove(cq->entries + at + 1, cq->entries + at, (cq->num_entries - at) * sizeof *cq->entries);
    cq->entries[at] = entry;
    cq->num_entries++;
    CHECK(write(cq->fd, &one, sizeof one) == sizeof one);
}

static void arrive(struct ep *at, uint32_t data)
{
    tell(at->cq, (struct entry){.told = {.flags = FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA, .data = data}});
}

/* As NICs do: a range that is not inside of an open registration is an error of the sender's. */
static bool place(const struct flight *flight, const struct ep *at)
{
    uint8_t *to[MAX_RANGES];
    for (size_t i = 0; i < flight->num_ranges; i++) {
        const struct fi_rma_iov *range = &flight->remote[i];
        const struct mr *mr = find_mr(range->key, at), *source = flight->sources[i];
        uint64_t base = fake.mr_mode & FI_MR_VIRT_ADDR && mr ? (uint64_t)mr->base : 0;
        if (!mr || !is_open(&source->fid.fid) || range->addr < base || range->len > mr->length_bytes ||
            range->addr - base > mr->length_bytes - range->len)
            return false;
        to[i] = mr->base + (range->addr - base);
    }
    for (size_t i = 0; i < flight->num_ranges; i++)
        memcpy(to[i], flight->local[i].iov_base, flight->local[i].iov_len);
    return true;
}

static void deliver(uint32_t number)
{
    struct flight flight = fake.flights[number];
    struct ep *to = find_ep(flight.to);
    struct entry entry = {.told = {.op_context = flight.context, .flags = FI_RMA | FI_WRITE}};
    fake.flights[number] = fake.flights[--fake.num_flights];
    bool fails = chance(fake.odds.error), reaches = to && (!fails || below(2)) && place(&flight, to);
    if (reaches && (!fails || below(2)))
        arrive(to, flight.data);
    if (fails || !reaches)
        entry.error = to ? FI_EIO : FI_ECONNRESET;
    for (int i = chance(fake.odds.twice); i >= 0; i--)
        tell(flight.from->cq, entry);
}

static void deliver_some(struct cq *cq)
{
    for (uint32_t i = 0; i < fake.num_flights && !fake.hold;)
        if (fake.flights[i].from->cq == cq && !chance(fake.odds.late))
            deliver(i);
        else
            i++;
}

static struct ep *ep_of(const struct cq *cq)
{
    for (uint32_t i = 0; i < fake.num_open; i++)
        if (fake.open[i]->fclass == FI_CLASS_EP && ((struct ep *)fake.open[i])->cq == cq)
            return (struct ep *)fake.open[i];
    return NULL;
}

/* What nobody has asked for. */
static void make_trouble(struct cq *cq)
{
    struct ep *ep = ep_of(cq);
    static char nothing[4096];
    if (ep && chance(fake.odds.stray))
        arrive(ep, (uint32_t)(FAKE_STRAY_SLOT + below(FAKE_STRAY_SLOT)) << 20 | (uint32_t)below(1 << 20));
    if (chance(fake.odds.foreign))
        tell(cq, (struct entry){.told = {.op_context = below(2) ? NULL : nothing + below(sizeof nothing),
                                         .flags = FI_RMA | FI_WRITE},
                                .error = below(2) ? 0 : FI_EIO});
}

static void count(const struct entry *entry)
{
    uint32_t data = (uint32_t)entry->told.data, slot = data >> 20, generation = data >> 7 & 0x1fff;
    if (!(entry->told.flags & FI_REMOTE_WRITE))
        return;
    fake.arrived += (data & 127) + 1;
    if (slot < FAKE_SLOTS && generation < FAKE_GENERATIONS)
        fake.arrived_of[slot][generation] += (data & 127) + 1;
}

static bool breaks(const struct cq *cq)
{
    struct ep *ep = ep_of(cq);
    return ep && (ep->num_posted ? chance(fake.odds.cq_error) : fake.breaking || chance(fake.odds.port_error));
}

static ssize_t read_entries(struct cq *cq, struct fi_cq_data_entry *entries, size_t max_entries)
{
    uint32_t number = 0;
    if (breaks(cq))
        return -FI_EIO;
    make_trouble(cq);
    deliver_some(cq);
    if (!cq->num_entries)
        return -FI_EAGAIN;
    if (cq->entries[0].error)
        return -FI_EAVAIL;
    for (; number < cq->num_entries && number < max_entries && !cq->entries[number].error; number++) {
        count(&cq->entries[number]);
        entries[number] = cq->entries[number].told;
    }
    cq->num_entries -= number;
    memmove(cq->entries, cq->entries + number, cq->num_entries * sizeof *cq->entries);
    return number;
}

static ssize_t fake_read(struct fid_cq *cq, void *entries, size_t max_entries)
{
    lock();
    ssize_t number = read_entries((struct cq *)cq, entries, max_entries);
    unlock();
    return number;
}

static ssize_t fake_readerr(struct fid_cq *fid, struct fi_cq_err_entry *error, uint64_t flags)
{
    struct cq *cq = (struct cq *)fid;
    (void)flags;
    lock();
    ssize_t number = cq->num_entries && cq->entries[0].error ? 1 : -FI_EAGAIN;
    if (number == 1) {
        error->op_context = cq->entries[0].told.op_context;
        error->err = cq->entries[0].error;
        cq->num_entries--;
        memmove(cq->entries, cq->entries + 1, cq->num_entries * sizeof *cq->entries);
    }
    unlock();
    return number;
}

static int fake_trywait(struct fid_fabric *fabric, struct fid **fids, int num_fids)
{
    struct cq *cq = (struct cq *)fids[0];
    uint64_t ignored;
    (void)fabric;
    CHECK(num_fids == 1);
    lock();
    bool waits = cq->num_entries > 0;
    for (uint32_t i = 0; i < fake.num_flights && !fake.hold; i++)
        waits |= fake.flights[i].from->cq == cq;
    if (!waits && read(cq->fd, &ignored, sizeof ignored) < 0)
        CHECK(errno == EAGAIN);
    unlock();
    return waits ? -FI_EAGAIN : FI_SUCCESS;
}

/* ---- posting ---- */
static int refuses(struct ep *ep)
{
    static const int errors[] = {FI_EIO, FI_ENOMEM, FI_EHOSTUNREACH, FI_ECANCELED, FI_EOTHER};
    if (ep->storm) {
        ep->storm--;
        return -FI_EAGAIN;
    }
    if (chance(fake.odds.storm))
        ep->storm = (uint32_t)below(200);
    if (chance(fake.odds.busy) || fake.num_flights == MAX_FLIGHTS)
        return -FI_EAGAIN;
    return chance(fake.odds.post_error) ? -errors[below(sizeof errors / sizeof *errors)] : 0;
}

/* What the library must never ask for. */
static void check_message(const struct fi_msg_rma *message)
{
    uint64_t local = 0, remote = 0;
    CHECK(message->iov_count && message->iov_count <= fake.max_iov && message->rma_iov_count <= fake.max_iov);
    for (size_t i = 0; i < message->iov_count; i++) {
        const struct mr *mr = message->desc[i];
        const uint8_t *from = message->msg_iov[i].iov_base;
        CHECK(is_open(&mr->fid.fid));
        CHECK(from >= mr->base && from + message->msg_iov[i].iov_len <= mr->base + mr->length_bytes);
        local += message->msg_iov[i].iov_len;
    }
    for (size_t i = 0; i < message->rma_iov_count; i++)
        remote += message->rma_iov[i].len;
    CHECK(local == remote && local <= fake.max_message_bytes);
}

static ssize_t fake_writemsg(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags)
{
    struct ep *ep = (struct ep *)fid;
    lock();
    CHECK(flags == (FI_REMOTE_CQ_DATA | FI_COMPLETION));
    CHECK(message->iov_count == message->rma_iov_count);
    check_message(message);
    int rc = refuses(ep);
    ep->num_posted++;
    if (!rc) {
        struct flight *flight = &fake.flights[fake.num_flights++];
        *flight = (struct flight){.from = ep,
                                  .to = ep->av->number,
                                  .num_ranges = message->iov_count,
                                  .context = message->context,
                                  .data = (uint32_t)message->data};
        memcpy(flight->local, message->msg_iov, message->iov_count * sizeof *flight->local);
        memcpy(flight->remote, message->rma_iov, message->iov_count * sizeof *flight->remote);
        for (size_t i = 0; i < message->iov_count; i++)
            flight->sources[i] = message->desc[i];
    }
    unlock();
    return rc;
}

/* ---- objects ---- */
static void forget_flights(const struct ep *ep)
{
    for (uint32_t i = 0; i < fake.num_flights;)
        if (fake.flights[i].from == ep)
            fake.flights[i] = fake.flights[--fake.num_flights];
        else
            i++;
}

/* A registration may be closed while a message of it is under way, which then must not find another at its place. */
static void forget_source(const struct mr *mr)
{
    static struct mr closed;
    for (uint32_t i = 0; i < fake.num_flights; i++)
        for (size_t k = 0; k < fake.flights[i].num_ranges; k++)
            if (fake.flights[i].sources[k] == mr)
                fake.flights[i].sources[k] = &closed;
}

static int close_object(struct fid *fid)
{
    CHECK(is_open(fid));
    if (fid->fclass == FI_CLASS_EP) {
        if (((struct ep *)fid)->num_bound)
            return -FI_EBUSY;
        forget_flights((struct ep *)fid);
    } else if (fid->fclass == FI_CLASS_MR) {
        forget_source((struct mr *)fid);
        if (((struct mr *)fid)->ep)
            ((struct mr *)fid)->ep->num_bound--;
    } else if (fid->fclass == FI_CLASS_CQ) {
        CHECK(!ep_of((struct cq *)fid));
        close(((struct cq *)fid)->fd);
        free(((struct cq *)fid)->entries);
    }
    for (uint32_t i = 0; i < fake.num_open; i++)
        if (fake.open[i] == fid)
            fake.open[i--] = fake.open[--fake.num_open];
    free(fid);
    return 0;
}

static int fake_close(struct fid *fid)
{
    lock();
    int rc = close_object(fid);
    unlock();
    return rc;
}

static int fake_bind(struct fid *fid, struct fid *to, uint64_t flags)
{
    (void)flags;
    lock();
    if (fid->fclass == FI_CLASS_MR) {
        ((struct mr *)fid)->ep = (struct ep *)to;
        ((struct ep *)to)->num_bound++;
    } else if (to->fclass == FI_CLASS_CQ) {
        ((struct ep *)fid)->cq = (struct cq *)to;
    } else {
        ((struct ep *)fid)->av = (struct av *)to;
    }
    unlock();
    return 0;
}

static int fake_control(struct fid *fid, int command, void *argument)
{
    lock();
    int rc = chance(fake.odds.open_error) ? -FI_ENOMEM : 0;
    if (command == FI_GETWAIT)
        *(int *)argument = ((struct cq *)fid)->fd;
    else if (fid->fclass == FI_CLASS_MR)
        ((struct mr *)fid)->enabled = true;
    unlock();
    return rc;
}

static int fake_getname(fid_t fid, void *address, size_t *bytes)
{
    lock();
    CHECK(*bytes >= ADDRESS_BYTES);
    memcpy(address, &((struct ep *)fid)->number, ADDRESS_BYTES);
    *bytes = ADDRESS_BYTES;
    unlock();
    return 0;
}

static int fake_insert(struct fid_av *av, const void *address, size_t number, fi_addr_t *out, uint64_t flags,
                       void *context)
{
    (void)flags, (void)context;
    lock();
    CHECK(number == 1);
    bool fails = chance(fake.odds.open_error);
    memcpy(&((struct av *)av)->number, address, ADDRESS_BYTES);
    *out = 0;
    unlock();
    return fails ? 0 : 1;
}

static struct fi_ops fid_ops = {.size = sizeof fid_ops, .close = fake_close, .bind = fake_bind, .control = fake_control};
static struct fi_ops_cq cq_ops = {.size = sizeof cq_ops, .read = fake_read, .readerr = fake_readerr};
static struct fi_ops_av av_ops = {.size = sizeof av_ops, .insert = fake_insert};
static struct fi_ops_cm cm_ops = {.size = sizeof cm_ops, .getname = fake_getname};
static struct fi_ops_rma rma_ops = {.size = sizeof rma_ops, .writemsg = fake_writemsg};

/* NULL: it fails. */
static void *make(size_t bytes, size_t class)
{
    struct fid *fid = chance(fake.odds.open_error) ? NULL : calloc(1, bytes);
    if (fid)
        opened(fid, class, &fid_ops);
    return fid;
}

static int fake_cq_open(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **out, void *context)
{
    (void)domain, (void)context;
    if (attr->wait_obj != FI_WAIT_FD)
        return -FI_ENOSYS;
    lock();
    struct cq *cq = make(sizeof *cq, FI_CLASS_CQ);
    if (cq) {
        cq->fid.ops = &cq_ops;
        cq->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        *out = &cq->fid;
    }
    unlock();
    return cq ? 0 : -FI_EMFILE;
}

static int fake_av_open(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **out, void *context)
{
    (void)domain, (void)attr, (void)context;
    lock();
    struct av *av = make(sizeof *av, FI_CLASS_AV);
    if (av) {
        av->fid.ops = &av_ops;
        *out = &av->fid;
    }
    unlock();
    return av ? 0 : -FI_ENOMEM;
}

static int fake_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **out, void *context)
{
    (void)domain, (void)info, (void)context;
    lock();
    struct ep *ep = make(sizeof *ep, FI_CLASS_EP);
    if (ep) {
        ep->fid.cm = &cm_ops;
        ep->fid.rma = &rma_ops;
        ep->number = ++fake.last_number;
        *out = &ep->fid;
    }
    unlock();
    return ep ? 0 : -FI_ENOMEM;
}

static int fake_regattr(struct fid *domain, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **out)
{
    static const int errors[] = {FI_ENOMEM, FI_ENOKEY, FI_EINVAL, FI_EBUSY};
    (void)domain, (void)flags;
    lock();
    int rc = chance(fake.odds.register_error) ? -errors[below(sizeof errors / sizeof *errors)] : 0;
    struct mr *mr = rc ? NULL : calloc(1, sizeof *mr);
    if (mr) {
        opened(&mr->fid.fid, FI_CLASS_MR, &fid_ops);
        mr->fid.mem_desc = mr;
        mr->fid.key = fake.mr_mode & FI_MR_PROV_KEY ? ++fake.last_key : attr->requested_key;
        mr->base = attr->mr_iov->iov_base;
        mr->length_bytes = attr->mr_iov->iov_len;
        mr->enabled = !(fake.mr_mode & FI_MR_ENDPOINT);
        *out = &mr->fid;
    }
    unlock();
    return rc;
}

static struct fi_ops_domain domain_ops = {
    .size = sizeof domain_ops, .av_open = fake_av_open, .cq_open = fake_cq_open, .endpoint = fake_endpoint};
static struct fi_ops_mr mr_ops = {.size = sizeof mr_ops, .regattr = fake_regattr};

static int fake_domain(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **out, void *context)
{
    (void)fabric, (void)info, (void)context;
    lock();
    struct fid_domain *domain = make(sizeof *domain, FI_CLASS_DOMAIN);
    if (domain) {
        domain->ops = &domain_ops;
        domain->mr = &mr_ops;
        *out = domain;
    }
    unlock();
    return domain ? 0 : -FI_ENODEV;
}

static struct fi_ops_fabric fabric_ops = {
    .size = sizeof fabric_ops, .domain = fake_domain, .trywait = fake_trywait};

/* ---- in front of libfabric ---- */
int __real_fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
                      const struct fi_info *hints, struct fi_info **list);
int __wrap_fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
                      const struct fi_info *hints, struct fi_info **list);
int __wrap_fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
                      const struct fi_info *hints, struct fi_info **list)
{
    const char *name = hints->fabric_attr->prov_name;
    if (!name || strcmp(name, fake.provider))
        return __real_fi_getinfo(version, node, service, flags, hints, list);
    struct fi_info *info = *list = fi_allocinfo();
    CHECK(info);
    lock();
    info->caps = hints->caps;
    info->ep_attr->type = FI_EP_RDM;
    info->ep_attr->max_msg_size = fake.max_message_bytes;
    info->domain_attr->mr_mode = (int)fake.mr_mode;
    info->domain_attr->mr_key_size = sizeof(uint64_t);
    info->domain_attr->cq_data_size = sizeof(uint32_t);
    info->domain_attr->name = strdup("fake");
    info->tx_attr->size = fake.num_in_flight;
    info->tx_attr->iov_limit = info->tx_attr->rma_iov_limit = fake.max_iov;
    info->fabric_attr->prov_name = strdup(fake.provider);
    info->fabric_attr->name = strdup("fake");
    unlock();
    return 0;
}

int __real_fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **out, void *context);
int __wrap_fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **out, void *context);
int __wrap_fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **out, void *context)
{
    if (!attr->name || strcmp(attr->name, "fake"))
        return __real_fi_fabric(attr, out, context);
    lock();
    struct fid_fabric *fabric = make(sizeof *fabric, FI_CLASS_FABRIC);
    if (fabric) {
        fabric->ops = &fabric_ops;
        *out = fabric;
    }
    unlock();
    return fabric ? 0 : -FI_ENODEV;
}

int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
    int rc = __real_clock_gettime(clock, now);
    uint64_t ns = (uint64_t)now->tv_nsec + atomic_load(&skipped_ns);
    now->tv_sec += (time_t)(ns / 1000000000u);
    now->tv_nsec = (long)(ns % 1000000000u);
    return rc;
}

/* ---- in front of the system ---- */
static _Atomic(const char *) refused;
void fake_refuse(const char *function) { atomic_store(&refused, function); }

static bool is_refused(const char *function)
{
    const char *name = atomic_load(&refused);
    if (!name || strcmp(name, function))
        return false;
    errno = EACCES;
    return true;
}

FILE *__real_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode) { return is_refused("fopen") ? NULL : __real_fopen(path, mode); }

int __real_bind(int socket, const struct sockaddr *address, socklen_t bytes);
int __wrap_bind(int socket, const struct sockaddr *address, socklen_t bytes);
int __wrap_bind(int socket, const struct sockaddr *address, socklen_t bytes)
{
    return is_refused("bind") ? -1 : __real_bind(socket, address, bytes);
}

/* ---- for tests ---- */
void fake_start(uint64_t seed, struct fake_odds odds)
{
    static const uint64_t modes[] = {0, FI_MR_PROV_KEY, FI_MR_VIRT_ADDR | FI_MR_PROV_KEY | FI_MR_LOCAL,
                                     FI_MR_ENDPOINT | FI_MR_VIRT_ADDR};
    lock();
    CHECK(!fake.num_open && !fake.num_flights);
    fake.random = seed_state(seed);
    fake.odds = odds;
    fake.hold = fake.breaking = false;
    fake.provider = "fake";
    fake.mr_mode = modes[below(sizeof modes / sizeof *modes)];
    fake.max_iov = 1 + below(MAX_RANGES);
    fake.num_in_flight = 1 + below(64);
    fake.max_message_bytes = 1024 << below(12);
    fake.arrived = 0;
    memset(fake.arrived_of, 0, sizeof fake.arrived_of);
    unlock();
}

void fake_calm(void)
{
    lock();
    fake.odds = (struct fake_odds){.late = fake.odds.late / 2};
    fake.hold = fake.breaking = false;
    for (uint32_t i = 0; i < fake.num_open; i++)
        if (fake.open[i]->fclass == FI_CLASS_EP)
            ((struct ep *)fake.open[i])->storm = 0;
    unlock();
}

void fake_rename(const char *provider)
{
    lock();
    fake.provider = provider;
    unlock();
}

void fake_hold(bool hold)
{
    lock();
    fake.hold = hold;
    unlock();
}

void fake_break_targets(void)
{
    lock();
    fake.breaking = true;
    unlock();
}

void fake_skip_ns(uint64_t ns) { atomic_fetch_add(&skipped_ns, ns); }

uint64_t fake_arrived(void)
{
    lock();
    uint64_t arrived = fake.arrived;
    unlock();
    return arrived;
}

uint64_t fake_arrived_of(uint32_t immediate)
{
    lock();
    uint64_t arrived = fake.arrived_of[immediate >> 20][immediate >> 7 & 0x1fff];
    unlock();
    return arrived;
}

uint32_t fake_num_open(void)
{
    lock();
    uint32_t number = fake.num_open;
    unlock();
    return number;
}

uint32_t fake_num_under_way(void)
{
    lock();
    uint32_t number = fake.num_flights;
    unlock();
    return number;
}
