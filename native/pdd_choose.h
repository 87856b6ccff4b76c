/* Which provider a port runs over. */
#ifndef PDD_CHOOSE_H
#define PDD_CHOOSE_H

#include <rdma/fabric.h>
#include <stddef.h>

struct pdd_options;

/* The first of the options' providers that this machine has, or NULL. For fi_freeinfo. */
struct fi_info *pdd_choose_provider(const struct pdd_options *options);
/* Names of the providers that could be asked for, separated by commas. */
void pdd_list_offers(char *text, size_t text_bytes);

#endif
