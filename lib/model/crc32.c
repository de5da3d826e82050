/* crc32.c: CRC-32 as in zlib (ISO-HDLC, reflected polynomial 0xEDB88320), the checksum of the file format. Eight bytes a
 * step: table s holds the effect of a byte that s more bytes follow, so eight look-ups replace eight dependent steps. */
#include "model/format.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#  error "the file format is little-endian and is used as it lies in memory"
#endif

/* The CRC is linear: an entry is the exclusive or of the entries of its bits. So eight constants make a table of 256, and the
 * compiler computes all of them: nothing to fill at run time, nothing to race on. */
#define E(i, a, b, c, d, e, f, g, h)                                                                                         \
    (((i)&1 ? a : 0) ^ ((i)&2 ? b : 0) ^ ((i)&4 ? c : 0) ^ ((i)&8 ? d : 0) ^ ((i)&16 ? e : 0) ^ ((i)&32 ? f : 0) ^             \
     ((i)&64 ? g : 0) ^ ((i)&128 ? h : 0))
#define E4(i, ...) E(i, __VA_ARGS__), E((i) + 1, __VA_ARGS__), E((i) + 2, __VA_ARGS__), E((i) + 3, __VA_ARGS__)
#define E16(i, ...) E4(i, __VA_ARGS__), E4((i) + 4, __VA_ARGS__), E4((i) + 8, __VA_ARGS__), E4((i) + 12, __VA_ARGS__)
#define E64(i, ...) E16(i, __VA_ARGS__), E16((i) + 16, __VA_ARGS__), E16((i) + 32, __VA_ARGS__), E16((i) + 48, __VA_ARGS__)
#define SLICE(...) { E64(0, __VA_ARGS__), E64(64, __VA_ARGS__), E64(128, __VA_ARGS__), E64(192, __VA_ARGS__) }

static const uint32_t table[8][256] = { /* table[s][1 << bit], bit 0 ... 7 */
    SLICE(0x77073096u, 0xee0e612cu, 0x076dc419u, 0x0edb8832u, 0x1db71064u, 0x3b6e20c8u, 0x76dc4190u, 0xedb88320u),
    SLICE(0x191b3141u, 0x32366282u, 0x646cc504u, 0xc8d98a08u, 0x4ac21251u, 0x958424a2u, 0xf0794f05u, 0x3b83984bu),
    SLICE(0x01c26a37u, 0x0384d46eu, 0x0709a8dcu, 0x0e1351b8u, 0x1c26a370u, 0x384d46e0u, 0x709a8dc0u, 0xe1351b80u),
    SLICE(0xb8bc6765u, 0xaa09c88bu, 0x8f629757u, 0xc5b428efu, 0x5019579fu, 0xa032af3eu, 0x9b14583du, 0xed59b63bu),
    SLICE(0x3d6029b0u, 0x7ac05360u, 0xf580a6c0u, 0x30704bc1u, 0x60e09782u, 0xc1c12f04u, 0x58f35849u, 0xb1e6b092u),
    SLICE(0xcb5cd3a5u, 0x4dc8a10bu, 0x9b914216u, 0xec53826du, 0x03d6029bu, 0x07ac0536u, 0x0f580a6cu, 0x1eb014d8u),
    SLICE(0xa6770bb4u, 0x979f1129u, 0xf44f2413u, 0x33ef4e67u, 0x67de9cceu, 0xcfbd399cu, 0x440b7579u, 0x8816eaf2u),
    SLICE(0xccaa009eu, 0x4225077du, 0x844a0efau, 0xd3e51bb5u, 0x7cbb312bu, 0xf9766256u, 0x299dc2edu, 0x533b85dau),
};

/* The four bytes of x as bytes that `after` more bytes follow (the last one; the first has after + 3). */
COLI_INLINE uint32_t word(uint32_t x, int after) {
    return table[after + 3][x & 255] ^ table[after + 2][x >> 8 & 255] ^ table[after + 1][x >> 16 & 255] ^ table[after][x >> 24];
}

uint32_t coli_crc32(uint32_t crc, const void *data, size_t bytes) {
    const uint8_t *p = data;
    crc = ~crc;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint32_t w[2];
        memcpy(w, p, 8);
        crc = word(w[0] ^ crc, 4) ^ word(w[1], 0);
    }
    for (; bytes > 0; bytes--, p++) crc = crc >> 8 ^ table[0][(crc ^ *p) & 255];
    return ~crc;
}
