/* test_base.c: status sentences, the arena and the operating system layer. */
#include "base/arena.h"
#include "base/status.h"
#include "check.h"

static void test_arena(void) {
    coli_arena_t counting = {0};
    CHECK(coli_arena_take(&counting, 3, 5) == NULL);
    CHECK_EQ(counting.used, 64);
    CHECK(coli_arena_take(&counting, 0, 8) == NULL);
    CHECK_EQ(counting.used, 64);
    _Alignas(64) uint8_t memory[256];
    coli_arena_t arena = {.base = memory};
    CHECK(coli_arena_take(&arena, 65, 1) == memory);
    CHECK(coli_arena_take(&arena, 1, 1) == memory + 128);
    CHECK_EQ(arena.used, 192);
    CHECK(!arena.overflow);
    CHECK(coli_arena_take(&counting, UINT64_MAX / 2, 3) == NULL);
    CHECK(counting.overflow);
    coli_arena_t full = {.used = UINT64_MAX - 63};
    coli_arena_take(&full, 64, 1);
    CHECK(full.overflow);
}

static void test_status(void) {
    CHECK_EQ(colibri_last_status(), COLIBRI_OK);
    CHECK_EQ(colibri_last_error()[0], 0);
    CHECK_EQ(coli_fail(COLIBRI_ERR_FORMAT, "row %d of %s", 7, "x"), COLIBRI_ERR_FORMAT);
    CHECK_EQ(colibri_last_status(), COLIBRI_ERR_FORMAT);
    CHECK(strcmp(colibri_last_error(), "row 7 of x") == 0);
    for (int i = 0; i < COLIBRI_STATUS_COUNT_; i++) CHECK(strncmp(colibri_status_name((colibri_status_t)i), "COLIBRI_", 8) == 0);
    CHECK(strcmp(colibri_status_name(COLIBRI_ERR_SLOT_FULL), "COLIBRI_ERR_SLOT_FULL") == 0);
    CHECK(strcmp(colibri_status_name((colibri_status_t)-1), "COLIBRI_ERR_UNKNOWN") == 0);
    CHECK(strcmp(colibri_status_name(COLIBRI_STATUS_COUNT_), "COLIBRI_ERR_UNKNOWN") == 0);
    /* A sentence that is too long is cut between characters: 511 is odd, each character here takes two bytes. */
    char name[1201] = "";
    for (int i = 0; i < 600; i++) memcpy(name + 2 * i, "\xC3\xA9", 3);
    coli_fail(COLIBRI_ERR_IO, "%s", name);
    CHECK_EQ(strlen(colibri_last_error()), 510);
}

int main(void) {
    test_status();
    test_arena();
    return check_report();
}
