/* NICs and endpoints: what libfabric opens for each address that a port listens on. */
#include "pdd_port.h"

#include <dirent.h>
#include <stdio.h>
#include <sys/socket.h>

enum { CQ_SIZE = 8192 };

static int open_cq_in_wait_set(struct endpoint *endpoint)
{
    struct fi_wait_attr wait = {.wait_obj = FI_WAIT_FD};
    struct fi_cq_attr attr = {.size = CQ_SIZE, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_SET};
    int rc = fi_wait_open(endpoint->nic->fabric, &wait, &endpoint->wait_set);
    attr.wait_set = endpoint->wait_set;
    if (!rc)
        rc = fi_cq_open(endpoint->nic->domain, &attr, &endpoint->cq, NULL);
    return rc ? rc : fi_control(&endpoint->wait_set->fid, FI_GETWAIT, &endpoint->fd);
}

static int open_cq(struct endpoint *endpoint)
{
    struct fi_cq_attr attr = {.size = CQ_SIZE, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_FD};
    if (endpoint->nic->terms.wait_object == FI_WAIT_SET)
        return open_cq_in_wait_set(endpoint);
    int rc = fi_cq_open(endpoint->nic->domain, &attr, &endpoint->cq, NULL);
    if (rc && endpoint->nic->wakes)
        return rc; /* out of descriptors: one that wakes nobody, among others that do, would be forgotten */
    if (rc) {
        attr.wait_obj = FI_WAIT_NONE;
        return fi_cq_open(endpoint->nic->domain, &attr, &endpoint->cq, NULL);
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

static int open_parts(struct endpoint *endpoint)
{
    struct fid_domain *domain = endpoint->nic->domain;
    struct fi_av_attr av = {.type = FI_AV_UNSPEC, .count = 1};
    int rc = open_cq(endpoint);
    if (!rc)
        rc = fi_endpoint(domain, endpoint->nic->info, &endpoint->ep, NULL);
    if (!rc)
        rc = set_options(&endpoint->nic->terms, endpoint->ep);
    if (!rc)
        rc = fi_av_open(domain, &av, &endpoint->av, NULL);
    if (!rc)
        rc = fi_ep_bind(endpoint->ep, &endpoint->av->fid, 0);
    if (!rc)
        rc = fi_ep_bind(endpoint->ep, &endpoint->cq->fid, FI_TRANSMIT | FI_RECV);
    return rc ? rc : fi_enable(endpoint->ep);
}

/* `path`: what posts here, or NULL. */
int pdd_endpoint_open(struct pdd_port *port, struct nic *nic, struct path *path, struct endpoint *endpoint)
{
    *endpoint = (struct endpoint){.nic = nic, .path = path, .fd = -1};
    list_init(&endpoint->link);
    int rc = open_parts(endpoint);
    if (rc)
        pdd_endpoint_close(endpoint);
    else
        list_append(&port->endpoints, &endpoint->link);
    return rc;
}

/* Over TCP, a connection that was accepted and has not said yet who it is knows its listener, and libfabric forgets
 * that when the listener is closed ("TODO" in its xnet_pep_close): whoever connects, waits for a release and goes on
 * then, makes it use freed memory. So all that is bound to the endpoint's address is shut, and libfabric sees it while
 * the listener is still there. Its descriptors are not told to us: they are those with this address. */
static void shut_connections(struct endpoint *endpoint)
{
    enum { NUM_TURNS = 4 };
    struct fi_cq_data_entry ignored[64];
    struct sockaddr_storage own, name;
    size_t own_bytes = sizeof own;
    DIR *open = opendir("/proc/self/fd");
    if (open && !fi_getname(&endpoint->ep->fid, &own, &own_bytes))
        for (struct dirent *entry; (entry = readdir(open));) {
            socklen_t bytes = sizeof name;
            int fd = atoi(entry->d_name);
            if (entry->d_name[0] != '.' && !getsockname(fd, (struct sockaddr *)&name, &bytes) && bytes == own_bytes &&
                !memcmp(&name, &own, bytes))
                shutdown(fd, SHUT_RDWR);
        }
    if (open)
        closedir(open);
    for (int turn = 0; turn < NUM_TURNS; turn++) {
        errno = 0; /* see pdd_read_cq */
        fi_cq_read(endpoint->cq, ignored, 64);
    }
}

/* Also of one that was never opened: all zero. Else than 0: it may be open still, and what it should fence, too. */
int pdd_endpoint_close(struct endpoint *endpoint)
{
    int rc = 0;
    if (endpoint->ep && endpoint->cq && endpoint->nic->terms.listens)
        shut_connections(endpoint);
    struct fid *fids[] = {
        endpoint->ep ? &endpoint->ep->fid : NULL,
        endpoint->av ? &endpoint->av->fid : NULL,
        endpoint->cq ? &endpoint->cq->fid : NULL,
        endpoint->wait_set ? &endpoint->wait_set->fid : NULL,
    };
    for (size_t i = 0; i < sizeof fids / sizeof *fids; i++) {
        int closed = fids[i] ? fi_close(fids[i]) : 0;
        rc = rc ? rc : closed;
    }
    if (endpoint->link.next)
        list_remove(&endpoint->link);
    *endpoint = (struct endpoint){.fd = -1};
    return rc;
}

int pdd_endpoint_name(const struct endpoint *endpoint, uint8_t *address, size_t *address_bytes)
{
    *address_bytes = MAX_ADDRESS_BYTES;
    return fi_getname(&endpoint->ep->fid, address, address_bytes);
}

/* Both as for pdd_choose. -ENODATA: no provider is usable on this host, see pdd_choose. */
int pdd_nic_open(struct nic *nic, const char *providers, uint64_t device_caps, char *why, size_t why_bytes)
{
    nic->info = pdd_choose(providers, nic->host, device_caps, fi_getinfo, why, why_bytes);
    if (!nic->info)
        return -ENODATA;
    nic->terms = pdd_terms(nic->info);
    int rc = fi_fabric(nic->info->fabric_attr, &nic->fabric, NULL);
    return rc ? rc : fi_domain(nic->fabric, nic->info, &nic->domain, NULL);
}

void pdd_nic_close(struct nic *nic)
{
    if (nic->domain)
        fi_close(&nic->domain->fid);
    if (nic->fabric)
        fi_close(&nic->fabric->fid);
    if (nic->info)
        fi_freeinfo(nic->info);
    nic->domain = NULL;
    nic->fabric = NULL;
    nic->info = NULL;
}
