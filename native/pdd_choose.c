/* See pdd_choose.h. Providers differ in what fi_info says, which is all in pdd_terms, and in a few things that it does
 * not say, which are in the functions that ask for a name. */
#include "pdd_port.h"

#include <arpa/inet.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

static const uint32_t API = FI_VERSION(1, 17); /* the oldest with what we use; newer libraries keep its meaning */
static const int HONOURED_MR_MODE =
    FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT | FI_MR_HMEM;
static const uint64_t HONOURED_MODE = FI_CONTEXT | FI_CONTEXT2;
static const uint64_t NEEDED_CAPS = FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
enum { LEAST_KEY_BYTES = 4 };

/* EFA cuts a write into segments of at most this (efa_env.c: efa_write_segment_size, and the device's own limit), and
 * each would carry the immediate: one write would be counted as several. Its fi_info says that there is no limit. */
static const uint64_t EFA_SEGMENT_BYTES = 1ull << 30;

static bool is_efa(const char *provider) { return !strcmp(provider, "efa"); }
static bool is_shm(const char *provider) { return !strcmp(provider, "shm"); }
static bool is_rdma(const char *provider) { return is_efa(provider) || !strcmp(provider, "verbs;ofi_rxm"); }

static void append(char *text, size_t text_bytes, const char *format, ...)
{
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, text_bytes - used, format, arguments);
    va_end(arguments);
}

/* ---- what to ask for ---- */
/* FI_MR_DMABUF is understood from 1.20 on, and before 1.18 EFA leaves its hardware's writes off on older devices. The
 * others keep the version that they are tested with. */
static uint32_t api_version(const char *provider)
{
    uint32_t headers = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), wanted = FI_VERSION(1, 20);
    return is_rdma(provider) && headers >= wanted ? wanted : API;
}

/* EFA sends to its own machine over shm unless asked for remote peers only. With shm there is no FI_WAIT_FD, and closing
 * an endpoint does not fence. The endpoint option FI_OPT_SHARED_MEMORY_PERMITTED comes too late: the domain has opened
 * shm by then, and its CQs refuse FI_WAIT_FD. FI_EFA_ENABLE_SHM_TRANSFER would do, but is the whole process's. */
static uint64_t extra_caps(const char *provider) { return is_efa(provider) ? FI_REMOTE_COMM : 0; }

/* No order is asked for (msg_order 0). EFA has none between writes, nor between the packets of one; a completion at the
 * target tells only that its own write is there. Nothing needs more: arrivals are counted (pdd_count.c), a write that
 * ends is told by how much was posted of it (pdd_write.c), and a drained one by the target's count. */
struct fi_info *pdd_make_hints(const char *provider, uint64_t device_caps)
{
    struct fi_info *hints = fi_allocinfo();
    if (!hints)
        return NULL;
    hints->caps = NEEDED_CAPS | device_caps;
    hints->mode = HONOURED_MODE;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = device_caps ? HONOURED_MR_MODE : HONOURED_MR_MODE & ~FI_MR_HMEM;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->domain_attr->cq_data_size = sizeof(uint32_t);
    if (provider) {
        hints->caps |= extra_caps(provider);
        hints->fabric_attr->prov_name = strdup(provider);
    }
    return hints;
}

/* ---- what an info says ---- */
static bool bad_memory(const struct fi_info *info, char *why, size_t why_bytes)
{
    const struct fi_domain_attr *domain = info->domain_attr;
    int strange = domain->mr_mode & ~HONOURED_MR_MODE;
    if (domain->mr_mode & FI_MR_RAW || domain->mr_key_size > sizeof(uint64_t))
        snprintf(why, why_bytes, "raw memory keys of %zu bytes, and a write carries 8", domain->mr_key_size);
    else if (domain->mr_key_size < LEAST_KEY_BYTES)
        snprintf(why, why_bytes, "memory keys of %zu bytes, which anybody guesses; 4 are the least",
                 domain->mr_key_size);
    else if (strange)
        snprintf(why, why_bytes, "wants memory registered in a way that pdd does not know (mr_mode %s)",
                 fi_tostr(&strange, FI_TYPE_MR_MODE));
    else if (domain->mr_mode & FI_MR_ENDPOINT && domain->mr_mode & FI_MR_LOCAL)
        snprintf(why, why_bytes, "memory is registered for one endpoint (FI_MR_ENDPOINT) and needed for sources "
                                 "(FI_MR_LOCAL), which leave by another endpoint");
    else
        return false;
    return true;
}

bool pdd_usable(const struct fi_info *info, char *why, size_t why_bytes)
{
    uint64_t modes = info->mode & ~HONOURED_MODE;
    why[0] = 0;
    if (info->ep_attr->type != FI_EP_RDM)
        snprintf(why, why_bytes, "no endpoints that are reliable and unconnected (FI_EP_RDM)");
    else if ((info->caps & NEEDED_CAPS) != NEEDED_CAPS)
        snprintf(why, why_bytes, "no one-sided writes in both directions (FI_RMA, FI_WRITE, FI_REMOTE_WRITE)");
    else if (info->domain_attr->cq_data_size < sizeof(uint32_t))
        snprintf(why, why_bytes, "completions carry %zu bytes of data, and counting arrivals takes 4",
                 info->domain_attr->cq_data_size);
    else if (modes)
        snprintf(why, why_bytes, "asks for modes that pdd does not know (%s)", fi_tostr(&modes, FI_TYPE_MODE));
    else if (info->fabric_attr->name && !strcmp(info->fabric_attr->name, "efa-direct"))
        /* fi_efa(7), limitations of RMA. Here a target does not know who will write. */
        snprintf(why, why_bytes, "fabric efa-direct takes writes only from addresses that the target was told before");
    else
        return !bad_memory(info, why, why_bytes);
    return false;
}

/* In 1.17 the fd of a CQ of `net` stays readable after its first completion: its fi_trywait forgets to reset it. The fd
 * of a wait set is reset by fi_wait. Fixed in later releases, where the provider is called tcp. */
static enum fi_wait_obj wait_object(const char *provider)
{
    return strcmp(provider, "net") ? FI_WAIT_FD : FI_WAIT_SET;
}

/* tx_attr->size is an endpoint's, and each peer has one of its own: there is nothing to share out. What one peer may
 * have inside libfabric (MAX_IN_FLIGHT at most) also bounds what one target's CQ must hold. */
struct pdd_terms pdd_terms(const struct fi_info *info)
{
    const char *provider = info->fabric_attr->prov_name;
    const struct fi_domain_attr *domain = info->domain_attr;
    uint64_t iov = least(info->tx_attr->iov_limit, info->tx_attr->rma_iov_limit), bytes = info->ep_attr->max_msg_size;
    /* shm says FI_HMEM in builds without CUDA as well: only of NICs is it believed. */
    bool device_memory = is_rdma(provider) && info->caps & FI_HMEM && domain->mr_mode & FI_MR_HMEM;
    return (struct pdd_terms){
        .max_iov = (uint32_t)least(iov ? iov : 1, MAX_IOV),
        .max_in_flight = (uint32_t)least(info->tx_attr->size ? info->tx_attr->size : 1, MAX_IN_FLIGHT),
        .max_message_bytes = is_efa(provider) ? least(bytes, EFA_SEGMENT_BYTES) : bytes,
        .key_bytes = (uint32_t)domain->mr_key_size,
        .chooses_keys = !(domain->mr_mode & FI_MR_PROV_KEY),
        .virtual_addresses = domain->mr_mode & FI_MR_VIRT_ADDR,
        .binds_memory = domain->mr_mode & FI_MR_ENDPOINT,
        .device_memory = device_memory,
        .dmabuf = device_memory && info->fabric_attr->api_version >= FI_VERSION(1, 20),
        .requires_p2p = device_memory && is_efa(provider),
        .listens = !strcmp(provider, "net") || !strcmp(provider, "tcp"),
        .lingers = is_shm(provider),
        .wait_object = wait_object(provider),
    };
}

/* ---- choice ---- */
static bool is_address(const char *host)
{
    struct in6_addr ignored;
    return inet_pton(AF_INET, host, &ignored) == 1 || inet_pton(AF_INET6, host, &ignored) == 1;
}

/* An EFA device has no address of IP, so that by one any will do. Its domain is called after it: rdmap79s0-rdm. */
static bool is_of_host(const struct fi_info *info, const char *provider, const char *host)
{
    const char *name = info->domain_attr->name;
    size_t length = strlen(host);
    if (!is_efa(provider) || is_address(host))
        return true;
    return name && !strncmp(name, host, length) && (!name[length] || name[length] == '-');
}

static int ask(const char *provider, const char *host, const struct fi_info *hints, pdd_getinfo *getinfo,
               struct fi_info **list)
{
    char shm_node[32];
    if (is_efa(provider))
        return getinfo(api_version(provider), NULL, NULL, 0, hints, list);
    /* Endpoints of shm are files: the pid in their name lets the next start sweep those of the dead. */
    snprintf(shm_node, sizeof shm_node, "pdd-%d", (int)getpid());
    return getinfo(api_version(provider), is_shm(provider) ? shm_node : host, NULL, FI_SOURCE, hints, list);
}

/* shm lists itself for CUDA memory, whether or not it was built for it. */
static bool usable_for(const struct fi_info *info, uint64_t device_caps, char *why, size_t why_bytes)
{
    if (!pdd_usable(info, why, why_bytes))
        return false;
    if (!device_caps || pdd_terms(info).device_memory)
        return true;
    snprintf(why, why_bytes, "no way to a GPU's memory");
    return false;
}

/* The info of exactly this provider, or NULL: libfabric answers "tcp" with "tcp;ofi_rxm" if it has nothing better. */
static struct fi_info *find_provider(const char *provider, const char *host, uint64_t device_caps,
                                     pdd_getinfo *getinfo, char *why, size_t why_bytes)
{
    struct fi_info *hints = pdd_make_hints(provider, device_caps), *list = NULL, *found = NULL;
    char refusal[256];
    if (hints && !ask(provider, host, hints, getinfo, &list)) {
        for (struct fi_info *info = list; info && !found; info = info->next) {
            if (strcmp(info->fabric_attr->prov_name, provider) || !is_of_host(info, provider, host))
                continue;
            if (usable_for(info, device_caps, refusal, sizeof refusal))
                found = fi_dupinfo(info);
            else if (!strstr(why, refusal))
                append(why, why_bytes, "%s%s: %s", why[0] ? "; " : "", provider, refusal);
        }
    }
    fi_freeinfo(list);
    fi_freeinfo(hints);
    return found;
}

struct fi_info *pdd_choose(const char *providers, const char *host, uint64_t device_caps, pdd_getinfo *getinfo,
                           char *why, size_t why_bytes)
{
    char names[256], *rest = NULL;
    snprintf(names, sizeof names, "%s", providers);
    why[0] = 0;
    for (char *name = strtok_r(names, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        struct fi_info *info = find_provider(name, host, device_caps, getinfo, why, why_bytes);
        if (info)
            return info;
    }
    return NULL;
}

void pdd_list_offers(pdd_getinfo *getinfo, char *text, size_t text_bytes)
{
    struct fi_info *hints = pdd_make_hints(NULL, 0), *list = NULL;
    text[0] = 0;
    if (hints && !getinfo(API, NULL, NULL, 0, hints, &list)) {
        for (struct fi_info *info = list; info; info = info->next)
            if (!strstr(text, info->fabric_attr->prov_name))
                append(text, text_bytes, "%s%s", text[0] ? ", " : "", info->fabric_attr->prov_name);
    }
    if (!text[0])
        snprintf(text, text_bytes, "nothing");
    fi_freeinfo(list);
    fi_freeinfo(hints);
}
