/* The address of a registration as bytes, which cross the control link. Numbers are little endian:
 *
 *     version u8 | NICs u8 | copies u8 | 0 | length u64 | for each NIC: key u64, base u64, bytes u8, address
 *     and, with copies: machine 64 bytes | name 16 | token 16
 */
#include "pdd_address.h"

enum { ADDRESS_VERSION = 1 };

struct bytes {
    uint8_t *next, *end;
    bool failed; /* it did not fit, or was too short */
};

static uint8_t *step(struct bytes *bytes, size_t number)
{
    if (bytes->failed || (size_t)(bytes->end - bytes->next) < number) {
        bytes->failed = true;
        return NULL;
    }
    bytes->next += number;
    return bytes->next - number;
}

static void put(struct bytes *bytes, const void *from, size_t number)
{
    uint8_t *to = step(bytes, number);
    if (to)
        memcpy(to, from, number);
}

static void put_number(struct bytes *bytes, uint64_t number, size_t num_bytes)
{
    uint8_t *to = step(bytes, num_bytes);
    for (size_t i = 0; to && i < num_bytes; i++)
        to[i] = (uint8_t)(number >> 8 * i);
}

static void get(struct bytes *bytes, void *to, size_t number)
{
    const uint8_t *from = step(bytes, number);
    if (from)
        memcpy(to, from, number);
}

static uint64_t get_number(struct bytes *bytes, size_t num_bytes)
{
    const uint8_t *from = step(bytes, num_bytes);
    uint64_t number = 0;
    for (size_t i = 0; from && i < num_bytes; i++)
        number |= (uint64_t)from[i] << 8 * i;
    return number;
}

int pdd_write_address(const struct target_address *target, uint8_t *out, uint32_t max_bytes)
{
    struct bytes bytes = {.next = out, .end = out + max_bytes};
    put_number(&bytes, ADDRESS_VERSION, 1);
    put_number(&bytes, target->num_nics, 1);
    put_number(&bytes, target->copies, 1);
    put_number(&bytes, 0, 1);
    put_number(&bytes, target->length_bytes, 8);
    for (uint32_t i = 0; i < target->num_nics; i++) {
        put_number(&bytes, target->nics[i].key, 8);
        put_number(&bytes, target->nics[i].base, 8);
        put_number(&bytes, target->nics[i].num_bytes, 1);
        put(&bytes, target->nics[i].bytes, target->nics[i].num_bytes);
    }
    if (target->copies) {
        put(&bytes, target->machine, sizeof target->machine);
        put(&bytes, target->name, sizeof target->name);
        put(&bytes, target->token, sizeof target->token);
    }
    return bytes.failed ? -ENOSPC : (int)(bytes.next - out);
}

static void get_nic(struct bytes *bytes, struct nic_address *nic)
{
    nic->key = get_number(bytes, 8);
    nic->base = get_number(bytes, 8);
    nic->num_bytes = (uint32_t)get_number(bytes, 1);
    if (nic->num_bytes > sizeof nic->bytes)
        bytes->failed = true;
    else
        get(bytes, nic->bytes, nic->num_bytes);
}

bool pdd_read_address(const uint8_t *in, uint32_t num_bytes, struct target_address *target)
{
    struct bytes bytes = {.next = (uint8_t *)in, .end = (uint8_t *)in + num_bytes};
    memset(target, 0, sizeof *target);
    bool known = get_number(&bytes, 1) == ADDRESS_VERSION;
    target->num_nics = (uint32_t)get_number(&bytes, 1);
    target->copies = (uint32_t)get_number(&bytes, 1);
    bool zero = !get_number(&bytes, 1);
    target->length_bytes = get_number(&bytes, 8);
    if (!known || !zero || !target->num_nics || target->num_nics > MAX_NICS || target->copies > 1)
        return false;
    for (uint32_t i = 0; i < target->num_nics; i++)
        get_nic(&bytes, &target->nics[i]);
    if (target->copies) {
        get(&bytes, target->machine, sizeof target->machine);
        get(&bytes, target->name, sizeof target->name);
        get(&bytes, target->token, sizeof target->token);
    }
    return !bytes.failed && bytes.next == bytes.end && target->length_bytes;
}
