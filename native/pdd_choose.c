/* Which provider a port runs over. */
#include "pdd_choose.h"
#include "pdd_port.h"

#include <stdio.h>
#include <unistd.h>

static const uint32_t ABI = FI_VERSION(1, 17); /* the oldest with what we use; newer libraries keep its meaning */

static struct fi_info *make_hints(const char *provider)
{
    struct fi_info *hints = fi_allocinfo();
    if (!hints)
        return NULL;
    hints->caps = FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->domain_attr->cq_data_size = sizeof(uint32_t);
    if (provider)
        hints->fabric_attr->prov_name = strdup(provider);
    return hints;
}

static bool fits(const struct fi_info *info, const char *provider)
{
    return !strcmp(info->fabric_attr->prov_name, provider) && info->ep_attr->type == FI_EP_RDM &&
           info->domain_attr->cq_data_size >= sizeof(uint32_t) && info->domain_attr->mr_key_size >= 4;
}

/* The info of exactly this provider, or NULL: libfabric answers "tcp" with "tcp;ofi_rxm" if it has nothing better. */
static struct fi_info *find_provider(const char *provider, const char *node)
{
    struct fi_info *hints = make_hints(provider), *list = NULL, *found = NULL;
    if (hints && !fi_getinfo(ABI, node, NULL, FI_SOURCE, hints, &list)) {
        for (struct fi_info *info = list; info && !found; info = info->next)
            if (fits(info, provider))
                found = fi_dupinfo(info);
    }
    fi_freeinfo(list);
    fi_freeinfo(hints);
    return found;
}

void pdd_list_offers(char *text, size_t text_bytes)
{
    struct fi_info *hints = make_hints(NULL), *list = NULL;
    size_t used = 0;
    text[0] = 0;
    if (hints && !fi_getinfo(ABI, NULL, NULL, 0, hints, &list)) {
        for (struct fi_info *info = list; info && used < text_bytes; info = info->next)
            if (!strstr(text, info->fabric_attr->prov_name))
                used += (size_t)snprintf(text + used, text_bytes - used, "%s%s", used ? ", " : "",
                                         info->fabric_attr->prov_name);
    }
    if (!text[0])
        snprintf(text, text_bytes, "nothing");
    fi_freeinfo(list);
    fi_freeinfo(hints);
}

struct fi_info *pdd_choose_provider(const struct pdd_options *options)
{
    char names[256], shm_node[32], *rest = NULL;
    snprintf(names, sizeof names, "%s", options->providers);
    /* Endpoints of shm are files: the pid in their name lets the next start sweep those of the dead. */
    snprintf(shm_node, sizeof shm_node, "pdd-%d", (int)getpid());
    for (char *name = strtok_r(names, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        struct fi_info *info = find_provider(name, strcmp(name, "shm") ? options->hosts : shm_node);
        if (info)
            return info;
    }
    return NULL;
}
