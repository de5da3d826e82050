/* colibri.h: the whole public interface of libcolibri, Mixture-of-Experts language models on CPUs.
 *
 *     colibri_config_t cfg = COLIBRI_CONFIG_INIT;
 *     cfg.model_path = "model.colibri";
 *     colibri_t *ctx = colibri_init(&cfg);                        // NULL: colibri_last_error() says why
 *     colibri_set_input(ctx, tokens, lengths, 1);                 // lengths[0] new tokens for slot 0
 *     colibri_infer(ctx);                                         // appends them to the slot's KV cache
 *     colibri_get_output(ctx, logits, logits_bytes);              // float [batch][vocab]
 *     colibri_free(ctx);
 *
 * Words.  A *model* (colibri_model_t) is a mapped file: immutable, shareable by any number of sessions and threads. A
 * *session* (colibri_t) is one caller's mutable state: `max_batch_size` *slots*, each a sequence with its own KV cache.
 *
 * Errors.  Functions return a colibri_status_t, or NULL where they return an object. On failure colibri_last_status() and
 * colibri_last_error() of the same thread hold the status and one sentence that says what was wrong and where. A function
 * that fails leaves its object as it was, unless its comment says otherwise. The library never prints, exits, aborts or
 * reads the environment.
 *
 * Threads.  Functions on a model may be called from any number of threads at once. A session is used by one thread at a
 * time (colibri_cancel excepted). Different sessions are independent, also when they share a model.
 *
 * Memory.  After colibri_init, the functions marked [no alloc] neither allocate nor make file or memory system calls (but for what
 * STREAM, and MAP with too little memory, need to fetch experts).
 * Buffers that are handed over to get_output and route_tokens (hidden), and the workspace, are 64-byte aligned, else
 * COLIBRI_ERR_ALIGNMENT. Pointers returned by the library stay valid as their comments say and are never freed by the caller.
 *
 * Numbers.  The same file and tokens give the same logits, bit for bit, whatever the number of threads, the batch, the way
 * the prompt was cut into calls, the instruction set, and the host's floating-point environment (rounding mode, flushing of
 * subnormals), which the library leaves as it found it. (A load_balancing_strategy gives up the batch and the cutting.)
 *
 * Structs begin with struct_size, set by their _INIT macro to sizeof; fields are only ever appended, and zero always means
 * the default. A larger struct_size than the library knows is accepted if the unknown tail is zero.
 */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32) && defined(COLIBRI_SHARED)
#  ifdef COLIBRI_BUILD
#    define COLIBRI_API __declspec(dllexport)
#  else
#    define COLIBRI_API __declspec(dllimport)
#  endif
#elif defined(COLIBRI_BUILD) && (defined(__GNUC__) || defined(__clang__))
#  define COLIBRI_API __attribute__((visibility("default")))
#else
#  define COLIBRI_API
#endif

#define COLIBRI_VERSION_MAJOR 0
#define COLIBRI_VERSION_MINOR 1
#define COLIBRI_VERSION_PATCH 0
#define COLIBRI_VERSION_STRING "0.1.0"

/* An initialiser with struct_size set and everything else zero. */
#ifdef __cplusplus
} /* a template may not be extern "C" */
template <typename T> inline T colibri_sized_() {
    T s = T();
    s.struct_size = static_cast<uint32_t>(sizeof(T));
    return s;
}
extern "C" {
#  define COLIBRI_INIT_(type) colibri_sized_<type>()
#else
#  define COLIBRI_INIT_(type) { .struct_size = sizeof(type) }
#endif

/* ---- Status ------------------------------------------------------------------------------------------------------- */

typedef enum colibri_status_t {
    COLIBRI_OK = 0,
    COLIBRI_ERR_INVALID_ARGUMENT = 1, /* a null pointer, a value out of range, an unknown option */
    COLIBRI_ERR_ALIGNMENT = 2,        /* a buffer is not 64-byte aligned */
    COLIBRI_ERR_OUT_OF_MEMORY = 3,    /* the system refused memory */
    COLIBRI_ERR_WORKSPACE = 4,        /* the given workspace is smaller than colibri_workspace_size says */
    COLIBRI_ERR_BUFFER_TOO_SMALL = 5, /* an output buffer is too small; the needed size was reported where possible */
    COLIBRI_ERR_NOT_FOUND = 6,        /* no such file */
    COLIBRI_ERR_IO = 7,               /* the system reported an error on a file */
    COLIBRI_ERR_FORMAT = 8,           /* not a .colibri file, truncated, or damaged structure */
    COLIBRI_ERR_VERSION = 9,          /* a file, or a struct, of a newer version than this library reads */
    COLIBRI_ERR_CHECKSUM = 10,        /* stored and computed checksum differ */
    COLIBRI_ERR_UNSUPPORTED = 11,     /* well-formed, but not something this build or machine can do */
    COLIBRI_ERR_TOKEN = 12,           /* a token id outside 0 ... vocab_size - 1 */
    COLIBRI_ERR_SLOT_FULL = 13,       /* a slot would exceed max_seq_len */
    COLIBRI_ERR_STATE = 14,           /* called out of order, for example infer without set_input */
    COLIBRI_ERR_NOT_FINITE = 15,      /* a slot's numbers became NaN or infinite (damaged weights or overflow) */
    COLIBRI_ERR_CANCELLED = 16,       /* colibri_cancel was called */
    COLIBRI_ERR_NO_TOKENIZER = 17,    /* the file holds no tokenizer */
    COLIBRI_ERR_ISA = 18,             /* the forced instruction set is not there */
    COLIBRI_ERR_THREAD = 19,          /* threads could not be started, or the session belongs to a parent process (fork) */
    COLIBRI_STATUS_COUNT_ = 20
} colibri_status_t;

COLIBRI_API const char *colibri_status_name(colibri_status_t status); /* "COLIBRI_ERR_FORMAT"; static, never NULL */
COLIBRI_API colibri_status_t colibri_last_status(void);               /* of this thread's latest failed call, else COLIBRI_OK */
COLIBRI_API const char *colibri_last_error(void); /* its sentence, UTF-8, at most 511 bytes; valid until this thread's next call */

/* ---- Version and machine -------------------------------------------------------------------------------------------- */

typedef enum colibri_isa_t {
    COLIBRI_ISA_AUTO = 0, /* the best this machine has */
    COLIBRI_ISA_REF = 1,  /* portable C: the definition of every kernel */
    COLIBRI_ISA_AVX2 = 2, /* AVX2, FMA, F16C */
    COLIBRI_ISA_AVX512 = 3, /* AVX-512 F, BW, VL, DQ; VNNI used where present */
    COLIBRI_ISA_AMX = 4,    /* int8 tiles for q8 and q4 with several tokens, else as AVX512; Linux must grant them */
    COLIBRI_ISA_NEON = 5,   /* any 64-bit ARM; dot products and int8 matrix products used where present */
    COLIBRI_ISA_COUNT_ = 6
} colibri_isa_t;

COLIBRI_API const char *colibri_version(void);                  /* of the library, "0.1.0" */
COLIBRI_API const char *colibri_build_info(void);               /* compiler, target and kernels built in, one line, static */
COLIBRI_API const char *colibri_cpu_info(void);                 /* what was detected, "avx2 fma f16c ..."; static */
COLIBRI_API const char *colibri_isa_name(colibri_isa_t isa);    /* "auto", "ref", "avx2", ...; NULL if unknown */
COLIBRI_API int colibri_isa_from_name(const char *name);        /* a colibri_isa_t, or -1 */
COLIBRI_API int colibri_isa_supported(colibri_isa_t isa);       /* 1 if built in and usable here (CPU and OS) */

/* ---- Models --------------------------------------------------------------------------------------------------------- */

typedef struct colibri_model_t colibri_model_t;

/* Weight types. Zero is "as the file has it", so these are the file's codes (colibri_format.h) plus one. */
typedef enum colibri_dtype_t {
    COLIBRI_DTYPE_DEFAULT = 0,
    COLIBRI_DTYPE_F32 = 1,
    COLIBRI_DTYPE_F16 = 2,
    COLIBRI_DTYPE_BF16 = 3,
    COLIBRI_DTYPE_Q8 = 4, /* rotated int8, one scale per row */
    COLIBRI_DTYPE_Q4 = 5  /* rotated, 4.25 bits: 16 levels, a scale for 16 values, one per row */
} colibri_dtype_t;

typedef struct colibri_model_info_t {
    uint32_t struct_size;
    int32_t vocab_size;
    int32_t hidden_size;
    int32_t num_layers;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t num_experts;
    int32_t top_k;             /* experts per token */
    int32_t moe_intermediate_size;
    int32_t shared_intermediate_size; /* 0: no shared expert */
    int32_t dense_intermediate_size;  /* 0: no dense layer */
    int32_t max_position;
    int32_t dtype;             /* colibri_dtype_t of the experts */
    int32_t bos_token;         /* -1: none */
    int32_t num_eos;
    int32_t eos_token[8];
    int32_t has_tokenizer;
    int32_t has_chat_template;
    uint64_t file_size;        /* bytes */
    uint64_t num_parameters;   /* unpadded weights, embedding and head counted as stored */
    uint64_t active_bytes;     /* weight bytes, scales included, that one decoded token reads */
    char model_type[32];
} colibri_model_info_t;
#define COLIBRI_MODEL_INFO_INIT COLIBRI_INIT_(colibri_model_info_t)

/* Open a .colibri file (UTF-8 path). It is mapped; header, directory, tokenizer and texts are copied and checked, weights are not
 * read. So text and model_info do not depend on what becomes of the file; weights in use must not change (see residency).
 * *model receives an object with one reference, to be dropped by colibri_model_close. */
COLIBRI_API colibri_status_t colibri_model_open(const char *path, colibri_model_t **model);
/* The same from memory: the bytes of a .colibri file, 64-byte aligned. Nothing is copied: the caller owns them, and keeps them as
 * they are until the model is closed and every session on it freed. */
COLIBRI_API colibri_status_t colibri_model_open_memory(const void *data, size_t size, colibri_model_t **model);
/* Drop the caller's reference. Sessions hold their own; the mapping goes with the last one. NULL is ignored. */
COLIBRI_API void colibri_model_close(colibri_model_t *model);
COLIBRI_API colibri_status_t colibri_model_info(const colibri_model_t *model, colibri_model_info_t *info);
/* Read every payload and compare its checksum; COLIBRI_ERR_CHECKSUM names the first bad one. */
COLIBRI_API colibri_status_t colibri_model_verify(const colibri_model_t *model);
/* The file's chat template (Jinja) or metadata (JSON): UTF-8, not zero-terminated, valid while the model is open.
 * *text is NULL and *bytes 0 if the file has none. */
COLIBRI_API colibri_status_t colibri_model_chat_template(const colibri_model_t *model, const char **text, size_t *bytes);
COLIBRI_API colibri_status_t colibri_model_metadata(const colibri_model_t *model, const char **json, size_t *bytes);

/* One row of the directory, for inspection. index 0 ... until COLIBRI_ERR_INVALID_ARGUMENT. */
typedef struct colibri_tensor_info_t {
    uint32_t struct_size;
    int32_t layer;      /* -1: not of a layer */
    int32_t rows, k, count;
    int32_t dtype;      /* colibri_dtype_t; -1: bytes */
    uint64_t offset, size; /* bytes */
    char role[32];      /* "experts", "attn_qkv", ... */
} colibri_tensor_info_t;
#define COLIBRI_TENSOR_INFO_INIT COLIBRI_INIT_(colibri_tensor_info_t)
COLIBRI_API colibri_status_t colibri_model_tensor(const colibri_model_t *model, size_t index, colibri_tensor_info_t *info);

/* ---- Text ----------------------------------------------------------------------------------------------------------- */

#define COLIBRI_TOKENIZE_ADD_SPECIAL 1u   /* add what the tokenizer adds by default (BOS and the like) */
#define COLIBRI_TOKENIZE_PARSE_SPECIAL 2u /* special tokens written in the text ("</s>") become their ids, else plain text */

/* Text (UTF-8, any bytes allowed: invalid ones are read as U+FFFD) to ids. *count receives the number of ids, also when
 * `capacity` (in ids) is too small: then COLIBRI_ERR_BUFFER_TOO_SMALL, nothing useful is in `tokens`, and the call can be
 * repeated. tokens may be NULL if capacity is 0. Time is near linear in `bytes`. Temporary memory comes from malloc. */
COLIBRI_API colibri_status_t colibri_tokenize(const colibri_model_t *model, const char *text, size_t bytes, uint32_t flags,
                                              int32_t *tokens, size_t capacity, size_t *count);

#define COLIBRI_DETOKENIZE_SPECIAL 1u     /* write special tokens out; default: they give nothing */

/* Ids to UTF-8 text, not zero-terminated; capacity and *bytes in bytes, as above. Ids the tokenizer does not know but
 * below vocab_size give nothing; others are COLIBRI_ERR_TOKEN. Bytes that form no character give U+FFFD. */
COLIBRI_API colibri_status_t colibri_detokenize(const colibri_model_t *model, const int32_t *tokens, size_t n, uint32_t flags,
                                                char *text, size_t capacity, size_t *bytes);

/* Streaming: one token in, whole characters out; the rest waits in the state. The caller owns the state; COLIBRI_STREAM_INIT
 * begins a new text. token -1 ends it: what waits comes out as U+FFFD. Concatenated results equal colibri_detokenize.
 * 64 bytes of text hold most tokens; COLIBRI_ERR_BUFFER_TOO_SMALL leaves the state unchanged and sets *bytes. [no alloc] */
typedef struct colibri_stream_t {
    uint32_t struct_size;
    uint32_t flags;         /* COLIBRI_DETOKENIZE_* */
    uint32_t started;       /* internal */
    uint32_t num_pending;   /* internal */
    uint8_t pending[16];    /* internal */
} colibri_stream_t;
#define COLIBRI_STREAM_INIT COLIBRI_INIT_(colibri_stream_t)
COLIBRI_API colibri_status_t colibri_stream_token(const colibri_model_t *model, colibri_stream_t *stream, int32_t token,
                                                  char *text, size_t capacity, size_t *bytes);

/* ---- Sessions ------------------------------------------------------------------------------------------------------- */

typedef struct colibri_t colibri_t;

typedef enum colibri_output_t {
    COLIBRI_OUTPUT_LAST = 0,  /* logits of each slot's last token: [batch][vocab] */
    COLIBRI_OUTPUT_ALL = 1,   /* logits of every token of the call, packed like the input: [tokens][vocab] */
    COLIBRI_OUTPUT_HIDDEN = 2 /* the final hidden state (after the last norm) of every token: [tokens][hidden] */
} colibri_output_t;

typedef enum colibri_log_level_t { COLIBRI_LOG_INFO = 1, COLIBRI_LOG_WARNING = 2 } colibri_log_level_t;
/* `message` is valid during the call. Called only from colibri_workspace_size and colibri_init, on the caller's thread. */
typedef void (*colibri_log_fn)(int level, const char *message, void *user_data);

/* A host that brings its own threads. The library calls parallel_for on the caller's thread, from inside colibri_init, infer,
 * get_output, moe_forward and route_tokens, many times each. It must call task(argument, i) exactly once for each i of 0 ... n - 1, in
 * any order, on any threads, also one after another on one, and return when all those calls have returned; n <= num_threads. No
 * task waits for another one. No two calls of one parallel_for may have the same i: it names a task's memory, and nothing else.
 * Sessions in use by different threads call it at the same time. Results are the same bits, whichever thread runs what. */
typedef void (*colibri_task_fn)(void *argument, int32_t i);
typedef void (*colibri_parallel_for_fn)(colibri_task_fn task, void *argument, int32_t n, void *user_data);

/* Where the weights live. Results are the same bits in every mode. */
typedef enum colibri_residency_t {
    COLIBRI_RESIDENCY_DEFAULT = 0, /* STREAM if expert_cache_size is set, HUGE if hugepage_size is set, else MAP */
    COLIBRI_RESIDENCY_MAP = 1,     /* in the page cache, mapped: nothing is copied, processes share it. Read ahead by init if the
                                      model fits the memory this process may use; if not, infer tells the system which experts
                                      come next (madvise). A file truncated or unreadable under the mapping raises SIGBUS:
                                      see guard_mapping */
    COLIBRI_RESIDENCY_LOCK = 2,    /* as MAP, and locked there (mlock), the session's own memory too: no page faults after init.
                                      Where the system refuses (RLIMIT_MEMLOCK): a warning, and MAP. A model stays locked until
                                      its last reference is closed; a caller's workspace is touched, but left for it to lock */
    COLIBRI_RESIDENCY_HUGE = 3,    /* all weights copied by init into the workspace, on huge pages where the system gives them: a
                                      pool of hugepage_size (hugetlbfs), else transparent ones, else ordinary pages; the log and
                                      colibri_stats say which. Page faults none, SIGBUS impossible */
    COLIBRI_RESIDENCY_STREAM = 4,  /* routed experts stay in the file; expert_cache_size of them are cached in the workspace, the
                                      other weights are copied there by init. Missing experts are read while those there are
                                      computed, likely ones of the next layer ahead of time. SIGBUS impossible; a read that fails
                                      is COLIBRI_ERR_IO of that infer, and the next one tries again */
    COLIBRI_RESIDENCY_COUNT_ = 5
} colibri_residency_t;

/* Bounds how many tokens one expert computes, and with that the worst case of prefill. CHANGES RESULTS, and makes them depend
 * on what is computed together: max_chunk_tokens, how a prompt is cut into calls, the other slots. They are still the same bits
 * for any number of threads, instruction set and residency.
 *
 * In each layer with experts, of the n tokens computed together (max_chunk_tokens or what is left of the call, in order of
 * slot, then position; rows of colibri_moe_forward likewise) every expert takes at most C token-expert pairs (GShard, arXiv
 * 2006.16668; Switch, arXiv 2101.03961), computed without rounding from the float's exact value:
 *
 *     C = max(1, ceil(capacity_factor * n * top_k / num_experts))
 *
 * Tokens take their places in order. A pair is admitted if its expert has fewer than C pairs of the tokens before; else the
 * expert is full, and the strategy says what becomes of the pair. One token alone (n = 1) finds no expert full: decoding one
 * slot is not changed. A token whose router logits are not finite stays as it is and takes no place: its slot fails, the
 * others do not notice. Moved and dropped pairs are counted in colibri_stats; the tokens of colibri_expert_stats are those
 * after moving and dropping. colibri_route_tokens is not affected. */
typedef enum colibri_load_balancing_t {
    COLIBRI_BALANCE_NONE = 0,
    /* A token's pairs with full experts move, in order, after its others were admitted: each to the expert with the largest
     * p = exp(logit - the token's largest logit), in float and above 0, ties to the lower id, that is neither full nor the
     * token's already; without one it is dropped. The weights of a token that lost a pair are then those that the router gives
     * to the experts it now has: p / sum * routed_scale, where the sum is over all experts by id, or with norm_topk over the
     * token's (first those that stayed, then the moved ones, each most likely first; weights are 0 if it is 0) */
    COLIBRI_BALANCE_SOFT_CAPACITY = 1,
    /* A pair with a full expert is dropped: it adds nothing, and the token's other weights stay what they were */
    COLIBRI_BALANCE_HARD_CAPACITY = 2
} colibri_load_balancing_t;

typedef struct colibri_config_t {
    uint32_t struct_size;
    int32_t device_id;           /* must be 0: this library runs on the CPU */
    const char *model_path;      /* UTF-8; opened for this session alone. Exactly one of model_path, model and model_data is set */
    colibri_model_t *model;      /* a shared model; the session takes a reference of its own */
    int32_t max_batch_size;      /* slots; 0: 1; at most 4096 */
    int32_t max_seq_len;         /* tokens per slot; 0: the model's max_position, at most 4096. May exceed max_position */
    int32_t dtype;               /* colibri_dtype_t the file must have; 0: any. A different file is COLIBRI_ERR_UNSUPPORTED */
    int32_t top_k;               /* experts per token; 0: the model's; at most its num_experts */
    int32_t num_threads;         /* including the caller's; 0: one per physical core this process may use; at most 256 */
    int32_t isa;                 /* colibri_isa_t */
    int32_t outputs;             /* colibri_output_t */
    int32_t kv_dtype;            /* of the KV cache: COLIBRI_DTYPE_F32, _F16 or _Q8 (a scale per key and value of a head);
                                    0: F32 if the file's dtype is f32, else F16 */
    int32_t activation_bits;     /* q8, q4 files: 8 or 16 for every product; 0: 8 in routed experts, 16 elsewhere. Others: ignored */
    int32_t max_chunk_tokens;    /* tokens computed together inside infer, 0: 512. Sets workspace and speed; results only
                                    with a load_balancing_strategy */
    void *workspace;             /* bring your own memory: 64-byte aligned, owned by the caller, untouched after colibri_free */
    size_t workspace_size;       /* its bytes, at least colibri_workspace_size's answer; 0: exactly that many, on the caller's
                                    word. No workspace (NULL): one allocation in init */
    uint64_t expert_cache_size;  /* STREAM: below 1,048,576 that many experts of all layers together, else bytes. At least 2
                                    experts. 0: a quarter of the model's. An error in other modes */
    uint64_t hugepage_size;      /* HUGE: 0, 2097152 or 1073741824 (bytes; 1 GiB pages come from a reserved pool alone). An error
                                    in other modes */
    const char *numa_policy;     /* where weights lie on machines with several memory nodes. NULL or "none": where the system puts
                                    them. "interleave": routed expert e on node e mod the number of nodes, other weights page by
                                    page. A list such as "0-15:0,16-31:1": layers 0 to 15 on node 0 ...; every layer once.
                                    Other than "none", threads are tied to nodes, in equal shares, unless cpu_affinity ties them
                                    to CPUs, and take the experts of their own node first. On a machine with one node everything
                                    is on it, and the log says so */
    int32_t load_balancing_strategy; /* colibri_load_balancing_t */
    int32_t reserved0;           /* 0 */
    colibri_log_fn log;          /* NULL: silent */
    void *log_user_data;
    const char *cpu_affinity;    /* NULL or "none": threads go where the system puts them. "auto": each on a physical core of its
                                    own. A list such as "0,2,4-7": thread i stays on its i-th CPU; num_threads 0 then means all
                                    of the list. Thread 0 is the caller's own and is left alone: the host may tie it to the
                                    first CPU. A CPU that may not be used is an error. Not on macOS (COLIBRI_ERR_UNSUPPORTED) */
    int32_t residency;           /* colibri_residency_t */
    float capacity_factor;       /* of load_balancing_strategy, above 0, at most 1024; 0: 1.25. An error without a strategy */
    const char *expert_profile;  /* NULL, or a file of colibri_save_profile: which experts are used how often. STREAM: the most
                                    used ones are in the cache when init returns. The file must be of the same model */
    int32_t guard_mapping;       /* 1: MAP and LOCK survive a mapped file that is truncated or cannot be read: a process-wide
                                    handler of SIGBUS is installed (once, by init) that puts zeros in place of this model's weights
                                    and hands other faults on to the handler before it. The call then ends with COLIBRI_ERR_IO, and so do
                                    all later ones on that model. A handler that the host installs later undoes it, unless it
                                    calls ours. 0: no handler, and such a file ends the process */
    int32_t reserved1;           /* 0 */
    const void *model_data;      /* instead of model_path and model: the bytes of a .colibri file in memory of the caller's (flash,
                                    an asset), used where they lie; see colibri_model_open_memory. STREAM and guard_mapping need
                                    a file: COLIBRI_ERR_UNSUPPORTED */
    size_t model_size;           /* its bytes; 0 without model_data */
    colibri_parallel_for_fn parallel_for; /* the host's own threads, see above: num_threads says how many tasks may run at once,
                                    and no threads are started but those that read (STREAM). Not with cpu_affinity. NULL: the
                                    library's own threads */
    void *parallel_for_user_data;
} colibri_config_t;
#define COLIBRI_CONFIG_INIT COLIBRI_INIT_(colibri_config_t)

/* Exact bytes of workspace that colibri_init will use for this config on this machine (num_threads 0 is resolved here too),
 * weights of HUGE and cache of STREAM included. */
COLIBRI_API colibri_status_t colibri_workspace_size(const colibri_config_t *config, size_t *bytes);
/* Create a session: maps the model if given by path, takes the workspace, starts the threads. NULL on failure. */
COLIBRI_API colibri_t *colibri_init(const colibri_config_t *config);
/* Stop the threads and free what the session owns. NULL is ignored. Not while another thread is inside the session. */
COLIBRI_API void colibri_free(colibri_t *ctx);
COLIBRI_API const colibri_model_t *colibri_model(const colibri_t *ctx); /* valid until colibri_free; no reference is given */

/* Hand over the next tokens: lengths[i] new tokens for slot i, 0 = the slot is idle; `tokens` holds them packed in slot
 * order. 1 <= batch <= max_batch_size. All are checked and copied before anything changes. Replaces an input not yet run.
 * Errors: COLIBRI_ERR_TOKEN, COLIBRI_ERR_SLOT_FULL, COLIBRI_ERR_INVALID_ARGUMENT (also if every length is 0). [no alloc] */
COLIBRI_API colibri_status_t colibri_set_input(colibri_t *ctx, const int32_t *tokens, const int32_t *lengths, int32_t batch);
/* Run them and append them to their slots. On COLIBRI_ERR_CANCELLED no slot has changed. On COLIBRI_ERR_NOT_FINITE the slots
 * that colibri_slot_status names have not changed and the others have, with valid output. COLIBRI_ERR_IO: weights could not be
 * read (STREAM; MAP and LOCK with guard_mapping); no slot has changed. The input is used up. [no alloc] */
COLIBRI_API colibri_status_t colibri_infer(colibri_t *ctx);
/* Copy (LAST, HIDDEN) or compute (ALL: the head runs here, straight into `output`) the results of the latest infer.
 * `output`: float, row-major, unpadded rows, 64-byte aligned; `bytes` at least colibri_output_size. In LAST, the row of an
 * idle slot repeats its latest logits (zeros if it never had any). Rows of a slot that failed are zero. [no alloc] */
COLIBRI_API colibri_status_t colibri_get_output(colibri_t *ctx, float *output, size_t bytes);
COLIBRI_API colibri_status_t colibri_output_size(const colibri_t *ctx, size_t *bytes); /* of the latest infer [no alloc] */
COLIBRI_API colibri_status_t colibri_slot_status(const colibri_t *ctx, int32_t slot);  /* COLIBRI_OK or _NOT_FINITE [no alloc] */

COLIBRI_API int32_t colibri_slot_length(const colibri_t *ctx, int32_t slot); /* tokens in the slot's cache; -1: bad slot */
/* Forget all but the slot's first `length` tokens (<= its length). Its LAST logits become zeros, and an input not yet run is
 * dropped. [no alloc] */
COLIBRI_API colibri_status_t colibri_truncate(colibri_t *ctx, int32_t slot, int32_t length);
COLIBRI_API colibri_status_t colibri_reset(colibri_t *ctx); /* truncate every slot to 0, drop pending input and output [no alloc] */
/* From any thread: a running infer (or get_output, ALL) ends soon with COLIBRI_ERR_CANCELLED; without one, the next of
 * them that has something to compute does. [no alloc] */
COLIBRI_API void colibri_cancel(colibri_t *ctx);

/* ---- Sampling --------------------------------------------------------------------------------------------------------- */

typedef struct colibri_sampling_t {
    uint32_t struct_size;
    float temperature;        /* 0: greedy, ties to the lowest id; else logits are divided by it */
    int32_t top_k;            /* keep the k most likely tokens; 0: all */
    float top_p;              /* keep the smallest set with probability >= top_p (nucleus); 0 or 1: all */
    float min_p;              /* drop tokens less likely than min_p * the most likely one; 0: none */
    float repetition_penalty; /* of tokens already in the slot (CTRL, arXiv 1909.05858): l > 0 ? l / r : l * r; 0 or 1: none */
    uint64_t seed;            /* the draw depends on (seed, position) alone: repeatable, in any order, on any slot */
} colibri_sampling_t;
#define COLIBRI_SAMPLING_INIT COLIBRI_INIT_(colibri_sampling_t)

/* Choose the slot's next token from its latest logits (any output mode but HIDDEN). Order: penalty, temperature, top-k,
 * top-p, min-p, draw. NULL sampling is greedy. The token is not appended: pass it to colibri_set_input. [no alloc] */
COLIBRI_API colibri_status_t colibri_sample(colibri_t *ctx, int32_t slot, const colibri_sampling_t *sampling, int32_t *token);

/* ---- For hosts that own the rest of a model ----------------------------------------------------------------------------- */

/* One layer's router: the experts and their weights for `n` tokens. hidden [n][hidden_size], 64-byte aligned, is what the
 * router sees (already normed). expert_ids and weights are [n][top_k], most likely first, ties to the lower id; weights are
 * after normalisation and scaling. A NaN or infinite row: COLIBRI_ERR_NOT_FINITE, its ids are -1 and weights 0, the other
 * rows are right. Errors: layer without experts: COLIBRI_ERR_INVALID_ARGUMENT. [no alloc] */
COLIBRI_API colibri_status_t colibri_route_tokens(colibri_t *ctx, int32_t layer, const float *hidden, int32_t n,
                                                  int32_t *expert_ids, float *weights);

/* One layer's experts: output[t] = sum over the chosen experts of weight * expert(hidden[t]), plus the (gated) shared expert; of
 * a dense layer its MLP. The router is asked inside. hidden and output are float [n][hidden_size], row-major, 64-byte aligned;
 * hidden is already normed, no residual is added, and they may be the same buffer. Rows do not depend on each other,
 * but for a load_balancing_strategy. A NaN or infinity in a row's result: COLIBRI_ERR_NOT_FINITE naming the first such row,
 * which becomes zeros; the other rows are right. Slots and their caches are not touched. [no alloc] */
COLIBRI_API colibri_status_t colibri_moe_forward(colibri_t *ctx, int32_t layer, const float *hidden, int32_t n, float *output);

/* ---- Statistics --------------------------------------------------------------------------------------------------------- */

#define COLIBRI_HISTOGRAM 28

typedef struct colibri_stats_t {
    uint32_t struct_size;
    int32_t num_threads;
    int32_t isa;                 /* colibri_isa_t in use */
    int32_t num_layers, num_experts;
    int32_t reserved0;
    uint64_t workspace_bytes;
    uint64_t kv_bytes;           /* of it, for the KV cache */
    uint64_t infer_calls;
    uint64_t prompt_tokens;      /* tokens of slots that got more than one in a call */
    uint64_t decode_tokens;      /* tokens of slots that got exactly one */
    uint64_t infer_ns;           /* wall time inside colibri_infer */
    uint64_t last_infer_ns;
    uint64_t attention_ns;       /* wall time by stage, summed over layers: norm, qkv, RoPE, attention, output projection */
    uint64_t router_ns;
    uint64_t experts_ns;         /* routed and shared experts and dense MLPs */
    uint64_t head_ns;
    uint64_t weight_bytes;       /* weight bytes read, each expert once per call and chunk that used it */
    int32_t residency;           /* colibri_residency_t in effect: MAP where LOCK was refused */
    int32_t guarded;             /* 1: guard_mapping is in effect */
    uint64_t hugepage_size;      /* bytes of a page of the weights where huge pages were given, else 0 */
    uint64_t hugepage_bytes;     /* weights (and cache) that lie on such pages, as the system said after init */
    int32_t hugepage_pool;       /* 1: they come from a reserved pool (hugetlbfs), 0: they are transparent ones */
    int32_t direct_io;           /* STREAM: 1: reads bypass the page cache (O_DIRECT) */
    int32_t numa_nodes;          /* memory nodes that weights were spread over; 0: no policy */
    int32_t memory_short;        /* MAP: 1: the model is larger than the memory this process may use, experts come from disk */
    uint64_t cache_experts;      /* STREAM: experts the cache has room for */
    uint64_t cache_pinned;       /* of them, held for being used often */
    uint64_t cache_hits;         /* experts that were there when a layer needed them; a hit or miss is counted once per layer and */
    uint64_t cache_misses;       /* chunk. Misses had to be read while the layer waited */
    uint64_t cache_hits_ahead;   /* hits that look-ahead had read or begun to read */
    uint64_t read_bytes;         /* read from the file since init or stats_reset, look-ahead included */
    uint64_t read_bytes_ahead;   /* of them by look-ahead */
    uint64_t read_wait_ns;       /* threads' time spent waiting for reads, summed */
    uint64_t ahead_predicted;    /* experts that look-ahead expected, whether read or there already, in calls with one token */
    uint64_t ahead_correct;      /* of them, chosen by their layer */
    uint64_t repeat_correct;     /* chosen experts of the same calls and layers that the layer's token before had chosen too */
    uint64_t capacity_moved;     /* token-expert pairs that load balancing moved */
    uint64_t capacity_dropped;   /* and dropped */
    uint64_t infer_histogram[COLIBRI_HISTOGRAM]; /* calls of infer by duration: [i] took at most 2^i microseconds and more than
                                    2^(i-1); the last one has all longer ones */
    uint64_t read_histogram[COLIBRI_HISTOGRAM];  /* reads of one expert, likewise */
} colibri_stats_t;
#define COLIBRI_STATS_INIT COLIBRI_INIT_(colibri_stats_t)
COLIBRI_API colibri_status_t colibri_stats(const colibri_t *ctx, colibri_stats_t *stats); /* since init or stats_reset [no alloc] */

typedef enum colibri_place_t {
    COLIBRI_PLACE_DISK = 0,   /* STREAM: in the file alone */
    COLIBRI_PLACE_MAPPED = 1, /* MAP: in the page cache, if the system keeps it there */
    COLIBRI_PLACE_LOCKED = 2,
    COLIBRI_PLACE_MEMORY = 3, /* HUGE: in the workspace */
    COLIBRI_PLACE_CACHED = 4, /* STREAM: in the cache, or on its way there */
    COLIBRI_PLACE_PINNED = 5  /* STREAM: in the cache and held there */
} colibri_place_t;

typedef struct colibri_expert_stats_t {
    uint64_t tokens;     /* routed to it */
    uint64_t calls;      /* chunks in which it had at least one token */
    uint64_t load_ns;    /* STREAM: from asking for its reads to having them, summed (0 in other modes: MAP loads inside compute) */
    uint64_t compute_ns; /* gate, up and down products, summed over threads */
    uint64_t merge_ns;   /* its share, by tokens, of the weighted sum */
    uint64_t hits;       /* chunks that found it in memory; in other modes than STREAM all do */
    uint64_t misses;     /* chunks that waited for its read */
    uint64_t bytes_read; /* from the file, look-ahead included */
    int32_t place;       /* colibri_place_t, now */
    int32_t node;        /* memory node it was placed on; -1: no numa_policy */
} colibri_expert_stats_t;
/* rows [num_experts] of one layer; capacity in rows. A dense layer is COLIBRI_ERR_INVALID_ARGUMENT. [no alloc] */
COLIBRI_API colibri_status_t colibri_expert_stats(const colibri_t *ctx, int32_t layer, colibri_expert_stats_t *rows, size_t capacity);
COLIBRI_API void colibri_stats_reset(colibri_t *ctx);
/* All of it as text in the Prometheus exposition format (0.0.4), UTF-8, not zero-terminated: counters, gauges and histograms
 * named colibri_*, experts with the labels layer and expert. *bytes receives the size, also when capacity is too small (then
 * COLIBRI_ERR_BUFFER_TOO_SMALL; text may be NULL if capacity is 0). [no alloc] */
COLIBRI_API colibri_status_t colibri_metrics(const colibri_t *ctx, char *text, size_t capacity, size_t *bytes);
/* Write how often each expert was used (decayed counts) to a small file, for config.expert_profile of later sessions on the same
 * model. In any residency. Written beside the target and renamed: on failure the old file stays (a link, device or pipe is
 * written to as it is). Temporary memory: malloc. */
COLIBRI_API colibri_status_t colibri_save_profile(const colibri_t *ctx, const char *path);

/* ---- Writing files: what converters need from C -------------------------------------------------------------------------- */

/* Bytes of a packed matrix [rows][k] of a type (see colibri_format.h), 0 if the arguments are out of range. */
COLIBRI_API uint64_t colibri_packed_size(int32_t dtype, uint32_t rows, uint32_t k);

/* How the row scale of q8 and q4 is chosen. (The scales of 16 k in q4 always make the squared error least.) */
typedef enum colibri_scale_rule_t {
    COLIBRI_SCALE_LEAST_SQUARES = 0, /* the one that makes the squared error least, of some tried */
    COLIBRI_SCALE_PERCENTILE = 1,    /* 99.9 % of |w| in range, the rest saturates */
    COLIBRI_SCALE_MAX = 2            /* the largest |w| is the largest integer: 127, in q4 7 * 18 */
} colibri_scale_rule_t;

typedef struct colibri_pack_t {
    uint32_t struct_size;
    int32_t src_dtype;     /* COLIBRI_DTYPE_F32, _F16 or _BF16 */
    int32_t dst_dtype;     /* COLIBRI_DTYPE_F32, _F16, _BF16, _Q8 or _Q4 */
    int32_t scale_rule;    /* colibri_scale_rule_t */
    const void *src;       /* row-major [rows][k], rows src_stride elements apart; 0 = k. NULL row blocks are not allowed */
    uint64_t src_stride;
    uint32_t rows, k;      /* unpadded */
    void *dst;             /* receives 16-row blocks; 64-byte aligned */
    uint64_t dst_block_stride; /* bytes from one 16-row block to the next; 0 = contiguous. gate and up use twice the block size */
    float *dst_scale;      /* q8, q4: receives 16 scales for each block; NULL = right after the last contiguous block */
    uint64_t dst_scale_stride; /* floats from one block's scales to the next's; 0 = 16 */
    double squared_error;  /* out: sum of (w - stored w)^2, in the unrotated space. Quantised columns of padding count too */
    double squared_norm;   /* out: sum of w^2 */
} colibri_pack_t;
#define COLIBRI_PACK_INIT COLIBRI_INIT_(colibri_pack_t)
/* Pack a matrix into tiles, padding included. NaN or infinity in src: COLIBRI_ERR_NOT_FINITE naming row and column. f32 to
 * f16 that overflows: COLIBRI_ERR_NOT_FINITE too. Same bytes on every machine. Thread-safe. Temporary memory: a row
 * block of words (f32, q4), half words or bytes, in q4 another of floats. */
COLIBRI_API colibri_status_t colibri_pack_matrix(colibri_pack_t *pack);
/* The checksum of the format: CRC-32 as in zlib, continued from `crc` (0 to begin). */
COLIBRI_API uint32_t colibri_crc32(uint32_t crc, const void *data, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
