/* tile_machine.h: AMX's eight tile registers in software, as much of them as lib/kernels/amx.c uses, in place of the
 * intrinsics. What a processor would refuse (shapes that do not match, tiles without a configuration) ends the program with a
 * sentence.
 * Loads and stores touch the bytes of the configured rows and no others. To be included before amx.c. */
#ifndef TILE_MACHINE_H
#define TILE_MACHINE_H

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct tile_machine {
    int configured;
    unsigned rows[8], row_bytes[8];
    uint8_t data[8][16][64];
    uint64_t products, loads, loaded_bytes, configurations, releases; /* counted since the caller cleared them */
} tile_machine;

static inline void tile_trap(const char *what) {
    fprintf(stderr, "tile machine: %s\n", what);
    abort();
}

static inline void tile_machine_configure(const void *memory) {
    const uint8_t *c = memory;
    if (c[0] != 1) tile_trap("the palette is not 1");
    for (int i = 1; i < 16; i++)
        if (c[i] != 0) tile_trap("start row and reserved bytes must be zero");
    for (int i = 0; i < 16; i++) {
        unsigned row_bytes = c[16 + 2 * i] | (unsigned)c[17 + 2 * i] << 8, rows = c[48 + i];
        if (rows > 16 || row_bytes > 64 || (rows == 0) != (row_bytes == 0)) tile_trap("a tile's shape is out of range");
        if (i >= 8 && rows) tile_trap("there are eight tiles");
        if (i >= 8) continue;
        tile_machine.rows[i] = rows;
        tile_machine.row_bytes[i] = row_bytes;
    }
    memset(tile_machine.data, 0, sizeof tile_machine.data);
    tile_machine.configured = 1;
    tile_machine.configurations++;
}

static inline void tile_machine_release(void) {
    memset(tile_machine.rows, 0, sizeof tile_machine.rows);
    tile_machine.configured = 0;
    tile_machine.releases++;
}

static inline void tile_check(int tile) {
    if (!tile_machine.configured || !tile_machine.rows[tile]) tile_trap("a tile without a shape is used");
}

static inline void tile_machine_zero(int tile) {
    tile_check(tile);
    memset(tile_machine.data[tile], 0, sizeof tile_machine.data[tile]);
}

static inline void tile_machine_load(int tile, const void *memory, size_t stride) {
    tile_machine_zero(tile);
    for (unsigned r = 0; r < tile_machine.rows[tile]; r++)
        memcpy(tile_machine.data[tile][r], (const uint8_t *)memory + r * stride, tile_machine.row_bytes[tile]);
    tile_machine.loads++;
    tile_machine.loaded_bytes += tile_machine.rows[tile] * tile_machine.row_bytes[tile];
}

static inline void tile_machine_store(int tile, void *memory, size_t stride) {
    tile_check(tile);
    for (unsigned r = 0; r < tile_machine.rows[tile]; r++)
        memcpy((uint8_t *)memory + r * stride, tile_machine.data[tile][r], tile_machine.row_bytes[tile]);
}

/* C += A B: C[m][n] gets the sum over k of four signed products each, A[m][4 k ...] times B[k][4 n ...], modulo 2^32. */
static inline void tile_machine_product(int c, int a, int b) {
    unsigned rows = tile_machine.rows[c], depth = tile_machine.row_bytes[a] / 4, columns = tile_machine.row_bytes[c] / 4;
    tile_check(a), tile_check(b), tile_check(c);
    if (a == b || a == c || b == c) tile_trap("a product's tiles must differ");
    if (tile_machine.rows[a] != rows || tile_machine.rows[b] != depth) tile_trap("a product's rows do not match");
    if (tile_machine.row_bytes[b] != tile_machine.row_bytes[c]) tile_trap("a product's columns do not match");
    if (tile_machine.row_bytes[a] % 4 || tile_machine.row_bytes[c] % 4)
        tile_trap("a product's columns do not match");
    for (unsigned m = 0; m < rows; m++) {
        uint32_t sums[16];
        memcpy(sums, tile_machine.data[c][m], 64);
        for (unsigned k = 0; k < depth; k++) {
            const int8_t *x = (const int8_t *)tile_machine.data[a][m] + 4 * k, *w = (const int8_t *)tile_machine.data[b][k];
            for (unsigned n = 0; n < columns; n++)
                sums[n] += (uint32_t)(x[0] * w[4 * n] + x[1] * w[4 * n + 1] + x[2] * w[4 * n + 2] + x[3] * w[4 * n + 3]);
        }
        memcpy(tile_machine.data[c][m], sums, 64);
    }
    tile_machine.products++;
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define _tile_loadconfig(memory) tile_machine_configure(memory)
#define _tile_release() tile_machine_release()
#define _tile_zero(tile) tile_machine_zero(tile)
#define _tile_loadd(tile, memory, stride) tile_machine_load(tile, memory, stride)
#define _tile_stored(tile, memory, stride) tile_machine_store(tile, memory, stride)
#define _tile_dpbssd(c, a, b) tile_machine_product(c, a, b)

#endif
