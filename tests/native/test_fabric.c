/* The C library by itself, so that sanitizers see all of it: over one NIC, over two, and by copies. Prints what failed. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "checks.h"
#include "pdd_fabric.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { FIRST_KEY = 12, NIC_BYTES = 33, FIRST_PORT = 12 + 17 + 2 }; /* in an address: see pdd_address.c */
enum { PAGES = 64, PAGE = 4096, LAYERS = 3, LAYER = PAGES * PAGE, ARENA = LAYERS * LAYER, PATIENCE_MS = 30000 };

char check_context[128];

static const char *const PROVIDERS = "net,tcp";
static const char *hosts;
static bool copies;

struct bench {
    pdd_port *source, *target;
    uint8_t *from, *to;
    int from_fd;
    struct pdd_memory source_memory, target_memory;
    uint32_t peer;
    _Atomic uint64_t counter;
};

static uint32_t immediate(uint32_t slot, uint32_t generation) { return slot << 20 | generation << 7; }

static pdd_port *open_port(uint32_t max_writes)
{
    struct pdd_options options = {
        .providers = PROVIDERS, .hosts = hosts, .max_writes = max_writes, .copies = copies};
    char message[1024] = "";
    pdd_port *port = NULL;
    if (pdd_open(&options, &port, message, sizeof message)) {
        fprintf(stderr, "%s\n", message);
        exit(1);
    }
    return port;
}

static void meet(struct bench *bench, uint32_t *peer)
{
    CHECK(!pdd_add_peer(bench->source, bench->target_memory.address, bench->target_memory.address_bytes, peer));
}

static void setup(struct bench *bench, uint32_t max_writes)
{
    memset(bench, 0, sizeof *bench);
    bench->source = open_port(max_writes);
    bench->target = open_port(0);
    bench->from_fd = memfd_create("from", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(!ftruncate(bench->from_fd, ARENA) && !fcntl(bench->from_fd, F_ADD_SEALS, F_SEAL_SHRINK));
    bench->from = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, bench->from_fd, 0);
    CHECK(bench->from != MAP_FAILED);
    bench->to = calloc(1, ARENA);
    for (int i = 0; i < ARENA; i++)
        bench->from[i] = (uint8_t)(rand() >> 7);
    CHECK(!register_host(bench->source, (uint64_t)bench->from, ARENA, bench->from_fd, &bench->source_memory));
    CHECK(!register_host(bench->target, (uint64_t)bench->to, ARENA, -1, &bench->target_memory));
    meet(bench, &bench->peer);
}

static void teardown(struct bench *bench)
{
    pdd_close(bench->source);
    pdd_close(bench->target);
    pdd_free(bench->source);
    pdd_free(bench->target);
    munmap(bench->from, ARENA);
    close(bench->from_fd);
    free(bench->to);
}

static const struct pdd_piece WHOLE = {0, 0, PAGE};

static struct pdd_write make_write(const struct bench *bench, uint64_t token, uint32_t imm, const uint32_t *source,
                                   const uint32_t *target, uint32_t pages)
{
    return (struct pdd_write){
        .token = token,
        .source_base = (uint64_t)bench->from,
        .source_layer_bytes = LAYER,
        .source_page_bytes = PAGE,
        .target_layer_bytes = LAYER,
        .target_page_bytes = PAGE,
        .peer = bench->peer,
        .memory = bench->source_memory.memory,
        .immediate = imm,
        .num_layers = LAYERS,
        .num_pages = pages,
        .num_pieces = 1,
        .source_pages = source,
        .target_pages = target,
        .pieces = &WHOLE,
    };
}

static void shuffle(uint32_t *pages)
{
    for (uint32_t i = 0; i < PAGES; i++)
        pages[i] = i;
    for (uint32_t i = PAGES - 1; i; i--) {
        uint32_t j = (uint32_t)rand() % (i + 1), kept = pages[i];
        pages[i] = pages[j];
        pages[j] = kept;
    }
}

/* The next event of a port. */
static struct pdd_event next_event(pdd_port *port)
{
    struct pdd_event event;
    struct pollfd fd = {.fd = pdd_event_fd(port), .events = POLLIN};
    while (!pdd_drain(port, &event, 1))
        CHECK(poll(&fd, 1, PATIENCE_MS) == 1);
    return event;
}

static void expect_end(pdd_port *port, uint64_t token, int error, uint64_t pieces)
{
    struct pdd_event event = next_event(port);
    CHECK(event.kind == PDD_WRITE_DONE);
    CHECK(event.token == token);
    CHECK(event.error == error);
    CHECK(event.num_pieces == pieces);
    CHECK(event.num_bytes == pieces * PAGE);
}

static void expect_count(pdd_port *port, uint32_t imm)
{
    struct pdd_event event;
    do /* what a drop has cut off may still be told as strays */
        event = next_event(port);
    while (event.kind == PDD_STRAY);
    CHECK(event.kind == PDD_COUNT_REACHED);
    CHECK(event.immediate == imm);
    CHECK(event.first_ns <= event.last_ns);
}

/* One page, waited for: what was posted to the peer before is there by then. */
static void probe(struct bench *bench)
{
    static uint32_t generation;
    const uint32_t page[1] = {0}, imm = immediate(4000, ++generation & 0x1fff);
    struct pdd_write write = make_write(bench, ~0ull, imm, page, page, 1);
    CHECK(!pdd_expect(bench->target, imm, LAYERS));
    CHECK(!pdd_submit(bench->source, &write));
    expect_end(bench->source, ~0ull, 0, LAYERS);
    expect_count(bench->target, imm);
}

static void test_permuted_pages(void)
{
    struct bench bench;
    uint32_t source[PAGES], target[PAGES], imm = immediate(1, 1);
    setup(&bench, 0);
    for (int round = 0; round < 20; round++) {
        shuffle(source);
        shuffle(target);
        struct pdd_write write = make_write(&bench, (uint64_t)round, imm, source, target, PAGES);
        CHECK(!pdd_expect(bench.target, imm, LAYERS * PAGES));
        CHECK(pdd_expect(bench.target, imm, 1) == -EEXIST);
        CHECK(!pdd_submit(bench.source, &write));
        expect_count(bench.target, imm);
        expect_end(bench.source, (uint64_t)round, 0, LAYERS * PAGES);
        CHECK(pdd_arrived(bench.target, imm) == LAYERS * PAGES);
        for (int i = 0; i < LAYERS * PAGES; i++) {
            uint8_t *layer_to = bench.to + i / PAGES * LAYER, *layer_from = bench.from + i / PAGES * LAYER;
            CHECK(!memcmp(layer_to + target[i % PAGES] * PAGE, layer_from + source[i % PAGES] * PAGE, PAGE));
        }
    }
    teardown(&bench);
}

static void test_joined_pages_count_each(void)
{
    struct bench bench;
    uint32_t pages[PAGES], imm = immediate(2, 1);
    struct pdd_stats stats;
    struct pdd_info info;
    setup(&bench, 0);
    pdd_get_info(bench.source, &info);
    for (uint32_t i = 0; i < PAGES; i++)
        pages[i] = i;
    struct pdd_write write = make_write(&bench, 1, imm, pages, pages, PAGES);
    CHECK(!pdd_expect(bench.target, imm, LAYERS * PAGES));
    CHECK(!pdd_submit(bench.source, &write));
    expect_count(bench.target, imm);
    expect_end(bench.source, 1, 0, LAYERS * PAGES);
    CHECK(!memcmp(bench.from, bench.to, ARENA));
    pdd_get_stats(bench.source, &stats);
    CHECK(stats.num_messages == LAYERS); /* 64 neighbours are one run of 256 KiB */
    for (uint32_t i = 0; i < PAGES; i++)
        pages[i] = PAGES - 1 - i;
    CHECK(!pdd_expect(bench.target, imm, LAYERS * PAGES));
    CHECK(!pdd_submit(bench.source, &write));
    expect_count(bench.target, imm);
    expect_end(bench.source, 1, 0, LAYERS * PAGES);
    pdd_get_stats(bench.source, &stats);
    CHECK(stats.num_messages == LAYERS + LAYERS * PAGES / (copies ? 1 : info.pages_per_write));
    teardown(&bench);
}

static void test_armed_layers(int wake_fd)
{
    struct bench bench;
    uint32_t source[PAGES], target[PAGES], imm = immediate(3, 1), watch;
    uint64_t one = 1;
    setup(&bench, 0);
    shuffle(source);
    shuffle(target);
    atomic_store(&bench.counter, 70);
    CHECK(!pdd_watch(bench.source, (uint64_t)&bench.counter, wake_fd, &watch));
    struct pdd_write armed = make_write(&bench, 1, imm, source, target, PAGES);
    armed.watch = watch;
    armed.counter_base = 70;
    CHECK(!pdd_expect(bench.target, imm, LAYERS * PAGES + 1));
    CHECK(!pdd_submit(bench.source, &armed));
    for (int layer = 0; layer < LAYERS; layer++) {
        probe(&bench);
        CHECK(pdd_arrived(bench.target, imm) == layer * PAGES);
        atomic_fetch_add(&bench.counter, 1);
        if (wake_fd >= 0)
            CHECK(write(wake_fd, &one, sizeof one) == sizeof one);
        if (layer < LAYERS - 1)
            while (pdd_arrived(bench.target, imm) < (layer + 1) * PAGES)
                probe(&bench);
    }
    expect_end(bench.source, 1, 0, LAYERS * PAGES);
    CHECK(!pdd_unwatch(bench.source, watch));
    CHECK(pdd_unwatch(bench.source, watch) == -ENOENT);
    teardown(&bench);
}

static void test_cancel(void)
{
    struct bench bench;
    uint32_t pages[PAGES], imm = immediate(4, 1), watch;
    setup(&bench, 0);
    shuffle(pages);
    CHECK(!pdd_watch(bench.source, (uint64_t)&bench.counter, -1, &watch));
    struct pdd_write write = make_write(&bench, 9, imm, pages, pages, PAGES);
    write.watch = watch;
    CHECK(!pdd_expect(bench.target, imm, LAYERS * PAGES));
    CHECK(!pdd_submit(bench.source, &write));
    atomic_store(&bench.counter, 1);
    while (pdd_arrived(bench.target, imm) < PAGES)
        probe(&bench);
    CHECK(pdd_cancel(bench.source, 10) == -ENOENT);
    CHECK(!pdd_cancel(bench.source, 9));
    expect_end(bench.source, 9, ECANCELED, PAGES);
    CHECK(!pdd_change_expected(bench.target, imm, PAGES));
    expect_count(bench.target, imm);
    CHECK(!pdd_change_expected(bench.target, imm, 1)); /* reached already: no second event */
    probe(&bench);
    CHECK(pdd_unexpect(bench.target, imm) == PAGES);
    CHECK(pdd_change_expected(bench.target, imm, 1) == -ENOENT);
    teardown(&bench);
}

/* The goal is changed while pieces arrive: one event, whoever comes first. */
static void test_goal_races(void)
{
    struct bench bench;
    uint32_t pages[PAGES];
    setup(&bench, 0);
    shuffle(pages);
    for (uint32_t round = 0; round < 100; round++) {
        uint32_t imm = immediate(5, round);
        struct pdd_write write = make_write(&bench, round, imm, pages, pages, PAGES);
        CHECK(!pdd_expect(bench.target, imm, 100000));
        CHECK(!pdd_submit(bench.source, &write));
        for (uint32_t goal = 1000; goal >= LAYERS * PAGES; goal -= 101)
            CHECK(!pdd_change_expected(bench.target, imm, goal));
        CHECK(!pdd_change_expected(bench.target, imm, LAYERS * PAGES));
        expect_count(bench.target, imm);
        expect_end(bench.source, round, 0, LAYERS * PAGES);
        CHECK(pdd_unexpect(bench.target, imm) == LAYERS * PAGES);
    }
    teardown(&bench);
}

/* Disarmed while pieces arrive: each is counted once, as progress or as a stray. */
static void test_unexpect_races(void)
{
    struct bench bench;
    struct pdd_event event;
    uint32_t pages[PAGES];
    setup(&bench, 0);
    shuffle(pages);
    for (uint32_t round = 0; round < 50; round++) {
        uint32_t imm = immediate(6, round);
        int64_t counted = 0;
        struct pdd_write write = make_write(&bench, round, imm, pages, pages, PAGES);
        CHECK(!pdd_expect(bench.target, imm, 100000));
        CHECK(!pdd_submit(bench.source, &write));
        for (uint32_t i = 0; i < round * 20 && counted < 10; i++)
            counted = pdd_arrived(bench.target, imm);
        counted = pdd_unexpect(bench.target, imm);
        expect_end(bench.source, round, 0, LAYERS * PAGES);
        while (counted < LAYERS * PAGES) {
            event = next_event(bench.target);
            CHECK(event.kind == PDD_STRAY);
            CHECK(event.immediate == imm);
            counted += (int64_t)event.num_pieces;
        }
        CHECK(counted == LAYERS * PAGES);
    }
    teardown(&bench);
}

static void test_full(void)
{
    struct bench bench;
    uint32_t page[1] = {3}, watch;
    setup(&bench, 8);
    CHECK(!pdd_watch(bench.source, (uint64_t)&bench.counter, -1, &watch));
    for (uint64_t round = 0; round < 100; round++) {
        struct pdd_write write = make_write(&bench, 0, immediate(7, 0), page, page, 1);
        write.watch = watch;
        write.counter_base = atomic_load(&bench.counter);
        for (write.token = 0; write.token < 8; write.token++)
            CHECK(!pdd_submit(bench.source, &write));
        CHECK(pdd_submit(bench.source, &write) == -EAGAIN);
        atomic_fetch_add(&bench.counter, LAYERS);
        bool seen[8] = {false};
        for (int i = 0; i < 8; i++) {
            struct pdd_event event = next_event(bench.source);
            CHECK(event.kind == PDD_WRITE_DONE && !event.error && event.token < 8 && !seen[event.token]);
            seen[event.token] = true;
        }
    }
    teardown(&bench);
}

static void test_bad_writes(void)
{
    struct bench bench;
    uint32_t page[1] = {0}, beyond[1] = {PAGES}, last[1] = {PAGES - 1};
    const struct pdd_piece wide = {0, 0, ~0ull}, empty = {0, 0, 0};
    setup(&bench, 0);
    const struct pdd_write good = make_write(&bench, 1, immediate(8, 0), page, page, 1);
    struct pdd_write bad[] = {good, good, good, good, good, good, good, good, good, good};
    bad[0].source_pages = beyond;
    bad[1].num_layers = LAYERS + 1;
    bad[2].num_layers = 0;
    bad[3].pieces = &wide;
    bad[4].pieces = &empty;
    bad[5].source_base -= PAGE;
    bad[6].immediate |= 1;
    bad[7].peer ^= 1 << 16;
    bad[8].target_base = PAGE;
    bad[8].num_layers = LAYERS;
    bad[8].target_pages = last;
    bad[9].source_layer_bytes = ~0ull;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(pdd_submit(bench.source, &bad[i]) < 0);
    CHECK(pdd_add_peer(bench.source, (const uint8_t *)"nonsense", 8, &bad[0].peer) < 0);
    probe(&bench);
    teardown(&bench);
}

static void test_drop_and_close(void)
{
    struct bench bench;
    uint32_t pages[PAGES];
    setup(&bench, 0);
    shuffle(pages);
    for (int round = 0; round < 5; round++) {
        probe(&bench);
        for (uint64_t token = 0; token < 300; token++) {
            struct pdd_write write = make_write(&bench, token, immediate(9, 0), pages, pages, PAGES);
            CHECK(!pdd_submit(bench.source, &write));
        }
        bool seen[300] = {false};
        if (round < 4)
            CHECK(!pdd_drop_peer(bench.source, bench.peer));
        else
            pdd_close(bench.source);
        for (int i = 0; i < 300; i++) {
            struct pdd_event event = next_event(bench.source);
            CHECK(event.kind == PDD_WRITE_DONE && event.token < 300 && !seen[event.token]);
            CHECK(event.error == ECANCELED || (!event.error && event.num_pieces == LAYERS * PAGES));
            seen[event.token] = true;
        }
        CHECK(!pdd_release(bench.target, bench.target_memory.memory));
        CHECK(!register_host(bench.target, (uint64_t)bench.to, ARENA, -1, &bench.target_memory));
        if (round < 4)
            meet(&bench, &bench.peer);
    }
    CHECK(pdd_submit(bench.source, &(struct pdd_write){0}) == -ESHUTDOWN);
    teardown(&bench);
}

static void test_closed_key(void)
{
    struct bench bench;
    uint32_t pages[PAGES];
    uint8_t *before = malloc(ARENA);
    struct pdd_memory closed;
    setup(&bench, 0);
    shuffle(pages);
    probe(&bench);
    memcpy(before, bench.to, ARENA);
    closed = bench.target_memory;
    CHECK(!register_host(bench.target, (uint64_t)bench.to, ARENA, -1, &bench.target_memory));
    CHECK(!pdd_release(bench.target, closed.memory));
    CHECK(pdd_release(bench.target, closed.memory) == -ENOENT);
    uint32_t old_peer = bench.peer, own_peer;
    struct pdd_memory mixed = bench.target_memory;
    memcpy(mixed.address + FIRST_KEY, closed.address + FIRST_KEY, sizeof(uint64_t));
    if (strchr(hosts, ','))
        memcpy(mixed.address + FIRST_KEY + NIC_BYTES, closed.address + FIRST_KEY + NIC_BYTES, sizeof(uint64_t));
    if (copies)
        memcpy(mixed.address + mixed.address_bytes - 16, closed.address + closed.address_bytes - 16, 16);
    meet(&bench, &bench.peer);
    CHECK(!pdd_add_peer(bench.source, mixed.address, mixed.address_bytes, &own_peer));
    /* To the closed endpoint, and with the closed key to an open one. */
    struct pdd_write write = make_write(&bench, 1, immediate(10, 0), pages, pages, PAGES);
    write.peer = old_peer;
    CHECK(!pdd_submit(bench.source, &write));
    write.peer = own_peer;
    write.token = 2;
    CHECK(!pdd_submit(bench.source, &write));
    CHECK(!pdd_expect(bench.target, immediate(10, 0), 1));
    struct timespec moment = {.tv_nsec = 50 * 1000 * 1000};
    nanosleep(&moment, NULL);
    CHECK(!pdd_drop_peer(bench.source, old_peer));
    CHECK(!pdd_drop_peer(bench.source, own_peer));
    CHECK(next_event(bench.source).kind == PDD_WRITE_DONE);
    CHECK(next_event(bench.source).kind == PDD_WRITE_DONE);
    probe(&bench);
    CHECK(pdd_unexpect(bench.target, immediate(10, 0)) == 0);
    CHECK(!memcmp(before, bench.to, ARENA));
    free(before);
    teardown(&bench);
}

/* Nobody listens at the second NIC's address: its path fails, what was on it ends, the rest goes over the first. */
static void test_failed_path(void)
{
    struct bench bench;
    struct pdd_peer_info info;
    struct pdd_memory broken;
    uint32_t pages[PAGES], num_failed = 0;
    if (copies || !strchr(hosts, ','))
        return;
    setup(&bench, 0);
    shuffle(pages);
    broken = bench.target_memory;
    memset(broken.address + FIRST_PORT + NIC_BYTES, 0xff, 2); /* the port of the second address */
    CHECK(!pdd_add_peer(bench.source, broken.address, broken.address_bytes, &bench.peer));
    for (uint64_t token = 0; token < 50; token++) {
        struct pdd_write write = make_write(&bench, token, immediate(11, (uint32_t)token), pages, pages, PAGES);
        CHECK(!pdd_submit(bench.source, &write));
        struct pdd_event event = next_event(bench.source);
        CHECK(event.kind == PDD_WRITE_DONE && event.error != ECANCELED);
        num_failed += event.error != 0;
    }
    CHECK(num_failed <= 5); /* once for each time that it was tried */
    CHECK(!pdd_get_peer(bench.source, bench.peer, &info));
    CHECK(info.num_paths == 2 && info.num_open >= 1 && !info.copies);
    teardown(&bench);
}

/* ---- copies ---- */
/* Without a descriptor the memory cannot be mapped by others: the NICs carry it, beside copies of what can. */
static void test_memory_that_cannot_be_mapped(void)
{
    struct bench bench;
    struct pdd_memory plain;
    struct pdd_stats stats;
    uint32_t pages[PAGES], imm = immediate(12, 0);
    if (!copies)
        return;
    setup(&bench, 0);
    shuffle(pages);
    CHECK(!register_host(bench.source, (uint64_t)bench.from, ARENA, -1, &plain));
    struct pdd_write write = make_write(&bench, 1, imm, pages, pages, PAGES);
    write.memory = plain.memory;
    CHECK(!pdd_expect(bench.target, imm, LAYERS * PAGES));
    CHECK(!pdd_submit(bench.source, &write));
    expect_count(bench.target, imm);
    expect_end(bench.source, 1, 0, LAYERS * PAGES);
    pdd_get_stats(bench.target, &stats);
    CHECK(!stats.num_copied_bytes);
    probe(&bench);
    pdd_get_stats(bench.target, &stats);
    CHECK(stats.num_copied_bytes);
    pdd_get_stats(bench.source, &stats);
    CHECK(!stats.num_failed_paths);
    teardown(&bench);
}

static int connect_to(const struct pdd_memory *memory)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const uint8_t *name = memory->address + memory->address_bytes - 32;
    int used = sprintf(address.sun_path + 1, "pdd-");
    for (int i = 0; i < 16; i++)
        used += sprintf(address.sun_path + 1 + used, "%02x", name[i]);
    int end = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    CHECK(!connect(end, (struct sockaddr *)&address, (socklen_t)(sizeof address.sun_family + 1 + (size_t)used)));
    return end;
}

/* Whoever says nonsense is closed, and harms nobody. */
static void test_strangers(void)
{
    struct bench bench;
    uint8_t bytes[40];
    struct timespec moment = {.tv_nsec = 1000 * 1000};
    if (!copies)
        return;
    setup(&bench, 0);
    for (int round = 0; round < 200; round++) {
        int end = connect_to(&bench.target_memory);
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)(rand() >> 7);
        if (round % 2)
            memcpy(bytes, "1ddp\2\0\0\0", 8);
        if (round % 4)
            CHECK(send(end, bytes, (size_t)(round % 41), MSG_NOSIGNAL) == round % 41);
        if (round % 20 == 0) {
            nanosleep(&moment, NULL);
            probe(&bench);
        }
        close(end);
    }
    probe(&bench);
    teardown(&bench);
}

static void test_everything(void)
{
    int wake_fd = eventfd(0, 0);
    srand(1);
    test_permuted_pages();
    test_joined_pages_count_each();
    test_armed_layers(-1);
    test_armed_layers(wake_fd);
    test_cancel();
    test_goal_races();
    test_unexpect_races();
    test_full();
    test_bad_writes();
    test_drop_and_close();
    test_closed_key();
    test_failed_path();
    test_memory_that_cannot_be_mapped();
    test_strangers();
    close(wake_fd);
}

int main(void)
{
    const struct {
        const char *hosts;
        bool copies;
    } ways[] = {{"127.0.0.1", false}, {"127.0.0.1,127.0.0.2", false}, {"127.0.0.1", true}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        hosts = ways[i].hosts;
        copies = ways[i].copies;
        test_everything();
    }
    puts("ok");
    return 0;
}
