/* The objects that live as long as the port. */
#include "pdd_port.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { CQ_SIZE = 8192 };

/* ---- the process's signal handlers ---- */
static void save_handlers(struct sigaction *saved)
{
    for (int number = 1; number < NSIG; number++)
        if (sigaction(number, NULL, &saved[number]))
            saved[number].sa_flags = -1;
}

static void restore_handlers(const struct sigaction *saved)
{
    for (int number = 1; number < NSIG; number++)
        if (saved[number].sa_flags != -1)
            sigaction(number, &saved[number], NULL);
}

/* ---- endpoints ---- */
static int open_cq_in_wait_set(struct pdd_port *port, struct endpoint *endpoint)
{
    struct fi_wait_attr wait = {.wait_obj = FI_WAIT_FD};
    struct fi_cq_attr attr = {.size = CQ_SIZE, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_SET};
    int rc = fi_wait_open(port->fabric, &wait, &endpoint->wait_set);
    attr.wait_set = endpoint->wait_set;
    if (!rc)
        rc = fi_cq_open(port->domain, &attr, &endpoint->cq, NULL);
    return rc ? rc : fi_control(&endpoint->wait_set->fid, FI_GETWAIT, &endpoint->fd);
}

static int open_cq(struct pdd_port *port, struct endpoint *endpoint)
{
    struct fi_cq_attr attr = {.size = CQ_SIZE, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_FD};
    if (port->terms.wait_object == FI_WAIT_SET)
        return open_cq_in_wait_set(port, endpoint);
    if (fi_cq_open(port->domain, &attr, &endpoint->cq, NULL)) {
        attr.wait_obj = FI_WAIT_NONE;
        return fi_cq_open(port->domain, &attr, &endpoint->cq, NULL);
    }
    return fi_control(&endpoint->cq->fid, FI_GETWAIT, &endpoint->fd);
}

/* Without this EFA may copy device memory through the host, with calls of CUDA on this thread. Other providers have no
 * such option and make no such copies. */
static int set_options(const struct pdd_terms *terms, struct fid_ep *ep)
{
    int required = FI_HMEM_P2P_REQUIRED;
    if (!terms->requires_p2p)
        return 0;
    return fi_setopt(&ep->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &required, sizeof required);
}

int pdd_endpoint_open(struct pdd_port *port, struct endpoint *endpoint)
{
    struct fi_av_attr av = {.type = FI_AV_UNSPEC, .count = 1};
    *endpoint = (struct endpoint){.fd = -1};
    int rc = open_cq(port, endpoint);
    if (!rc)
        rc = fi_endpoint(port->domain, port->fabric_info, &endpoint->ep, NULL);
    if (!rc)
        rc = set_options(&port->terms, endpoint->ep);
    if (!rc)
        rc = fi_av_open(port->domain, &av, &endpoint->av, NULL);
    if (!rc)
        rc = fi_ep_bind(endpoint->ep, &endpoint->av->fid, 0);
    if (!rc)
        rc = fi_ep_bind(endpoint->ep, &endpoint->cq->fid, FI_TRANSMIT | FI_RECV);
    if (!rc)
        rc = fi_enable(endpoint->ep);
    if (rc)
        pdd_endpoint_close(endpoint);
    return rc;
}

void pdd_endpoint_close(struct endpoint *endpoint)
{
    struct fid *fids[] = {
        endpoint->ep ? &endpoint->ep->fid : NULL,
        endpoint->av ? &endpoint->av->fid : NULL,
        endpoint->cq ? &endpoint->cq->fid : NULL,
        endpoint->wait_set ? &endpoint->wait_set->fid : NULL,
    };
    for (size_t i = 0; i < sizeof fids / sizeof *fids; i++)
        if (fids[i])
            fi_close(fids[i]);
    *endpoint = (struct endpoint){.fd = -1};
}

int pdd_endpoint_name(const struct endpoint *endpoint, uint8_t *address, size_t *address_bytes)
{
    *address_bytes = MAX_ADDRESS_BYTES;
    return fi_getname(&endpoint->ep->fid, address, address_bytes);
}

static int open_fabric(struct pdd_port *port)
{
    struct fi_info *info = port->fabric_info;
    int rc = fi_fabric(info->fabric_attr, &port->fabric, NULL);
    if (!rc)
        rc = fi_domain(port->fabric, info, &port->domain, NULL);
    if (!rc)
        rc = pdd_endpoint_open(port, &port->endpoint);
    if (!rc)
        rc = pdd_endpoint_name(&port->endpoint, port->address, &port->address_bytes);
    return rc;
}

static void close_fabric(struct pdd_port *port)
{
    for (uint32_t i = 0; i < port->num_peers; i++)
        pdd_free_peer(port, &port->peers[i]);
    for (uint32_t i = 0; i < port->num_memories; i++)
        pdd_free_memory(port, &port->memories[i]);
    pdd_endpoint_close(&port->endpoint);
    if (port->domain)
        fi_close(&port->domain->fid);
    if (port->fabric)
        fi_close(&port->fabric->fid);
}

/* ---- port ---- */
static void set_limits(struct pdd_port *port, const struct pdd_options *options)
{
    port->terms = pdd_terms(port->fabric_info);
    port->max_iov = port->terms.max_iov;
    port->max_in_flight = port->terms.max_in_flight;
    port->max_message_bytes = port->terms.max_message_bytes;
    port->spin_ns = options->spin_us * 1000ull;
}

static int allocate(struct pdd_port *port, uint32_t max_writes)
{
    port->max_writes = max_writes;
    port->slot_writes = calloc(max_writes, sizeof *port->slot_writes);
    port->slot_cancelled = calloc(max_writes, sizeof *port->slot_cancelled);
    port->free_slots = calloc(max_writes, sizeof *port->free_slots);
    port->live = calloc(max_writes, sizeof *port->live);
    /* Of commands there are at most: each write and its cancel, a reached count for each reservation, one call that
     * waits, and the stop. */
    if (!pdd_ring_init(&port->commands, 2 * max_writes + MAX_COUNTS + 2, sizeof(struct command)) ||
        !pdd_ring_init(&port->events, max_writes + MAX_COUNTS + MAX_STRAYS + 1, sizeof(struct pdd_event)) ||
        !port->slot_writes || !port->slot_cancelled || !port->free_slots || !port->live)
        return -ENOMEM;
    while (port->num_free_slots < max_writes) {
        port->free_slots[port->num_free_slots] = max_writes - 1 - port->num_free_slots;
        port->num_free_slots++;
    }
    port->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    port->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return port->wake_fd < 0 || port->event_fd < 0 ? -errno : 0;
}

/* The progress thread takes no signals: they belong to the process's main thread. */
static int start_thread(struct pdd_port *port)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = -pthread_create(&port->thread, NULL, pdd_progress, port);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    port->closed = rc != 0;
    return rc;
}

static int fail(char *message, uint32_t message_bytes, int rc, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, message_bytes, format, arguments);
    va_end(arguments);
    return rc;
}

static int open_port(struct pdd_port *port, const struct pdd_options *options, char *message, uint32_t message_bytes)
{
    char offers[512], why[512];
    int rc = allocate(port, options->max_writes ? options->max_writes : 4096);
    if (rc)
        return fail(message, message_bytes, rc, "no memory or no file descriptor for a port: %s", strerror(-rc));
    port->fabric_info = pdd_choose(options->providers, options->host, 0, fi_getinfo, why, sizeof why);
    if (!port->fabric_info) {
        pdd_list_offers(fi_getinfo, offers, sizeof offers);
        return fail(message, message_bytes, -ENODATA,
                    "libfabric %s has none of the providers [%s] with one-sided writes on host %s%s%s%s; it offers: %s",
                    fi_tostr("", FI_TYPE_VERSION), options->providers, options->host, why[0] ? " (" : "", why,
                    why[0] ? ")" : "", offers);
    }
    set_limits(port, options);
    rc = open_fabric(port);
    if (rc)
        return fail(message, message_bytes, rc, "libfabric provider %s cannot be opened on host %s: %s",
                    port->fabric_info->fabric_attr->prov_name, options->host, fi_strerror(-rc));
    rc = start_thread(port);
    return rc ? fail(message, message_bytes, rc, "the progress thread cannot be started: %s", strerror(-rc)) : 0;
}

int pdd_open(const struct pdd_options *options, pdd_port **out, char *message, uint32_t message_bytes)
{
    struct sigaction handlers[NSIG];
    struct pdd_port *port = NULL;
    *out = NULL;
    if (posix_memalign((void **)&port, PDD_CACHE_LINE, sizeof *port))
        return fail(message, message_bytes, -ENOMEM, "no memory for a port");
    memset(port, 0, sizeof *port);
    port->wake_fd = port->event_fd = -1;
    port->closed = true;
    /* libfabric takes SIGINT, SIGTERM, SIGBUS and SIGSEGV for itself while it opens. */
    save_handlers(handlers);
    int rc = open_port(port, options, message, message_bytes);
    restore_handlers(handlers);
    if (rc) {
        close_fabric(port);
        pdd_free(port);
        return rc;
    }
    *out = port;
    return 0;
}

void pdd_close(pdd_port *port)
{
    if (port->closed)
        return;
    port->closed = true;
    struct command stop = {.kind = COMMAND_STOP};
    pdd_ring_push(&port->commands, &stop);
    pdd_wake(port);
    pthread_join(port->thread, NULL);
    close_fabric(port);
}

void pdd_free(pdd_port *port)
{
    pdd_close(port);
    for (uint32_t slot = 0; port->slot_writes && slot < port->max_writes; slot++)
        free(port->slot_writes[slot]);
    if (port->fabric_info)
        fi_freeinfo(port->fabric_info);
    free(port->slot_writes);
    free(port->slot_cancelled);
    free(port->free_slots);
    free(port->live);
    free(port->commands.slots);
    free(port->events.slots);
    if (port->wake_fd >= 0)
        close(port->wake_fd);
    if (port->event_fd >= 0)
        close(port->event_fd);
    free(port);
}

void pdd_get_info(const pdd_port *port, struct pdd_info *info)
{
    uint32_t version = fi_version();
    memset(info, 0, sizeof *info);
    snprintf(info->provider, sizeof info->provider, "%s", port->fabric_info->fabric_attr->prov_name);
    snprintf(info->library_version, sizeof info->library_version, "%u.%u", FI_MAJOR(version), FI_MINOR(version));
    info->pages_per_write = port->max_iov;
    info->max_write_bytes = port->max_message_bytes;
    info->fences = 1;
}

const char *pdd_strerror(int error) { return fi_strerror(error < 0 ? -error : error); }

int pdd_address(const pdd_port *port, uint8_t *address, uint32_t max_bytes)
{
    if (port->address_bytes > max_bytes)
        return -ENOSPC;
    memcpy(address, port->address, port->address_bytes);
    return (int)port->address_bytes;
}
