/* The objects that live as long as the port. */
#include "pdd_copy.h"

#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

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

/* ---- fabric ---- */
/* Whether it works at all, and what its endpoints are like. */
static int try_nic(struct pdd_port *port, struct nic *nic)
{
    struct endpoint endpoint;
    uint8_t address[MAX_ADDRESS_BYTES];
    int rc = pdd_endpoint_open(port, nic, NULL, &endpoint);
    if (rc)
        return rc;
    rc = pdd_endpoint_name(&endpoint, address, &nic->address_bytes);
    nic->wakes = endpoint.fd >= 0;
    pdd_endpoint_close(&endpoint);
    return rc;
}

static void close_fabric(struct pdd_port *port)
{
    for (uint32_t i = 0; i < port->num_peers; i++)
        pdd_free_peer(port, &port->peers[i]);
    for (uint32_t i = 0; i < port->num_memories; i++)
        pdd_free_memory(port, &port->memories[i]);
    pdd_copying_close(port);
    for (uint32_t i = 0; i < port->num_nics; i++)
        pdd_nic_close(&port->nics[i]);
}

/* ---- port ---- */
/* A write is posted by whatever NIC has credit: what one of them cannot, none is asked. */
static void set_limits(struct pdd_port *port)
{
    port->max_iov = MAX_IOV;
    port->max_message_bytes = UINT64_MAX;
    port->wakes = true;
    for (uint32_t i = 0; i < port->num_nics; i++) {
        const struct pdd_terms *terms = &port->nics[i].terms;
        port->max_iov = (uint32_t)least(port->max_iov, terms->max_iov);
        port->max_message_bytes = least(port->max_message_bytes, terms->max_message_bytes);
        port->wakes = port->wakes && port->nics[i].wakes;
    }
}

static int allocate(struct pdd_port *port, uint32_t max_writes)
{
    port->max_writes = max_writes;
    port->slot_writes = calloc(max_writes, sizeof *port->slot_writes);
    port->slot_cancelled = calloc(max_writes, sizeof *port->slot_cancelled);
    port->free_slots = calloc(max_writes, sizeof *port->free_slots);
    port->live = calloc(max_writes, sizeof *port->live);
    port->max_fds = MIN_FDS;
    port->fds = calloc(MIN_FDS, sizeof *port->fds);
    /* Of commands there are at most: each write and its cancel, the cancel of the one that had its slot before, a
     * reached count for each reservation, one call that waits, and the stop. */
    if (!pdd_ring_init(&port->commands, 3 * max_writes + MAX_COUNTS + 2, sizeof(struct command)) ||
        !pdd_ring_init(&port->events, max_writes + MAX_COUNTS + MAX_STRAYS + 1, sizeof(struct pdd_event)) ||
        !port->slot_writes || !port->slot_cancelled || !port->free_slots || !port->live || !port->fds)
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
static int start_thread(struct pdd_port *port, const struct pdd_options *options)
{
    sigset_t all, before;
    cpu_set_t cores;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    CPU_ZERO(&cores);
    for (uint32_t i = 0; i < options->num_cores; i++)
        if (options->cores[i] < CPU_SETSIZE)
            CPU_SET(options->cores[i], &cores);
    if (options->num_cores)
        pthread_attr_setaffinity_np(&attributes, sizeof cores, &cores);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = -pthread_create(&port->thread, &attributes, pdd_progress, port);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
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

static int open_nic(struct pdd_port *port, const struct pdd_options *options, char *message, uint32_t message_bytes)
{
    struct nic *nic = &port->nics[port->num_nics++];
    char offers[512], why[512];
    int rc = pdd_nic_open(nic, options->providers, options->cuda ? FI_HMEM : 0, why, sizeof why);
    if (rc == -ENODATA) {
        pdd_list_offers(fi_getinfo, offers, sizeof offers);
        return fail(message, message_bytes, rc,
                    "libfabric %s has none of the providers [%s] with one-sided writes%s on host %s%s%s%s; it offers: %s",
                    fi_tostr("", FI_TYPE_VERSION), options->providers, options->cuda ? " of CUDA memory" : "", nic->host,
                    why[0] ? " (" : "", why, why[0] ? ")" : "", offers);
    }
    if (!rc)
        rc = try_nic(port, nic);
    return rc ? fail(message, message_bytes, rc, "libfabric provider %s cannot be opened on host %s: %s",
                     nic->info->fabric_attr->prov_name, nic->host, fi_strerror(-rc))
              : 0;
}

static int open_nics(struct pdd_port *port, const struct pdd_options *options, char *message, uint32_t message_bytes)
{
    const char *host = options->hosts;
    while (true) {
        size_t length = strcspn(host, ",");
        if (port->num_nics == MAX_NICS || length >= sizeof port->nics[0].host)
            return fail(message, message_bytes, -E2BIG, "a port has at most %d NICs; asked for were %s", MAX_NICS,
                        options->hosts);
        memcpy(port->nics[port->num_nics].host, host, length);
        int rc = open_nic(port, options, message, message_bytes);
        if (rc || !host[length])
            return rc;
        host += length + 1;
    }
}

static int open_port(struct pdd_port *port, const struct pdd_options *options, char *message, uint32_t message_bytes)
{
    if (options->max_writes > MAX_WRITES)
        return fail(message, message_bytes, -E2BIG, "a port takes at most %d writes at once; asked for were %u",
                    MAX_WRITES, options->max_writes);
    int rc = allocate(port, options->max_writes ? options->max_writes : 4096);
    if (rc)
        return fail(message, message_bytes, rc, "no memory or no file descriptor for a port: %s", strerror(-rc));
    rc = open_nics(port, options, message, message_bytes);
    if (rc)
        return rc;
    set_limits(port);
    snprintf(port->provider, sizeof port->provider, "%s", port->nics[0].info->fabric_attr->prov_name);
    port->spin_ns = options->spin_us * 1000ull;
    if (options->copies)
        pdd_copying_open(port);
    rc = start_thread(port, options);
    return rc ? fail(message, message_bytes, rc, "the progress thread cannot be started, on %s: %s",
                     options->num_cores ? "the cores asked for" : "any core", strerror(-rc))
              : 0;
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
    list_init(&port->endpoints);
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
    free(port->slot_writes);
    free(port->slot_cancelled);
    free(port->free_slots);
    free(port->live);
    free(port->fds);
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
    snprintf(info->provider, sizeof info->provider, "%s", port->provider);
    snprintf(info->library_version, sizeof info->library_version, "%u.%u", FI_MAJOR(version), FI_MINOR(version));
    info->pages_per_write = port->max_iov;
    info->max_write_bytes = port->max_message_bytes;
    info->num_nics = port->num_nics;
    info->fences = 1;
    info->copies = port->copying != NULL;
}

const char *pdd_strerror(int error) { return fi_strerror(error < 0 ? -error : error); }
