/* project.c: between the stages' float rows and the kernels' matrix products. */
#include "forward/project.h"

#define ITEM_BYTES (256u * 1024u) /* of weights, with few tokens */
#define ITEM_BLOCKS 16             /* with many */
#define MANY_TOKENS 4              /* from here on products are bound by arithmetic and not by reading weights */

float *coli_thread_scratch(const colibri_t *s, uint32_t thread) { return s->b.thread_scratch + thread * s->thread_stride; }

void *coli_kernel_scratch(const colibri_t *s, uint32_t thread) {
    return s->b.kernel_scratch + (uint64_t)thread * COLI_KERNEL_SCRATCH;
}

static void quantize_row(const coli_kernels_t *kernels, const float *x, uint32_t k, uint32_t row, coli_act_t *act) {
    uint64_t at = (uint64_t)row * act->stride;
    if (act->bits == 16)
        kernels->quantize16(x, k, act->hi + at, act->lo + at, &act->scale[row], &act->sum_hi[row], &act->sum_lo[row]);
    else kernels->quantize8(x, k, act->hi + at, &act->scale[row], &act->sum_hi[row]);
}

void coli_act_row(const coli_kernels_t *kernels, const float *x, uint32_t k, float *scratch, uint32_t row, coli_act_t *act,
                  coli_act_t *act2) {
    memcpy(scratch, x, k * sizeof(float));
    kernels->hadamard(scratch, k, coli_rotation_block(k));
    if (act) quantize_row(kernels, scratch, k, row, act);
    if (act2) quantize_row(kernels, scratch, k, row, act2);
}

coli_act_t coli_act_choose(uint32_t dtype, const coli_act_t *quantised, float *x, uint32_t stride) {
    if (coli_is_quantised(dtype)) return *quantised;
    return (coli_act_t){.stride = stride, .f32 = x};
}

uint32_t coli_block_grain(uint64_t block_bytes, uint32_t multiple, uint32_t tokens) {
    uint64_t blocks = tokens >= MANY_TOKENS ? ITEM_BLOCKS : ITEM_BYTES / block_bytes;
    return (uint32_t)COLI_MAX(multiple, blocks / multiple * multiple);
}

typedef struct project_work {
    const colibri_t *s;
    const coli_matrix_t *m;
    coli_matmul_t call; /* over all blocks */
} project_work_t;

static void project_blocks(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const project_work_t *work = argument;
    coli_matmul_t call = work->call;
    call.scratch = coli_kernel_scratch(work->s, thread);
    call.w += begin * call.block_bytes;
    if (call.w_scale) call.w_scale += (uint64_t)begin * COLIBRI_TILE_ROWS;
    call.y += (uint64_t)begin * COLIBRI_TILE_ROWS;
    call.n_blocks = end - begin;
    work->s->kernels->matmul[work->m->dtype](&call);
}

void coli_project(colibri_t *s, const coli_matrix_t *m, const coli_act_t *x, uint32_t n, float *y, uint64_t y_stride) {
    uint32_t blocks = coli_pad_rows(m->rows) / COLIBRI_TILE_ROWS;
    project_work_t work = {s,
                           m,
                           {.w = m->tiles,
                            .w_scale = m->scale,
                            .block_bytes = m->block_bytes,
                            .n_blocks = blocks,
                            .k = coli_pad_k(m->k),
                            .x = x,
                            .n_tokens = n,
                            .y = y,
                            .y_stride = y_stride}};
    uint32_t multiple = s->kernels->geometry[m->dtype].blocks;
    uint32_t grain = coli_block_grain(m->block_bytes, multiple, n);
    coli_pool_run(s->pool, project_blocks, &work, blocks, grain);
}
