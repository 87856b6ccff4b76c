/* Random calls of the public C API, on three ports of one process that write to each other: over a provider that
 * misbehaves, over TCP with two addresses, and by copies. One seed again, in one command:
 *
 *     python tests/native/test_native_fabric.py clang-asan-ubsan fuzz_fabric fake 17 1
 *
 * (build, program, way, first seed, number of seeds). What is the same in each run of a seed is what is called and how
 * the provider decides; threads meet as they do. What must hold whatever happens:
 *
 * - each accepted write ends in one WRITE_DONE, also when its port fails or is closed;
 * - each expected count that was reached gives one COUNT_REACHED, none that was not;
 * - counts and strays are never more than what was posted, and with "fake" exactly what the provider told;
 * - no byte outside of a registration is written, and none after its release;
 * - every object of the provider, descriptor and byte is given back. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "checks.h"
#include "fake_fabric.h"
#include "pdd_fabric.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    PORTS = 3,
    REGIONS = 40,
    PEERS = 16,
    WATCHES = 3,
    WRITES = 4096,
    SLOTS = 8, /* of immediates, for each port */
    STEPS = 600,
    BODY = 48 << 10,
    GUARD = 4 << 10,
    PAGES = 16,
    PIECES = 3,
};

char check_context[128];

struct region {
    struct pdd_memory memory;
    uint8_t *map;
    uint64_t offset, length_bytes; /* of what is registered in it */
    int fd;
    uint32_t port;
    bool open, source;
};

struct peer {
    uint32_t handle, port;
    uint64_t length_bytes;
};

struct watch {
    uint32_t handle, port;
    int wake_fd;
    _Atomic uint64_t counter;
};

struct posted {
    uint32_t port, immediate, ends;
    uint64_t num_pieces;
};

/* What is known of one immediate. `low` and `high`: its goals, when it was changed and may have been reached before. */
struct expected {
    uint32_t low, high, num_events;
    uint64_t counted, posted;
    int64_t last; /* when it was disarmed; -1: it is armed, or was never */
    bool armed, inexact, lost;
};

static struct {
    uint64_t random;
    bool fake, copies, closes;
    pdd_port *ports[PORTS];
    bool failed[PORTS];
    struct region regions[REGIONS];
    uint32_t num_regions;
    struct peer peers[PEERS];
    struct watch watches[WATCHES];
    struct posted writes[WRITES];
    uint32_t num_writes;
    struct expected expected[PORTS * SLOTS][FAKE_GENERATIONS];
    uint32_t generation[PORTS * SLOTS];
    uint64_t arrived, unnamed;
    bool lost_strays;
} world;

static uint64_t below(uint64_t limit) { return next_random(&world.random) % limit; }
static bool once_in(uint64_t number) { return !below(number); }
static uint64_t any_number(void) { return next_random(&world.random) >> below(64); }
static uint32_t immediate(uint32_t slot, uint32_t generation) { return slot << 20 | generation << 7; }
static struct expected *expected_of(uint32_t imm) { return &world.expected[imm >> 20][imm >> 7 & 0x1fff]; }

/* ---- events ---- */
static void write_done(uint32_t port, const struct pdd_event *event)
{
    CHECK(event->token < world.num_writes);
    struct posted *write = &world.writes[event->token];
    CHECK(write->port == port && !write->ends++);
    CHECK(event->num_pieces <= write->num_pieces && (event->error || event->num_pieces == write->num_pieces));
    CHECK(event->error >= 0 && (event->num_pieces > 0) == (event->first_ns > 0));
    expected_of(write->immediate)->posted += event->num_pieces;
}

static void take_event(uint32_t port, const struct pdd_event *event)
{
    uint32_t slot = event->immediate >> 20;
    CHECK(!(event->immediate & 127) || event->kind != PDD_COUNT_REACHED);
    switch (event->kind) {
    case PDD_WRITE_DONE:
        write_done(port, event);
        break;
    case PDD_COUNT_REACHED:
        CHECK(slot / SLOTS == port && !expected_of(event->immediate)->num_events++);
        CHECK(event->first_ns <= event->last_ns);
        break;
    case PDD_STRAY:
        CHECK(event->num_pieces);
        if (slot < PORTS * SLOTS)
            expected_of(event->immediate)->counted += event->num_pieces;
        else
            CHECK(world.fake && slot >= FAKE_STRAY_SLOT);
        break;
    case PDD_PORT_FAILED:
        CHECK(world.fake && !world.failed[port] && event->error > 0);
        world.failed[port] = true;
        break;
    default:
        CHECK(!"a known kind");
    }
}

static int drain(uint32_t port, uint32_t max_events)
{
    struct pdd_event events[16];
    int number = pdd_drain(world.ports[port], events, max_events < 16 ? max_events : 16);
    for (int i = 0; i < number; i++)
        take_event(port, &events[i]);
    return number;
}

/* ---- ports ---- */
static void open_port(uint32_t port)
{
    static const char *const fake_hosts[] = {"a", "a,b", "a,b,c"};
    struct pdd_options options = {
        .providers = world.fake ? "fake" : "net,tcp",
        .hosts = world.fake ? fake_hosts[below(3)] : "127.0.0.1,127.0.0.2",
        .max_writes = once_in(2) ? 0 : 1 + (uint32_t)below(40),
        .spin_us = once_in(4) ? 50 : 0,
        .copies = world.copies,
    };
    char message[512] = "";
    int rc = pdd_open(&options, &world.ports[port], message, sizeof message);
    CHECK((rc == 0) == (world.ports[port] != NULL));
    CHECK(!rc || (world.fake && message[0]));
    world.failed[port] = false;
}

static bool in_guard(const struct region *region, uint64_t at)
{
    return at < region->offset || at >= region->offset + region->length_bytes;
}

/* What was outside is as it was; what was released is as it was then. */
static void check_region(const struct region *region)
{
    for (uint64_t i = 0; i < BODY + 2 * GUARD && !region->source; i++)
        CHECK(in_guard(region, i) ? region->map[i] == 0xee : region->open || region->map[i] == 0xdd);
}

static void region_closed(struct region *region)
{
    region->open = false;
    if (!region->source)
        memset(region->map + region->offset, 0xdd, region->length_bytes);
}

static void disarm(uint32_t slot, bool port_closes)
{
    uint32_t imm = immediate(slot, world.generation[slot]);
    struct expected *expected = expected_of(imm);
    if (!expected->armed)
        return;
    expected->last = pdd_unexpect(world.ports[slot / SLOTS], imm);
    expected->counted += (uint64_t)expected->last;
    expected->armed = false;
    expected->lost = port_closes; /* its event may not have been told any more */
}

static void add_up(uint32_t port)
{
    struct pdd_stats stats;
    pdd_get_stats(world.ports[port], &stats);
    world.arrived += stats.num_arrived;
    world.unnamed += stats.num_strays_unnamed;
    CHECK(stats.num_strays <= stats.num_arrived);
}

static void close_port(uint32_t port)
{
    pdd_close(world.ports[port]);
    for (uint32_t i = 0; i < world.num_regions; i++)
        if (world.regions[i].open && world.regions[i].port == port)
            region_closed(&world.regions[i]);
    for (uint32_t i = 0; i < SLOTS; i++)
        disarm(port * SLOTS + i, true);
    while (drain(port, 16))
        ;
    for (uint32_t i = 0; i < world.num_writes; i++)
        CHECK(world.writes[i].port != port || world.writes[i].ends == 1);
    for (uint32_t i = 0; i < PEERS; i++)
        if (world.peers[i].port == port)
            world.peers[i].handle = 0;
    for (uint32_t i = 0; i < WATCHES; i++)
        if (world.watches[i].port == port)
            world.watches[i].handle = 0;
    CHECK(pdd_release(world.ports[port], 1) == -ESHUTDOWN && pdd_expect(world.ports[port], 0, 1) == -ESHUTDOWN);
    add_up(port);
    world.lost_strays = true;
    pdd_free(world.ports[port]);
    world.ports[port] = NULL;
}

/* ---- memory and peers ---- */
/* What the caller says that the memory is mapped from: mostly the truth. */
static int source_fd(int fd)
{
    switch (below(12)) {
    case 0:
        return -1;
    case 1:
        return eventfd(0, EFD_CLOEXEC);
    case 2:
        return open("/dev/null", O_RDONLY | O_CLOEXEC);
    case 3:
        return memfd_create("short", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    default:
        if (!once_in(8))
            CHECK(!fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK));
        return fcntl(fd, F_DUPFD_CLOEXEC, 0);
    }
}

static void register_region(uint32_t port)
{
    struct pdd_memory ignored;
    struct region *region = &world.regions[world.num_regions];
    CHECK(register_host(world.ports[port], 0, 4096, -1, &ignored) == -EINVAL);
    CHECK(register_host(world.ports[port], ~0ull - 4095, 8192, -1, &ignored) == -EINVAL);
    struct pdd_region of_gpu = {4096, 4096, .fd = -1, .cuda_device = 0, .dmabuf_fd = once_in(2) ? -1 : 0};
    CHECK(pdd_register(world.ports[port], &of_gpu, &ignored) < 0);
    if (world.num_regions == REGIONS)
        return;
    int fd = memfd_create("region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && !ftruncate(fd, BODY + 2 * GUARD));
    *region = (struct region){.port = port, .source = once_in(2), .length_bytes = 1 + below(BODY)};
    region->map = mmap(NULL, BODY + 2 * GUARD, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(region->map != MAP_FAILED);
    region->offset = region->source ? 0 : GUARD;
    memset(region->map, 0xee, BODY + 2 * GUARD);
    memset(region->map + region->offset, region->source ? 0x55 : 0xdd, region->length_bytes);
    region->fd = region->source ? source_fd(fd) : -1;
    close(fd);
    int rc = register_host(world.ports[port], (uint64_t)region->map + region->offset, region->length_bytes, region->fd,
                          &region->memory);
    CHECK(!rc || world.fake);
    region->open = !rc;
    world.num_regions++;
}

static void release_region(uint32_t port)
{
    struct region *region = &world.regions[below(world.num_regions + 1) % REGIONS];
    CHECK(pdd_release(world.ports[port], 0) == -ENOENT && pdd_release(world.ports[port], 0xffff0001) == -ENOENT);
    if (!region->open)
        return;
    CHECK(!pdd_release(world.ports[region->port], region->memory.memory));
    region_closed(region);
    CHECK(pdd_release(world.ports[region->port], region->memory.memory) == -ENOENT);
}

/* Over TCP a broken address still is one of this machine where nobody else listens. */
static void mutate(struct pdd_memory *memory)
{
    enum { FIRST_KEY = 12, NIC_BYTES = 33 };
    if (world.fake && once_in(2))
        memory->address_bytes = (uint32_t)below(memory->address_bytes + 40);
    for (uint64_t i = 1 + below(3); i; i--) {
        uint64_t at = below(memory->address_bytes + 1);
        bool in_nic = at >= FIRST_KEY && at < FIRST_KEY + 2 * NIC_BYTES;
        if (world.fake || !in_nic || (at - FIRST_KEY) % NIC_BYTES < 16)
            memory->address[at] = (uint8_t)any_number();
        else
            memset(memory->address + FIRST_KEY + (at - FIRST_KEY) / NIC_BYTES * NIC_BYTES + 19, 0, 1);
    }
}

static void add_peer(uint32_t port)
{
    struct region *region = &world.regions[below(world.num_regions + 1) % REGIONS];
    struct peer *peer = &world.peers[below(PEERS)];
    if (peer->handle || region->source || !region->memory.address_bytes)
        return;
    struct pdd_memory told = region->memory;
    bool mutated = once_in(4);
    if (mutated)
        mutate(&told);
    int rc = pdd_add_peer(world.ports[port], told.address, told.address_bytes, &peer->handle);
    CHECK((rc == 0) == (peer->handle != 0) && (mutated || !rc));
    peer->port = port;
    peer->length_bytes = region->length_bytes;
}

static void drop_peer(uint32_t port)
{
    struct peer *peer = &world.peers[below(PEERS)];
    struct pdd_peer_info info;
    CHECK(pdd_drop_peer(world.ports[port], (uint32_t)any_number() & 0xffff0000) == -ENOENT);
    if (!peer->handle)
        return;
    CHECK(!pdd_get_peer(world.ports[peer->port], peer->handle, &info));
    CHECK(info.num_open <= info.num_paths && info.copies <= world.copies);
    CHECK(!pdd_drop_peer(world.ports[peer->port], peer->handle));
    CHECK(pdd_drop_peer(world.ports[peer->port], peer->handle) == -ENOENT);
    peer->handle = 0;
}

/* ---- watches ---- */
static void toggle_watch(uint32_t port)
{
    struct watch *watch = &world.watches[below(WATCHES)];
    CHECK(pdd_watch(world.ports[port], 0, -1, &(uint32_t){0}) == -EINVAL);
    CHECK(pdd_unwatch(world.ports[port], 0) == -ENOENT);
    if (watch->handle) {
        CHECK(!pdd_unwatch(world.ports[watch->port], watch->handle));
        watch->handle = 0;
        return;
    }
    watch->port = port;
    CHECK(!pdd_watch(world.ports[port], (uint64_t)&watch->counter, once_in(3) ? -1 : watch->wake_fd, &watch->handle));
}

static void raise_counters(uint64_t by)
{
    uint64_t one = 1;
    for (uint32_t i = 0; i < WATCHES; i++) {
        atomic_fetch_add(&world.watches[i].counter, by);
        CHECK(write(world.watches[i].wake_fd, &one, sizeof one) == sizeof one);
    }
}

/* ---- counts ---- */
static void expect(uint32_t port)
{
    uint32_t slot = port * SLOTS + (uint32_t)below(SLOTS), goal = (uint32_t)below(once_in(4) ? 3 : 100);
    uint32_t old = immediate(slot, world.generation[slot]);
    struct expected *before = expected_of(old);
    if (world.generation[slot] == FAKE_GENERATIONS - 1)
        return;
    CHECK(pdd_expect(world.ports[port], old | 1, goal) == -EINVAL);
    int64_t arrived = before->armed ? pdd_arrived(world.ports[port], old) : 0;
    bool rests = before->num_events; /* reached, so that it counts no more */
    uint32_t imm = immediate(slot, world.generation[slot] + 1);
    int rc = pdd_expect(world.ports[port], imm, goal);
    CHECK(!rc || (before->armed && !rests && rc == -EEXIST));
    if (rc)
        return;
    if (before->armed) {
        before->counted += (uint64_t)arrived;
        before->last = arrived;
        before->inexact = !rests;
        before->lost = true;
        before->armed = false;
    }
    world.generation[slot]++;
    *expected_of(imm) = (struct expected){
        .low = goal, .high = goal, .armed = true, .last = -1,
        .posted = expected_of(imm)->posted, .counted = expected_of(imm)->counted};
}

static void change_expected(uint32_t port)
{
    uint32_t slot = port * SLOTS + (uint32_t)below(SLOTS), goal = (uint32_t)below(100);
    uint32_t imm = immediate(slot, world.generation[slot]);
    struct expected *expected = expected_of(imm);
    CHECK(pdd_change_expected(world.ports[port], imm | 1, goal) == -EINVAL);
    int rc = pdd_change_expected(world.ports[port], imm, goal);
    CHECK(rc == (expected->armed ? 0 : -ENOENT));
    if (rc)
        return;
    expected->low = goal < expected->low ? goal : expected->low;
    expected->high = goal > expected->high ? goal : expected->high;
}

/* ---- writes ---- */
struct arrays {
    uint32_t source[PAGES], target[PAGES];
    struct pdd_piece pieces[PIECES];
};

static struct region *any_source(uint32_t port)
{
    for (uint32_t tries = 0; tries < 32; tries++) {
        struct region *region = &world.regions[below(world.num_regions + 1) % REGIONS];
        if (region->open && region->source && region->port == port)
            return region;
    }
    return NULL;
}

static struct pdd_write make_write(const struct peer *peer, const struct region *source, struct arrays *arrays)
{
    uint64_t page_bytes = 16ull << below(8), room = source->length_bytes;
    struct watch *watch = &world.watches[below(WATCHES)];
    room = peer->length_bytes < room ? peer->length_bytes : room;
    page_bytes = page_bytes > room ? room : page_bytes;
    struct pdd_write write = {
        .token = world.num_writes,
        .source_base = (uint64_t)source->map + source->offset,
        .source_page_bytes = page_bytes,
        .target_page_bytes = page_bytes,
        .peer = peer->handle,
        .memory = source->memory.memory,
        .num_layers = 1 + (uint32_t)below(3),
        .num_pages = 1 + (uint32_t)below(PAGES),
        .num_pieces = 1 + (uint32_t)below(PIECES),
        .source_pages = arrays->source,
        .target_pages = arrays->target,
        .pieces = arrays->pieces,
    };
    write.num_layers = write.num_layers * page_bytes > room ? 1 : write.num_layers;
    uint64_t layer_bytes = room / write.num_layers, num_pages = layer_bytes / page_bytes;
    write.source_layer_bytes = write.target_layer_bytes = layer_bytes;
    if (watch->handle && watch->port == peer->port && once_in(2)) {
        write.watch = watch->handle;
        write.counter_base = atomic_load(&watch->counter) - below(2);
    }
    uint32_t slot = (uint32_t)below(PORTS * SLOTS);
    write.immediate = immediate(slot, world.generation[slot] + (once_in(8) && world.generation[slot] < 254));
    for (uint32_t i = 0; i < PAGES; i++) {
        arrays->source[i] = (uint32_t)below(num_pages);
        arrays->target[i] = (uint32_t)(once_in(2) ? arrays->source[i] : below(num_pages));
    }
    for (uint32_t i = 0; i < PIECES; i++) {
        uint64_t bytes = 1 + below(page_bytes > 512 ? 512 : page_bytes); /* "fake" may take no more */
        arrays->pieces[i] = (struct pdd_piece){below(page_bytes - bytes + 1), below(page_bytes - bytes + 1), bytes};
    }
    return write;
}

/* May still be good. */
static void spoil(struct pdd_write *write, struct arrays *arrays)
{
    uint64_t *const wide[] = {
        &write->source_base,        &write->source_layer_bytes, &write->source_page_bytes,
        &write->target_base,        &write->target_layer_bytes, &write->target_page_bytes,
        &write->counter_base,       &arrays->pieces[0].length_bytes, &arrays->pieces[0].source_offset_bytes,
        &arrays->pieces[0].target_offset_bytes,
    };
    uint32_t *const narrow[] = {&write->peer, &write->memory, &write->watch, &write->immediate,
                                &arrays->source[0], &arrays->target[0]};
    switch (below(5)) {
    case 0:
        write->num_layers = (uint32_t)below(64);
        break;
    case 1:
        write->num_pages = (uint32_t)below(PAGES + 1);
        write->num_pieces = (uint32_t)below(PIECES + 1);
        break;
    case 2:
        *narrow[below(sizeof narrow / sizeof *narrow)] = (uint32_t)any_number();
        break;
    default:
        *wide[below(sizeof wide / sizeof *wide)] = once_in(3) ? -any_number() : any_number();
    }
    if (write->immediate >> 20 >= PORTS * SLOTS || (write->immediate >> 7 & 0x1fff) >= FAKE_GENERATIONS)
        write->immediate = 0;
}

static void submit(uint32_t number)
{
    struct arrays arrays;
    const struct peer *peer = &world.peers[number % PEERS];
    const struct region *source = peer->handle ? any_source(peer->port) : NULL;
    if (!source || world.num_writes == WRITES)
        return;
    struct pdd_write write = make_write(peer, source, &arrays);
    bool spoilt = once_in(5);
    if (spoilt)
        spoil(&write, &arrays);
    int rc = pdd_submit(world.ports[peer->port], &write);
    CHECK(!rc || rc == -EAGAIN || rc == -ERANGE || spoilt); /* out of range: the peer's length is a mutated one */
    if (rc)
        return;
    world.writes[world.num_writes++] = (struct posted){
        .port = peer->port,
        .immediate = write.immediate,
        .num_pieces = (uint64_t)write.num_layers * write.num_pages * write.num_pieces,
    };
}

static void cancel(uint32_t port)
{
    int rc = pdd_cancel(world.ports[port], below(world.num_writes + 1));
    CHECK(!rc || rc == -ENOENT);
}

/* ---- one seed ---- */
static void step(void)
{
    uint32_t port = (uint32_t)below(PORTS);
    if (!world.ports[port]) {
        open_port(port);
        return;
    }
    switch (below(32)) {
    case 0:
    case 1:
        register_region(port);
        break;
    case 2:
        fake_hold(once_in(4));
        break;
    case 3:
        release_region(port);
        break;
    case 4:
    case 5:
    case 6:
    case 7:
        add_peer(port);
        break;
    case 8:
        drop_peer(port);
        break;
    case 9:
        toggle_watch(port);
        break;
    case 10:
    case 11:
        raise_counters(below(4));
        break;
    case 12:
    case 13:
    case 14:
        expect(port);
        break;
    case 15:
        change_expected(port);
        break;
    case 16:
        disarm(port * SLOTS + (uint32_t)below(SLOTS), false);
        break;
    case 17:
        cancel(port);
        break;
    case 18:
    case 19:
        drain(port, (uint32_t)below(17));
        break;
    case 20:
        if (world.closes && once_in(8))
            close_port(port);
        if (once_in(8))
            fake_skip_ns(below(8) * 1000000000ull);
        break;
    default:
        for (uint64_t i = below(once_in(4) ? 40 : 6); i; i--)
            submit((uint32_t)below(PEERS));
    }
}

static bool all_ended(uint32_t port)
{
    for (uint32_t i = 0; i < world.num_writes; i++)
        if (world.writes[i].port == port && !world.writes[i].ends)
            return false;
    return true;
}

/* Until nothing is open. What hangs because its target has gone is given up after a silence, which need not be lived
 * through. */
static void settle(uint32_t port)
{
    struct pollfd fd = {.fd = pdd_event_fd(world.ports[port]), .events = POLLIN};
    for (int tries = 0; !all_ended(port); tries++) {
        CHECK(tries < 10000); /* turns, not time: what has just begun to end may take thousands */
        for (uint32_t i = 0; i < WATCHES; i++)
            atomic_store(&world.watches[i].counter, ~0ull);
        raise_counters(0);
        if (!poll(&fd, 1, tries < 2 ? 20 : 100))
            fake_skip_ns(6 * 1000000000ull);
        for (uint32_t i = 0; i < PORTS; i++)
            while (world.ports[i] && drain(i, 16))
                ;
    }
}

static bool same_counts(void)
{
    for (uint32_t slot = 0; slot < PORTS * SLOTS; slot++)
        for (uint32_t i = 0; i <= world.generation[slot] + 1; i++) {
            uint32_t imm = immediate(slot, i);
            struct expected *expected = expected_of(imm);
            uint64_t now = expected->armed ? (uint64_t)pdd_arrived(world.ports[slot / SLOTS], imm) : 0;
            if (!expected->inexact && expected->counted + now != fake_arrived_of(imm))
                return false;
        }
    return true;
}

/* Each piece that the provider told of is a count or a stray. */
static void settle_counts(void)
{
    for (int tries = 0; !same_counts(); tries++) {
        CHECK(tries < 300);
        poll(NULL, 0, 10);
        for (uint32_t i = 0; i < PORTS; i++)
            while (world.ports[i] && drain(i, 16))
                ;
    }
}

static void check_counts(void)
{
    for (uint32_t slot = 0; slot < PORTS * SLOTS; slot++)
        for (uint32_t i = 0; i < FAKE_GENERATIONS; i++) {
            const struct expected *expected = &world.expected[slot][i];
            CHECK(expected->counted <= expected->posted);
            if (world.fake && !world.copies)
                CHECK(expected->counted <= fake_arrived_of(immediate(slot, i)));
            if (expected->last < 0)
                continue;
            CHECK(expected->last >= expected->low || expected->inexact || !expected->num_events);
            CHECK(expected->last < expected->high || expected->lost || expected->num_events == 1);
        }
}

static uint64_t unnamed_strays(void)
{
    struct pdd_stats stats;
    uint64_t unnamed = world.unnamed;
    for (uint32_t i = 0; i < PORTS; i++) {
        if (world.ports[i])
            pdd_get_stats(world.ports[i], &stats);
        unnamed += world.ports[i] ? stats.num_strays_unnamed : 0;
    }
    return unnamed;
}

/* What a seed has come to. */
static void show(bool exact)
{
    uint64_t counted = 0, posted = 0;
    uint32_t num_reached = 0;
    for (uint32_t slot = 0; slot < PORTS * SLOTS; slot++)
        for (uint32_t i = 0; i < FAKE_GENERATIONS; i++) {
            counted += world.expected[slot][i].counted;
            posted += world.expected[slot][i].posted;
            num_reached += world.expected[slot][i].num_events;
        }
    fprintf(stderr, "%s%u writes, %llu pieces posted, %llu counted, %u reached, failed %d, counts are exact %d\n",
            check_context, world.num_writes, (unsigned long long)posted, (unsigned long long)counted, num_reached,
            world.failed[0] || world.failed[1] || world.failed[2], exact);
}

static void finish(void)
{
    bool any_failed = world.failed[0] || world.failed[1] || world.failed[2];
    fake_calm();
    for (uint32_t i = 0; i < PORTS; i++)
        if (world.ports[i] && !once_in(3))
            settle(i);
    bool exact = world.fake && !world.copies && !world.lost_strays && !any_failed && all_ended(0) && all_ended(1) &&
                 all_ended(2) && !unnamed_strays();
    if (exact)
        settle_counts();
    for (uint32_t i = 0; i < PORTS; i++)
        if (world.ports[i])
            close_port(i);
    for (uint32_t i = 0; i < world.num_regions; i++) {
        check_region(&world.regions[i]);
        munmap(world.regions[i].map, BODY + 2 * GUARD);
        if (world.regions[i].fd >= 0)
            close(world.regions[i].fd);
    }
    check_counts();
    if (world.fake && !world.copies)
        CHECK(world.arrived == fake_arrived());
    CHECK(!fake_num_open() && !fake_num_under_way());
    if (getenv("FUZZ_SHOW"))
        show(exact);
}

static struct fake_odds bad_weather(void)
{
    static const struct fake_odds all = {200, 20, 20, 500, 20, 100, 20, 20, 5, 1, 20, 100};
    uint32_t odds[sizeof all / sizeof(uint32_t)];
    struct fake_odds some;
    memcpy(odds, &all, sizeof all);
    for (uint32_t i = 0; i < sizeof odds / sizeof *odds; i++)
        odds[i] = once_in(2) ? odds[i] : 0;
    memcpy(&some, odds, sizeof some);
    return some;
}

static void run_seed(uint64_t seed)
{
    const bool fake = world.fake, copies = world.copies;
    memset(&world, 0, sizeof world);
    world.fake = fake;
    world.copies = copies;
    world.random = seed_state(seed);
    for (uint32_t i = 0; i < WATCHES; i++)
        CHECK((world.watches[i].wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) >= 0);
    for (uint32_t slot = 0; slot < PORTS * SLOTS; slot++)
        for (uint32_t i = 0; i < FAKE_GENERATIONS; i++)
            world.expected[slot][i].last = -1;
    world.closes = once_in(2);
    fake_start(seed, once_in(8) ? (struct fake_odds){0} : bad_weather());
    for (uint32_t i = 0; i < STEPS; i++)
        step();
    finish();
    for (uint32_t i = 0; i < WATCHES; i++)
        close(world.watches[i].wake_fd);
}

int main(int number, char **arguments)
{
    if (number != 4) {
        fprintf(stderr, "usage: fuzz_fabric fake|tcp|copies FIRST_SEED NUM_SEEDS\n");
        return 2;
    }
    world.copies = !strcmp(arguments[1], "copies");
    world.fake = world.copies || !strcmp(arguments[1], "fake");
    uint64_t first = strtoull(arguments[2], NULL, 10), num_seeds = strtoull(arguments[3], NULL, 10);
    int num_fds = 0;
    for (uint64_t seed = first; seed < first + num_seeds; seed++) {
        snprintf(check_context, sizeof check_context, "%s, seed %llu: ", arguments[1], (unsigned long long)seed);
        run_seed(seed);
        num_fds = seed == first ? count_fds() : num_fds;
        CHECK(count_fds() <= num_fds);
    }
    puts("ok");
    return 0;
}
